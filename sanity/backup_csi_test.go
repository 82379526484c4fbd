package sanity_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// claimOfBackup: a VolumeSnapshot of type bak becomes ready to use with its backup, and is listed. After the deletion of
// the volume, a claim of the snapshot is bound, staged and published while its data arrives, and has the bytes of the
// snapshot. The deletion of the VolumeSnapshot deletes the backup.
func claimOfBackup(t *testing.T, w *world) {
	w.makeTarget(t, "claims")
	a, err := w.create("claimed", 64*mib, blockCap())
	must(t, err)
	must(t, a.up())
	d := openDevice(t, a, 64*mib)
	d.write(0, 16*mib)
	want := bytes.Clone(d.want)
	var snap *csi.Snapshot
	if !comes(func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), settle)
		defer cancel()
		res, err := w.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: a.id, Name: "claim",
			Parameters: map[string]string{"type": "bak", "backupTargetName": "claims"}})
		must(t, err)
		snap = res.Snapshot
		return snap.ReadyToUse
	}) {
		t.Fatalf("the snapshot is never ready to use: %+v", snap)
	}
	d.write(0, mib) // after the cut
	must(t, d.f.Close())
	list, err := w.controller.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: snap.SnapshotId})
	must(t, err)
	if len(list.Entries) != 1 || !list.Entries[0].Snapshot.ReadyToUse || snap.SizeBytes != 64*mib {
		t.Errorf("the list has %+v, the answer was %+v", list.Entries, snap)
	}
	do(t, a.down, a.remove)
	w.awaitNoLayers(t)

	setRate := func(rate int64) {
		var target api.BackupTarget
		must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "claims"}, &target))
		base := target.DeepCopy()
		target.Spec.MaxDownloadRate = rate
		must(t, w.objects.Patch(t.Context(), &target, client.MergeFrom(base)))
	}
	setRate(256 << 10) // a minute for the whole
	b, err := w.from(snap.SnapshotId, "of-claim", 96*mib, blockCap())
	must(t, err)
	must(t, b.up())
	f, err := os.OpenFile(b.target, os.O_RDONLY|syscall.O_DIRECT, 0)
	must(t, err)
	got := aligned(4096)
	_, err = f.ReadAt(got, 8*mib)
	must(t, err)
	must(t, f.Close())
	if !bytes.Equal(got, want[8*mib:8*mib+4096]) {
		t.Error("the claim has other bytes than the snapshot")
	}
	if s := w.volume(b.id).Status.RestoreStatus; s.State != api.CloneInitiated {
		t.Errorf("the claim could be read at the end of the restore only: %+v", s)
	}
	setRate(0)
	w.awaitVolume(b.id, func(v *api.Volume) bool { return v.Status.RestoreStatus.State == api.CloneCompleted })
	compareWithDevice(t, b, append(want, make([]byte, 32*mib)...))
	do(t, b.down, b.remove)
	w.unsnap(snap.SnapshotId)
	var left api.BackupList
	if !comes(func() bool {
		must(t, w.objects.List(t.Context(), &left, client.MatchingLabels{api.LabelVolume: a.id}))
		return len(left.Items) == 0
	}) {
		t.Errorf("backups are left: %+v", left.Items)
	}
	w.must("target", "delete", "claims")
}

// snapshotBeforeImage: a VolumeSnapshot of type bak of a volume on an image has its handle, instant and size when the
// volume is cut, while the backup of the image takes minutes, and becomes ready to use after it.
func snapshotBeforeImage(t *testing.T, w *world) {
	w.makeTarget(t, "slow")
	setRate := func(rate int64) {
		_, err := await.Edit(t.Context(), w.objects, "slow", func(target *api.BackupTarget) (bool, error) {
			target.Spec.MaxUploadRate = rate
			return true, nil
		})
		must(t, err)
	}
	body := make([]byte, 32*mib)
	_, _ = rand.NewChaCha8([32]byte{8}).Read(body)
	must(t, os.WriteFile(w.path("slow.raw"), body, 0o600))
	w.must("image", "upload", w.path("slow.raw"), "--name", "slow-image")
	a, err := w.create("of-slow", 32*mib, blockCap(), "backingImage", "slow-image")
	must(t, err)
	setRate(64 << 10) // eight minutes for the image
	snapshot := func() *csi.Snapshot {
		ctx, cancel := context.WithTimeout(t.Context(), settle)
		defer cancel()
		res, err := w.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: a.id, Name: "before-image",
			Parameters: map[string]string{"type": "bak", "backupTargetName": "slow"}})
		must(t, err)
		return res.Snapshot
	}
	first := snapshot()
	var images api.BackupBackingImageList
	must(t, w.objects.List(t.Context(), &images))
	images.Items = slices.DeleteFunc(images.Items, func(b api.BackupBackingImage) bool { return b.Target() != "slow" })
	if first.ReadyToUse || first.SizeBytes != 32*mib || len(images.Items) > 1 ||
		len(images.Items) == 1 && images.Items[0].Status.State == api.BackupCompleted {
		t.Errorf("the first answer is %+v, the backups of images are %+v", first, images.Items)
	}
	setRate(0)
	var last *csi.Snapshot
	if !comes(func() bool { last = snapshot(); return last.ReadyToUse }) {
		t.Fatalf("the snapshot is never ready to use: %+v", last)
	}
	if !last.CreationTime.AsTime().Equal(first.CreationTime.AsTime()) {
		t.Errorf("the snapshot is of %v, and was of %v", last.CreationTime.AsTime(), first.CreationTime.AsTime())
	}
	do(t, a.remove)
	w.unsnap(last.SnapshotId)
	w.must("target", "delete", "slow", "--force")
	w.must("image", "delete", "slow-image")
}
