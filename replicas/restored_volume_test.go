package replicas

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

const urlOfBackup = "file:///store?backup=friday&volume=old"

// hiddenImage waits for the hidden image of a volume of a backup.
func (w *world) hiddenImage(volume string) *api.BackingImage {
	w.t.Helper()
	v := w.volumeIs(volume, "being restored", func(v *api.Volume) bool {
		return v.Status.RestoreStatus != nil && v.Status.RestoreStatus.BackingImage != ""
	})
	return await(w, &api.BackingImage{ObjectMeta: named(v.Status.RestoreStatus.BackingImage)}, &api.BackingImageList{},
		"made", func(*api.BackingImage) bool { return true })
}

// putImage puts the layer of an image on a disk; the bytes of data begin at 5 MiB.
func (w *world) putImage(img *api.BackingImage, disk api.UID, data []byte) {
	w.t.Helper()
	on, err := w.disks.Get(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	layer := string(img.Status.Layers[0])
	lw, err := on.Create(w.ctx, layer, img.Status.VirtualSize)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := lw.WriteAt(data, 5*mib); err != nil {
		w.t.Fatal(err)
	}
	if _, _, err := lw.Seal(w.ctx); err != nil {
		w.t.Fatal(err)
	}
	if err := on.PutImage(block.Image{UID: string(img.Status.UUID), Name: img.Name, Layers: []string{layer}}); err != nil {
		w.t.Fatal(err)
	}
	c := &api.ImageCopy{ObjectMeta: named("copy-" + string(disk)), Spec: api.ImageCopySpec{Image: img.Name,
		UUID: img.Status.UUID, Layers: img.Status.Layers, Node: testNode, Disk: disk}}
	w.create(c)
	editStatus(w, c, func(c *api.ImageCopy) { c.Status.State = api.ImageReady })
}

// imageGone plays the room imagestore: the deleted image leaves its disks, once no Replica stands on the image.
func (w *world) imageGone(img *api.BackingImage, on ...api.UID) {
	w.t.Helper()
	await(w, img, &api.BackingImageList{}, "deleted", func(i *api.BackingImage) bool { return i.DeletionTimestamp != nil })
	var reps api.ReplicaList
	if err := w.c.List(w.ctx, &reps, client.MatchingLabels{api.LabelImage: img.Name}); err != nil {
		w.t.Fatal(err)
	}
	for _, r := range reps.Items {
		w.t.Errorf("replica %s stands on the deleted image", r.Name)
	}
	for _, uid := range on {
		disk, err := w.disks.Get(uid)
		if err != nil {
			w.t.Fatal(err)
		}
		if err := disk.Forget(string(img.Status.UUID)); err != nil {
			w.t.Fatal(err)
		}
		w.remove(&api.ImageCopy{ObjectMeta: named("copy-" + string(uid))})
	}
	edit(w, img, func(i *api.BackingImage) { i.Finalizers = nil })
}

// TestVolumeOfABackup: a volume of a backup says why its restore fails, and heals. It has the backup's bytes when the
// hidden image is ready, and keeps the image until each replica has the layer on its own disk. A clone waits for this,
// and shares the layer as one of the volume's own. After the deletion of the image, the volume has its bytes, gets new
// replicas, is snapshotted and cloned, and leaves nothing behind.
func TestVolumeOfABackup(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	near, far := disk["near"], disk["far"]
	v := volume("v1", 64*mib)
	v.Spec.FromBackup, v.Spec.NumberOfReplicas, v.Spec.ReplicaSoftAntiAffinity = urlOfBackup, 2, "enabled"
	w.create(v)
	img := w.hiddenImage("v1")
	if s := img.Spec; img.Labels[api.LabelHidden] != "v1" || img.Annotations[api.AnnotationPrefer] != testNode ||
		s.SourceType != api.SourceRestore || s.SourceParameters[api.RestoreBackupURL] != urlOfBackup {
		t.Errorf("the hidden image is %+v, %+v", img.ObjectMeta, s)
	}
	editStatus(w, img, func(i *api.BackingImage) {
		i.Status = api.BackingImageStatus{UUID: api.NewUID(), Layers: []api.UID{api.NewUID()}, State: api.ImageFailed,
			Message: "the target is away"}
	})
	w.volumeIs("v1", "explained", func(v *api.Volume) bool {
		st := v.Status.RestoreStatus
		return v.Status.State == api.VolumeCreating && strings.Contains(v.Status.Message, "backup friday failed: the target") &&
			st != nil && st.State == api.CloneFailed && st.Message == "the target is away" && st.Backup == "friday"
	})
	w.create(&api.Volume{ObjectMeta: named("early"), Spec: api.VolumeSpec{Size: 64 * mib, DataSource: "vol://v1"}})
	w.volumeIs("early", "waiting", says("v1, which is to be cloned, is still being restored"))

	data := bytes.Repeat([]byte("restored"), mib/8)
	status := func(copies map[api.UID]api.ImageState) {
		editStatus(w, img, func(i *api.BackingImage) {
			i.Status.State, i.Status.Message, i.Status.VirtualSize, i.Status.Copies = api.ImageReady, "", 64*mib, nil
			for _, d := range []api.UID{near, far} {
				if s := copies[d]; s != "" {
					i.Status.Copies = append(i.Status.Copies, api.ImageCopySummary{Disk: d, Node: testNode, State: s})
				}
			}
		})
	}
	img.Status.VirtualSize = 64 * mib
	w.putImage(img, near, data)
	status(map[api.UID]api.ImageState{near: api.ImageReady})
	w.volumeIs("v1", "usable with two replicas, and restored on one disk", func(v *api.Volume) bool {
		st := v.Status.RestoreStatus
		return len(v.Status.Members) == 2 && st.State == api.CloneInitiated && strings.Contains(st.Message, "lacks data")
	})
	w.putImage(img, far, data)
	status(map[api.UID]api.ImageState{near: api.ImageReady, far: api.ImageReady})
	w.imageGone(img, near, far)
	w.volumeIs("v1", "restored", func(v *api.Volume) bool {
		st := v.Status.RestoreStatus
		return st.State == api.CloneCompleted && st.BackingImage == "" && v.Status.Robustness == api.RobustHealthy
	})
	w.volumeState("early", api.VolumeDetached)
	if r := w.memberOf("early"); len(r.Spec.Layers) > 0 || r.Labels[api.LabelImage] != "" {
		t.Errorf("the clone stands on an image: %+v", r)
	}

	w.create(attachment("v1"))
	checkDevice(t, w.attached("v1").Status.Device, 5*mib, data)
	w.snapshot("v1", "s1")
	lost := w.memberOf("v1")
	w.remove(lost) // the engine rebuilds another replica, without an image
	w.volumeIs("v1", "rebuilt", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && !slices.Contains(v.Status.Members, lost.Name) &&
			v.Status.Robustness == api.RobustHealthy
	})
	checkDevice(t, w.attached("v1").Status.Device, 5*mib, data)
	w.begin("late", "snap://v1/s1", "far", "", 64*mib)
	w.volumeState("late", api.VolumeDetached)
	w.detach("v1")
	w.remove(&api.Snapshot{ObjectMeta: named("s1")})
	w.remove(&api.Volume{ObjectMeta: named("v1")})
	gone(w, &api.Volume{ObjectMeta: named("v1")}, &api.VolumeList{})
	for _, clone := range []string{"early", "late"} {
		w.create(attachment(clone))
		checkDevice(t, w.attached(clone).Status.Device, 5*mib, data)
		w.detach(clone)
		w.remove(&api.Volume{ObjectMeta: named(clone)})
		gone(w, &api.Volume{ObjectMeta: named(clone)}, &api.VolumeList{})
	}
	w.nothingLeft()
}

// TestDeletedVolumeDeletesItsHiddenImage: a volume that is deleted during the restore takes its hidden image along. A
// hidden image that a user deletes is made again.
func TestDeletedVolumeDeletesItsHiddenImage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := volume("v1", 64*mib)
	v.Spec.FromBackup = urlOfBackup
	w.create(v)
	first := w.hiddenImage("v1")
	w.abandon(first)
	again := await(w, &api.BackingImage{ObjectMeta: named(first.Name)}, &api.BackingImageList{}, "made again",
		func(i *api.BackingImage) bool { return i.UID != first.UID })
	w.remove(v)
	await(w, again, &api.BackingImageList{}, "deleted", func(i *api.BackingImage) bool { return i.DeletionTimestamp != nil })
	edit(w, again, func(i *api.BackingImage) { i.Finalizers = nil })
	gone(w, &api.Volume{ObjectMeta: named("v1")}, &api.VolumeList{})
}
