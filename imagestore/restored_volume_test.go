package imagestore_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/planner"
	"drover.io/drover/replicas/stack"
)

// TestHiddenImageLeavesItsLayer: the hidden image of a volume of a backup is deleted while the volume's stack names the
// layer, once no Replica stands on the image. The layer stays with its bytes, until the replica is removed.
func TestHiddenImageLeavesItsLayer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	body := stateBody(7)
	w.store.put(t, backupURL, body, "")
	w.create(&api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: "restore-v", Labels: map[string]string{
		api.LabelHidden: "v"}}, Spec: api.BackingImageSpec{SourceType: api.SourceRestore, MinNumberOfCopies: 1,
		SourceParameters: map[string]string{api.RestoreBackupURL: backupURL}}})
	img := w.state("restore-v", api.ImageReady)
	w.holds(0, img, body)
	layer := string(img.Status.Layers[0])
	replica := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: stateSize,
		Layers: []string{layer}}
	if err := w.disks[0].CreateReplica(t.Context(), replica); err != nil {
		t.Fatal(err)
	}
	r := api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "v.r", Labels: map[string]string{
		api.LabelVolume: "v", api.LabelImage: "restore-v"}}, Spec: api.ReplicaSpec{UID: api.UID(replica.UID), Volume: "v",
		VolumeUID: api.UID(replica.VolumeUID), Node: w.node, Disk: api.UID(w.disks[0].UID()), Size: stateSize,
		Layers: img.Status.Layers}}
	w.create(&r)

	w.delete(&api.BackingImage{}, "restore-v")
	w.await("restore-v", "is in use", func(i *api.BackingImage) bool {
		c := meta.FindStatusCondition(i.Status.Conditions, planner.ConditionInUse)
		return c != nil && c.Status == metav1.ConditionTrue && strings.Contains(c.Message, "v")
	})
	delete(r.Labels, api.LabelImage)
	if err := w.client.Update(t.Context(), &r); err != nil { // the layers alone do not count for a hidden image
		t.Fatal(err)
	}
	w.gone("restore-v")
	if images, err := w.disks[0].Images(); err != nil || len(images) > 0 {
		t.Errorf("the disk has the images %v, %v", images, err)
	}
	if err := w.disks[0].Verify(t.Context(), layer); err != nil {
		t.Error(err)
	}
	if root, _, err := w.disks[0].Digest(layer); err != nil || root != img.Status.Digest {
		t.Errorf("the layer's root digest is %s, %v, want %s", root, err, img.Status.Digest)
	}
	w.delete(&api.Replica{}, "v.r")
	if err := w.disks[0].RemoveReplica(replica.UID); err != nil {
		t.Fatal(err)
	}
	w.clean(0)
}

// TestHiddenImageIsDeletedInTheMiddle: the deletion of a hidden image ends the transfer, and leaves nothing on the disk.
func TestHiddenImageIsDeletedInTheMiddle(t *testing.T) {
	t.Parallel()
	for _, in := range []api.ImageState{api.ImageStarting, api.ImageInProgress} {
		t.Run(string(in), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.store.put(t, backupURL, stateBody(7), in)
			w.create(&api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: "restore-v", Labels: map[string]string{
				api.LabelHidden: "v"}}, Spec: api.BackingImageSpec{SourceType: api.SourceRestore, MinNumberOfCopies: 1,
				SourceParameters: map[string]string{api.RestoreBackupURL: backupURL}}})
			w.state("restore-v", in)
			w.delete(&api.BackingImage{}, "restore-v")
			w.gone("restore-v")
			w.clean(0)
		})
	}
}
