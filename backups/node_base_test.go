package backups_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestBackupHoldsTheSnapshotOfItsSource: if a Backup gets another snapshot as its source after a failed attempt, which
// left a hold of the first snapshot, then the backup has the content of the other snapshot.
func TestBackupHoldsTheSnapshotOfItsSource(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)},
		map[int64][]byte{chunk: randomBytes(2, 64<<10)})
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "data/") {
			return api.Errorf(api.Unavailable, "the store is on holiday")
		}
		return nil
	}, nil)
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.await(b, "Pending after an attempt", func(b *api.Backup) bool {
		return b.Status.State == api.BackupPending && b.Status.Attempts > 0
	})
	w.stop()
	w.held(b)
	w.store.set(nil, nil)

	must(t, w.Client.Get(w.Ctx, client.ObjectKeyFromObject(b), b))
	base := b.DeepCopy()
	b.Spec.Source.SnapshotUID, b.Spec.Source.Snapshot = v.snapshots[1], v.snapshot(1)
	b.Spec.Source.CreationTime = strings.Replace(cutTime, "T03", "T04", 1)
	must(t, w.Client.Patch(w.Ctx, b, client.MergeFrom(base)))
	w.start(nil)
	w.awaitState(b, api.BackupCompleted)
	if b.Status.SnapshotUID != v.snapshots[1] {
		t.Errorf("the backup is of snapshot %s, not of %s", b.Status.SnapshotUID, v.snapshots[1])
	}
	w.compare(b, v, 1)
	w.awaitReleased()
}

// TestOtherInstantIsNoBase: a replica that was dropped during a cut may have a snapshot of the same uid, and of another
// instant. After a salvage of the replica, a backup of that snapshot is no base.
func TestOtherInstantIsNoBase(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.start(nil)
	first := w.newBackup("first", v, 0)
	w.awaitState(first, api.BackupCompleted)

	// The dropped replica lacks the last write before the repeated cut.
	created, err := time.Parse(time.RFC3339, cutTime)
	must(t, err)
	salvaged := &volume{name: "v", uid: v.uid, replica: api.NewUID(), size: v.size,
		snapshots: []api.UID{v.snapshots[0], api.NewUID()}}
	spec := stack.Spec{UID: string(salvaged.replica), Volume: "v", VolumeUID: string(v.uid), Size: v.size}
	content := make([]byte, v.size)
	for i, off := range []int64{0, 3 * chunk} {
		layer := string(api.NewUID())
		l, err := w.disk.Create(w.Ctx, layer, v.size)
		must(t, err)
		data := randomBytes(byte(7+i), chunk)
		copy(content[off:], data)
		_, err = l.WriteAt(data, off)
		must(t, err)
		_, _, err = l.Seal(w.Ctx)
		must(t, err)
		at := created.Add(time.Duration(i)*time.Hour - time.Duration(1-i)*time.Second)
		spec.Layers = append(spec.Layers, layer)
		spec.Snapshots = append(spec.Snapshots, stack.Snapshot{UID: string(salvaged.snapshots[i]), Name: v.snapshot(i),
			Layer: layer, Created: at})
		salvaged.contents = append(salvaged.contents, bytes.Clone(content))
	}
	must(t, w.disk.CreateReplica(w.Ctx, spec))
	second := w.newBackup("second", salvaged, 1)
	w.awaitState(second, api.BackupCompleted)
	w.compare(second, salvaged, 1)
	w.compare(first, v, 0)
}
