package backups_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestVerificationHealsFromDisks: the store damages a chunk of a backup. A verification that a user asks for finds the
// damage, and writes the chunk again, which a snapshot on the node's disk still has. The backup is whole afterwards,
// the target has no damage, and the disk holds no snapshot any more.
func TestVerificationHealsFromDisks(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk), 4 * chunk: randomBytes(2, 4096)})
	replica := &api.Replica{ObjectMeta: apitest.Named("vol-r1"), Spec: api.ReplicaSpec{UID: v.replica, Volume: v.name,
		VolumeUID: v.uid, Node: nodeName, Disk: api.UID(w.disk.UID()), Size: v.size}}
	w.Create(replica)
	s := &api.Snapshot{ObjectMeta: apitest.Named(v.snapshot(0))}
	apitest.EditStatus(w.Server, s, func(s *api.Snapshot) { s.Status.CreationTime = cutTime })
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	w.spoilFirstBlob()
	apitest.Edit(w.Server, w.target, func(t *api.BackupTarget) {
		now := metav1.Now()
		t.Spec.VerifyRequestedAt = &now
	})
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "verified", func(t *api.BackupTarget) bool {
		return t.Status.Verification != nil && t.Status.Verification.EndedAt != nil
	})
	if f := w.target.Status.Verification; f.HealedBlobs != 1 || f.DamagedBlobs != 0 || f.DamagedBackups != 0 {
		t.Errorf("verification %+v", f)
	}
	open, err := w.open(t.Context(), b.Status.URL)
	must(t, err)
	sink := &memorySink{got: make([]byte, v.size)}
	must(t, open.Restore(t.Context(), sink))
	if !bytes.Equal(sink.got, v.contents[0]) {
		t.Error("the restore has other bytes than the snapshot")
	}
	must(t, open.Close())
	w.awaitReleased()
}

// TestDamagedBackupIsNoBase: a verification finds a damaged chunk that no snapshot object leads to. The next backup of
// the volume, which still has the chunk, does not take the chunk over from the damaged backup, and is whole.
func TestDamagedBackupIsNoBase(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)},
		map[int64][]byte{4 * chunk: randomBytes(2, 4096)})
	w.start(nil)
	first := w.newBackup("b1", v, 0)
	w.awaitState(first, api.BackupCompleted)
	w.spoilFirstBlob()
	apitest.Edit(w.Server, w.target, func(t *api.BackupTarget) {
		now := metav1.Now()
		t.Spec.VerifyRequestedAt = &now
	})
	w.await(first, "damaged", func(b *api.Backup) bool { return b.Status.Damaged })
	second := w.newBackup("b2", v, 1)
	w.awaitState(second, api.BackupCompleted)
	open, err := w.open(t.Context(), second.Status.URL)
	must(t, err)
	sink := &memorySink{got: make([]byte, v.size)}
	must(t, open.Restore(t.Context(), sink))
	if !bytes.Equal(sink.got, v.contents[1]) {
		t.Error("the restore has other bytes than the snapshot")
	}
	must(t, open.Close())
}

// spoilFirstBlob changes bytes of one chunk in the pack with data. The position is within a chunk of full size even when
// a smaller blob of 4 KiB comes first.
func (w *world) spoilFirstBlob() {
	w.T.Helper()
	must(w.T, filepath.WalkDir(filepath.Join(w.folder, "data"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		body, err := os.ReadFile(path)
		if err != nil || len(body) < chunk {
			return err
		}
		copy(body[chunk/2:], make([]byte, 4096))
		must(w.T, os.Chmod(path, 0o600))
		return os.WriteFile(path, body, 0o600)
	}))
}
