package replicas

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestBorrow: a volume on a disk that its image is still copied to is attached at once and reads the other disk's copy,
// also after the data process was renewed, and needs that disk no more when its own copy is there.
func TestBorrow(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWorld(t, filepath.Join(dir, "near"), filepath.Join(dir, "far"))
	var n api.Node
	n.Name = testNode
	await(w, &n, &api.NodeList{}, "ready", func(n *api.Node) bool {
		return len(n.Status.Disks) == 2 && n.Status.Disks[0].Ready && n.Status.Disks[1].Ready
	})
	disk := map[string]api.UID{}
	for _, d := range n.Status.Disks {
		disk[filepath.Base(d.Path)] = d.UID
	}
	layer := api.NewUID()
	img := &api.BackingImage{ObjectMeta: named("debian"), Spec: api.BackingImageSpec{SourceType: api.SourceFile}}
	w.create(img)
	editStatus(w, img, func(i *api.BackingImage) {
		i.Status = api.BackingImageStatus{UUID: api.NewUID(), Layers: []api.UID{layer}, State: api.ImageReady,
			VirtualSize: 32 * mib}
	})
	data := bytes.Repeat([]byte("golden!!"), mib/8)
	put := func(where string) {
		t.Helper()
		on, err := w.disks.Layers(disk[where])
		if err != nil {
			t.Fatal(err)
		}
		lw, err := on.Create(w.ctx, string(layer), 32*mib)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := lw.WriteAt(data, 5*mib); err != nil {
			t.Fatal(err)
		}
		if _, _, err := lw.Seal(w.ctx); err != nil {
			t.Fatal(err)
		}
	}
	copies := map[string]*api.ImageCopy{}
	state := func(where string, s api.ImageState) {
		t.Helper()
		c := copies[where]
		if c == nil {
			c = &api.ImageCopy{ObjectMeta: named("copy-" + where), Spec: api.ImageCopySpec{Image: "debian",
				UUID: img.Status.UUID, Layers: img.Status.Layers, Node: testNode, Disk: disk[where]}}
			w.create(c)
			copies[where] = c
		}
		editStatus(w, c, func(c *api.ImageCopy) { c.Status.State = s })
	}
	state("near", api.ImageInProgress)
	put("far")
	state("far", api.ImageReady)

	vol := volume("v1", 64*mib)
	vol.Spec.BackingImage, vol.Spec.DiskSelector = "debian", []string{"near"}
	w.create(vol)
	w.volumeState("v1", api.VolumeDetached)
	w.create(attachment("v1"))
	a := w.attached("v1")
	checkDevice(t, a.Status.Device, 5*mib, data)
	var r api.Replica
	r.Name = w.volumeState("v1", api.VolumeAttached).Status.Members[0]
	await(w, &r, &api.ReplicaList{}, "borrowing", func(r *api.Replica) bool {
		return r.Spec.Disk == disk["near"] && strings.Contains(r.Status.Message, "reads layers from disk")
	})
	own := bytes.Repeat([]byte("own data"), mib/8)
	writeDevice(t, a.Status.Device, 6*mib, own)
	w.stopData()
	w.startData()
	w.sh("blockdev --flushbufs " + a.Status.Device)
	checkDevice(t, a.Status.Device, 5*mib, data)
	checkDevice(t, a.Status.Device, 6*mib, own)

	put("near")
	state("near", api.ImageReady)
	await(w, &r, &api.ReplicaList{}, "at home", func(r *api.Replica) bool { return r.Status.Message == "" })
	if err := os.RemoveAll(filepath.Join(dir, "far", "layers")); err != nil {
		t.Fatal(err)
	}
	w.sh("blockdev --flushbufs " + a.Status.Device)
	checkDevice(t, a.Status.Device, 5*mib, data)
	checkDevice(t, a.Status.Device, 6*mib, own)
}
