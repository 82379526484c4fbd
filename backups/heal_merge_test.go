package backups_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/stack"
)

// spoilAllBlobs changes bytes in each chunk of the packs with data.
func (w *world) spoilAllBlobs() {
	w.T.Helper()
	must(w.T, filepath.WalkDir(filepath.Join(w.folder, "data"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		body, err := os.ReadFile(path)
		for off := chunk / 2; err == nil && off+4096 < len(body); off += chunk {
			clear(body[off:][:4096])
		}
		must(w.T, os.Chmod(path, 0o600))
		return os.WriteFile(path, body, 0o600)
	}))
}

// merge merges the layers of a volume that no snapshot needs, and reports whether there were any.
func (w *world) merge(v *volume) bool {
	w.T.Helper()
	loop, err := uring.New(8)
	must(w.T, err)
	ended := make(chan error, 1)
	go func() { ended <- loop.Run() }()
	defer func() {
		loop.Close()
		must(w.T, <-ended)
	}()
	r, err := w.disk.OpenReplica(w.Ctx, string(v.replica), loop)
	must(w.T, err)
	must(w.T, r.Adopt(w.Ctx, 1, 1, []string{string(v.replica)}))
	did, err := r.Merge(w.Ctx, stack.MergeOptions{})
	must(w.T, err)
	must(w.T, r.Close())
	return did
}

// TestStoreThatHangsDuringAHealDelaysNoMerge: the store loses all chunks of a backup, and hangs in the middle of the
// heal. Meanwhile the snapshot of the backup is deleted and its layer merged. The heal takes the other chunks from the
// merged layer, in which the chunks belong to the next snapshot.
func TestStoreThatHangsDuringAHealDelaysNoMerge(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 16*chunk, map[int64][]byte{0: randomBytes(1, 14*chunk)},
		map[int64][]byte{15 * chunk: randomBytes(2, 4096)})
	w.Create(&api.Replica{ObjectMeta: apitest.Named("vol-r1"), Spec: api.ReplicaSpec{UID: v.replica, Volume: v.name,
		VolumeUID: v.uid, Node: nodeName, Disk: api.UID(w.disk.UID()), Size: v.size}})
	for i, at := range []string{cutTime, strings.Replace(cutTime, "T03", "T04", 1)} {
		s := &api.Snapshot{ObjectMeta: apitest.Named(v.snapshot(i))}
		apitest.EditStatus(w.Server, s, func(s *api.Snapshot) { s.Status.CreationTime = at })
	}
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	w.awaitReleased()
	w.spoilAllBlobs()

	reached, answers := make(chan struct{}), make(chan struct{})
	reach := sync.OnceFunc(func() { close(reached) })
	w.store.set(func(ctx context.Context, operation, name string) error {
		if operation != "put" || !strings.HasPrefix(name, "data/") {
			return nil
		}
		reach()
		select {
		case <-answers:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}, nil)
	apitest.Edit(w.Server, w.target, func(t *api.BackupTarget) {
		now := metav1.Now()
		t.Spec.VerifyRequestedAt = &now
	})
	w.receive(reached, "the heal writes a pack")
	must(t, w.disk.DropSnapshot(string(v.replica), string(v.snapshots[0])))
	if !w.merge(v) {
		t.Error("the layers of the deleted snapshot are not merged while the store hangs")
	}
	close(answers)
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "verified", func(t *api.BackupTarget) bool {
		return t.Status.Verification != nil && t.Status.Verification.EndedAt != nil
	})
	if f := w.target.Status.Verification; f.HealedBlobs != 14 || f.DamagedBlobs != 0 || f.DamagedBackups != 0 {
		t.Errorf("verification %+v", f)
	}
	w.compareRestored(b, v, 0)
}
