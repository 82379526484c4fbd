package replicas

import (
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// TestImageBindsItsVolumes: the selectors of an image bind the image's volumes: no replica is placed on a disk
// forbidden to the image, the condition Scheduled says why, and looser selectors make place.
func TestImageBindsItsVolumes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWorld(t, filepath.Join(dir, "far"), filepath.Join(dir, "near"))
	n := await(w, &api.Node{ObjectMeta: named(testNode)}, &api.NodeList{}, "ready", func(n *api.Node) bool {
		return len(n.Status.Disks) == 2 && n.Status.Disks[0].Ready && n.Status.Disks[1].Ready
	})
	img := &api.BackingImage{ObjectMeta: named("debian"), Spec: api.BackingImageSpec{SourceType: api.SourceFile,
		DiskSelector: []string{"nvme"}}}
	w.create(img)
	layer := api.NewUID()
	editStatus(w, img, func(i *api.BackingImage) {
		i.Status = api.BackingImageStatus{UUID: api.NewUID(), Layers: []api.UID{layer}, State: api.ImageReady,
			VirtualSize: 16 * mib}
	})
	for _, d := range n.Status.Disks {
		on, err := w.disks.Layers(d.UID)
		if err != nil {
			t.Fatal(err)
		}
		lw, err := on.Create(w.ctx, string(layer), 16*mib)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := lw.Seal(w.ctx); err != nil {
			t.Fatal(err)
		}
		c := &api.ImageCopy{ObjectMeta: named("copy-" + filepath.Base(d.Path)), Spec: api.ImageCopySpec{Image: "debian",
			UUID: img.Status.UUID, Layers: img.Status.Layers, Node: testNode, Disk: d.UID}}
		w.create(c)
		editStatus(w, c, func(c *api.ImageCopy) { c.Status.State = api.ImageReady })
	}

	vol := volume("v1", 16*mib)
	vol.Spec.BackingImage, vol.Spec.NumberOfReplicas = "debian", 2
	vol.Spec.ReplicaSoftAntiAffinity = "enabled"
	w.create(vol)
	scheduled := func(reason, why string) func(*api.Volume) bool {
		return func(v *api.Volume) bool {
			c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionScheduled)
			return c != nil && c.Reason == reason && strings.Contains(c.Message, why)
		}
	}
	w.volumeIs("v1", "kept off all disks", scheduled("NoDisk", "it lacks the tag nvme, which backing image debian asks for"))
	edit(w, img, func(i *api.BackingImage) { i.Spec.DiskSelector = []string{"near"} })
	w.volumeIs("v1", "on the disk that suits", func(v *api.Volume) bool {
		return len(v.Status.Members) == 1 &&
			scheduled("Partly", "far of node n1: it lacks the tag near, which backing image debian asks for")(v)
	})
	edit(w, img, func(i *api.BackingImage) { i.Spec.DiskSelector = nil })
	w.volumeIs("v1", "on both disks", scheduled("Placed", ""))
}
