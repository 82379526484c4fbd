package backups_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/driver/kubeapi/apitest"
)

// hold holds the snapshot of a volume for a holder.
func (w *world) hold(v *volume, holder string) {
	w.T.Helper()
	_, _, err := w.disk.HoldSnapshot(w.Ctx, holder, "b", string(v.replica), block.SnapshotCut{UID: string(v.snapshots[0])})
	must(w.T, err)
}

// slowDisk is a disk that hangs in releases.
type slowDisk struct {
	block.SnapshotDisk
	hangs chan struct{}
}

func (d slowDisk) ReleaseSnapshot(holder string) error {
	<-d.hangs
	return d.SnapshotDisk.ReleaseSnapshot(holder)
}

// TestDiskThatHangsDelaysNoOther: a disk hangs when the node releases the hold of a former process there, and those of
// backups. The backups of that disk end nevertheless, more of them than there are places and reconcilers, and so does a
// backup of another disk.
func TestDiskThatHangsDelaysNoOther(t *testing.T) {
	w := newWorld(t)
	slow := slowDisk{w.disk, make(chan struct{})}
	slowUID := api.NewUID()
	w.disks = map[api.UID]block.SnapshotDisk{slowUID: slow}
	node := &api.Node{ObjectMeta: apitest.Named(nodeName)}
	apitest.EditStatus(w.Server, node, func(n *api.Node) {
		n.Status.Disks = []api.DiskStatus{{Path: "/slow", UID: slowUID, Ready: true}}
	})
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.hold(v, string(api.NewUID()))
	w.start(nil)
	t.Cleanup(func() { close(slow.hangs) })
	onSlow := func(b *api.Backup) { b.Spec.Source.Disk = slowUID }
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		w.awaitState(w.newBackup(name, v, 0, onSlow), api.BackupCompleted)
	}
	w.awaitState(w.newBackup("other", v, 0), api.BackupCompleted)
}

// TestCollectorKeepsTheHoldsOfWorks: a Backup goes to another node while its work reads the snapshot. The hold stays,
// although the collector releases others, until the work has ended.
func TestCollectorKeepsTheHoldsOfWorks(t *testing.T) {
	w := newWorld(t)
	w.opts.CollectEvery = 20 * time.Millisecond
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	reached, opened := make(chan struct{}), make(chan struct{})
	reach := sync.OnceFunc(func() { close(reached) })
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "data/") {
			reach()
			<-opened
		}
		return nil
	}, nil)
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.receive(reached, "the backup uploads")
	apitest.Edit(w.Server, b, func(b *api.Backup) { b.Spec.Source.Node = "node-2" })
	for range 3 { // the look before the last one began and ended after the change
		w.hold(v, string(api.NewUID()))
		w.awaitHolds(1)
	}
	w.held(b)
	close(opened)
	w.awaitReleased()
}
