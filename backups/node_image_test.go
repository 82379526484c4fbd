package backups_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/driver/kubeapi/apitest"
)

// image is a backing image on the disk of the world.
type image struct {
	name    string
	uuid    api.UID
	layers  []api.UID
	digest  string
	content []byte
}

// newImage records an image of layers on the disk; each map of writes, by offset, is one more layer.
func (w *world) newImage(name string, size int64, below []api.UID, content []byte, writes map[int64][]byte) *image {
	w.T.Helper()
	i := &image{name: name, uuid: api.NewUID(), layers: append(below, api.NewUID()), content: make([]byte, size)}
	copy(i.content, content)
	top := string(i.layers[len(i.layers)-1])
	l, err := w.disk.Create(w.Ctx, top, size)
	must(w.T, err)
	for off, b := range writes {
		copy(i.content[off:], b)
		_, err := l.WriteAt(b, off)
		must(w.T, err)
	}
	i.digest, _, err = l.Seal(w.Ctx)
	must(w.T, err)
	record := block.Image{UID: string(i.uuid), Name: name, Format: "raw", VirtualSize: size, Digest: i.digest}
	for _, uid := range i.layers {
		record.Layers = append(record.Layers, string(uid))
	}
	must(w.T, w.disk.PutImage(record))
	object := &api.BackingImage{ObjectMeta: apitest.Named(name), Spec: api.BackingImageSpec{
		SourceType: api.SourceDownload, MinNumberOfCopies: 3,
		SourceParameters: map[string]string{"url": "https://user:secret@example.com/golden.qcow2?token=secret"}}}
	w.Create(object)
	apitest.EditStatus(w.Server, object, func(o *api.BackingImage) {
		o.Status.UUID, o.Status.Layers, o.Status.Digest, o.Status.State = i.uuid, i.layers, i.digest, api.ImageReady
		o.Status.VirtualSize, o.Status.Checksum = size, strings.Repeat("ab", 64)
	})
	i.digest = object.ContentDigest()
	return i
}

// backUp creates the backup of an image, as the controller role hands it to the node.
func (w *world) backUp(name string, i *image) *api.BackupBackingImage {
	w.T.Helper()
	b := &api.BackupBackingImage{ObjectMeta: apitest.Named(name), Spec: api.BackupBackingImageSpec{
		BackupTargetName: w.target.Name, BackingImageName: i.name, Digest: i.digest, UserCreated: true,
		Labels: map[string]string{"of": name}, Source: &api.ImageSource{UUID: i.uuid, Layers: i.layers,
			VirtualSize: int64(len(i.content)), Checksum: strings.Repeat("ab", 64), Node: nodeName,
			Disk: api.UID(w.disk.UID())}}}
	b.Labels = map[string]string{api.LabelImage: api.LabelValue(i.name), api.LabelBackupTarget: w.target.Name}
	b.Finalizers = []string{api.Finalizer}
	w.Create(b)
	return b
}

func (w *world) awaitImage(b *api.BackupBackingImage, what string, ok func(*api.BackupBackingImage) bool) {
	w.T.Helper()
	apitest.Await(w.Server, b, &api.BackupBackingImageList{}, what, ok)
}

func (w *world) awaitStored(b *api.BackupBackingImage) {
	w.T.Helper()
	w.awaitImage(b, "Completed", func(b *api.BackupBackingImage) bool { return b.Status.State == api.BackupCompleted })
}

// dumpImage is the disk of an image's backup, as restic reads it.
func (w *world) dumpImage(b *api.BackupBackingImage) []byte {
	w.T.Helper()
	return w.restic("dump", b.Status.SnapshotID, "/images/"+b.Spec.BackingImageName+"/disk/0000/00/data")
}

// TestImageIsBackedUp: restic reads the bytes of an image whose size is no multiple of a block. An image that was made
// of a volume with the first image, and the volume itself, upload only their own chunks. The description has no secret.
// The backup is restored by its URL, with the checksum of the image.
func TestImageIsBackedUp(t *testing.T) {
	w := newWorld(t)
	const size = 4*chunk + 5*512
	first := w.newImage("golden", size, nil, nil, map[int64][]byte{0: randomBytes(1, 3*chunk),
		4 * chunk: randomBytes(2, 4096)[:5*512]})
	w.start(nil)
	b := w.backUp("b1", first)
	w.awaitStored(b)
	if s := b.Status; s.Size != size || s.Digest != first.digest || s.Checksum != strings.Repeat("ab", 64) ||
		s.BackingImage != "golden" || s.NewlyUploadDataSize < 3*chunk || s.Progress != 100 || s.OwnerID != nodeName ||
		s.URL != w.target.Spec.BackupTargetURL+"?backingImage=golden&backup=b1" || s.Labels["of"] != "b1" {
		t.Errorf("status %+v", s)
	}
	if !bytes.Equal(w.dumpImage(b), first.content) {
		t.Error("restic reads other bytes than the image has")
	}
	description := string(w.restic("dump", b.Status.SnapshotID, "/images/golden/drover.json"))
	if !strings.Contains(description, `"minNumberOfCopies":3`) || !strings.Contains(description, "example.com/golden.qcow2") ||
		!strings.Contains(description, strings.Repeat("ab", 64)) || strings.Contains(description, "secret") {
		t.Errorf("the description is %s", description)
	}

	second := w.newImage("derived", 5*chunk, first.layers, first.content, map[int64][]byte{chunk: randomBytes(3, chunk)})
	if second.digest == first.digest || len(second.digest) != 64 {
		t.Errorf("digest %q", second.digest)
	}
	d := w.backUp("b2", second)
	w.awaitStored(d)
	if n := d.Status.NewlyUploadDataSize; n < chunk || n > chunk+64<<10 {
		t.Errorf("an image that shares all chunks but one uploads %d bytes", n)
	}
	if !bytes.Equal(w.dumpImage(d), second.content) {
		t.Error("restic reads other bytes than the second image has")
	}
	volume := w.newVolume("v", 6*chunk, map[int64][]byte{0: first.content[:3*chunk], 3 * chunk: randomBytes(4, 4096)})
	ofVolume := w.newBackup("b3", volume, 0)
	w.awaitState(ofVolume, api.BackupCompleted)
	if n := ofVolume.Status.NewlyUploadDataSize; n > 64<<10 {
		t.Errorf("a volume with the chunks of the image uploads %d bytes", n)
	}
	w.awaitReleased()

	open := w.openBackup(b.Status.URL)
	sink := &memorySink{got: make([]byte, size)}
	must(t, open.Restore(t.Context(), sink))
	if !bytes.Equal(sink.got, first.content) || open.Size() != size || open.Checksum() != b.Status.Checksum {
		t.Errorf("the restore has other bytes than the image, or another size or checksum: %d, %q", open.Size(),
			open.Checksum())
	}
	must(t, open.Close())
	w.check(3)
}

// TestImageThatIsDeletedMeanwhile: an image whose copy is removed in the middle of its backup is backed up all the
// same: the layers stay on the disk until the end.
func TestImageThatIsDeletedMeanwhile(t *testing.T) {
	w := newWorld(t)
	i := w.newImage("golden", 4*chunk, nil, nil, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	g := newGate("put", "data/")
	w.store.set(g.hook, nil)
	w.start(nil)
	b := w.backUp("b", i)
	w.receive(g.reached, "the backup uploads")
	must(t, w.disk.RemoveImage(string(i.uuid)))
	if _, _, err := w.disk.LayerSize(string(i.layers[0])); err != nil {
		t.Errorf("the layer is removed in the middle of its backup: %v", err)
	}
	close(g.opened)
	w.awaitStored(b)
	if !bytes.Equal(w.dumpImage(b), i.content) {
		t.Error("restic reads other bytes than the image had")
	}
	w.awaitReleased()
	if _, _, err := w.disk.LayerSize(string(i.layers[0])); !api.Is(err, api.NotFound) {
		t.Errorf("the layer stays after the backup: %v", err)
	}
	late := w.backUp("late", i)
	w.awaitImage(late, "waits for another copy", func(b *api.BackupBackingImage) bool {
		return b.Status.State == api.BackupPending && strings.Contains(b.Status.Message, "another copy may stay")
	})
	w.check(1)
}

// TestUnfinishedImageBackupLeavesNothing: the deletion of an image's backup in progress ends the work, and leaves
// neither a hold nor a snapshot.
func TestUnfinishedImageBackupLeavesNothing(t *testing.T) {
	w := newWorld(t)
	i := w.newImage("golden", 4*chunk, nil, nil, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	g := newGate("put", "snapshots/")
	w.store.set(nil, func(ctx context.Context, operation, name string) error {
		_ = g.hook(ctx, operation, name)
		return nil
	})
	w.start(nil)
	b := w.backUp("b", i)
	w.receive(g.reached, "the backup commits")
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupBackingImageList{})
	w.held()
	w.check(0)
}

// TestImageBackupsTravel: a cluster that uses the same store finds the backup of an image, with its facts, and deletes
// it in the store. While a backup of a volume names the image, the deletion waits, unless a user forces it, and the
// backup can be restored meanwhile. A backup that the store lost loses its object.
func TestImageBackupsTravel(t *testing.T) {
	w := newWorld(t)
	w.opts.Targets.Confirm = 1
	i := w.newImage("golden", 4*chunk, nil, nil, map[int64][]byte{0: randomBytes(1, chunk)})
	object := apitest.Volume("v", 6*chunk)
	object.Spec.BackingImage = "golden"
	v := w.newVolumeOf(object, map[int64][]byte{0: randomBytes(2, chunk)})
	w.start(nil)
	without := w.newBackup("without", v, 0)
	w.awaitState(without, api.BackupCompleted)
	if s := without.Status; !strings.Contains(s.Message, "has no backup of image golden") ||
		s.VolumeBackingImageDigest != i.digest || s.VolumeBackingImageChecksum != strings.Repeat("ab", 64) {
		t.Errorf("a backup without that of its image: %+v", s)
	}
	b := w.backUp("b", i)
	w.awaitStored(b)

	forgotten := b.DeepCopy()
	apitest.Edit(w.Server, b, func(b *api.BackupBackingImage) { b.Finalizers = nil })
	w.Delete(b)
	w.sync()
	found := &api.BackupBackingImage{ObjectMeta: apitest.Named("b")}
	w.awaitStored(found)
	want, got := forgotten.Status, found.Status
	if got.Digest != want.Digest || got.Checksum != want.Checksum || got.Size != want.Size || got.URL != want.URL ||
		got.SnapshotID != want.SnapshotID || found.Spec.SnapshotID != want.SnapshotID || found.Spec.UserCreated ||
		found.Labels[api.LabelImage] != "golden" || len(found.Finalizers) != 1 {
		t.Errorf("found: %+v\nwant status %+v", found, want)
	}

	w.Delete(found)
	w.awaitImage(found, "waits", func(b *api.BackupBackingImage) bool {
		return b.Status.State == api.BackupDeleting &&
			strings.Contains(b.Status.Message, "1 backup of volumes with image golden exist")
	})
	open := w.openBackup(found.Status.URL) // a restore that begins again
	must(t, open.Close())
	w.check(2)
	apitest.Edit(w.Server, found, func(b *api.BackupBackingImage) {
		b.Annotations = map[string]string{api.AnnotationForceDelete: "true"}
	})
	w.AwaitDeleted(found, &api.BackupBackingImageList{})
	w.check(1)

	again := w.backUp("again", i)
	w.awaitStored(again)
	w.restic("forget", again.Status.SnapshotID)
	w.sync()
	w.AwaitDeleted(again, &api.BackupBackingImageList{})
	w.awaitState(without, api.BackupCompleted)
}

// sync asks the owner of the target for a list of the store.
func (w *world) sync() {
	w.T.Helper()
	apitest.Edit(w.Server, w.target, func(t *api.BackupTarget) {
		asked := api.NewRequest(t.Spec.SyncRequestedAt)
		t.Spec.SyncRequestedAt = &asked
	})
}
