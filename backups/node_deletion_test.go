package backups_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestDeletionAtAnyMomentLeavesNothing: an unfinished backup that a user deletes leaves neither a hold nor a snapshot,
// whatever the backup did then, even if the mover could not delete its snapshot.
func TestDeletionAtAnyMomentLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		name, operation, prefix string
		behind                  bool // the operation succeeds
		fails                   bool // the first deletion of the snapshot
	}{
		{"locks", "put", "locks/", false, false},
		{"uploads", "put", "data/", false, false},
		{"indexes", "put", "index/", true, false},
		{"commits", "put", "snapshots/", false, false},
		{"committed", "put", "snapshots/", true, false},
		{"mover cannot delete", "put", "snapshots/", true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
			g := newGate(c.operation, c.prefix)
			var before, after hook
			if before = g.hook; c.behind {
				before, after = nil, func(ctx context.Context, operation, name string) error {
					_ = g.hook(ctx, operation, name)
					return nil
				}
			}
			var failures atomic.Int32
			w.store.set(func(ctx context.Context, operation, name string) error {
				if c.fails && operation == "delete" && strings.HasPrefix(name, "snapshots/") && failures.Add(1) == 1 {
					return api.Errorf(api.Unavailable, "not now")
				}
				if before == nil {
					return nil
				}
				return before(ctx, operation, name)
			}, after)
			w.start(nil)
			b := w.newBackup("b", v, 0)
			w.receive(g.reached, "the backup "+c.name)
			w.held(b)
			w.Delete(b)
			w.AwaitDeleted(b, &api.BackupList{})
			w.held()
			w.check(0)
			if c.fails && failures.Load() < 2 {
				t.Error("the snapshot was not deleted a second time")
			}
		})
	}
}

// TestDeletionWhileWaiting: a backup that waits for its next attempt is deleted at once, and a target that does not
// answer delays the deletion, because the repository may have a snapshot.
func TestDeletionWhileWaiting(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	fail := func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "data/") || operation == "list" && name == "snapshots/" {
			return api.Errorf(api.Unavailable, "the store is on holiday")
		}
		return nil
	}
	w.store.set(fail, nil)
	before := metav1.NewTime(time.Now().Add(-10 * time.Minute)) // its sweep may already run
	apitest.EditStatus(w.Server, w.target, func(t *api.BackupTarget) { t.Status.SweepRequested = &before })
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.await(b, "Pending after an attempt", func(b *api.Backup) bool {
		return b.Status.State == api.BackupPending && b.Status.Attempts > 0
	})
	w.Delete(b)
	w.await(b, "Deleting with a message", func(b *api.Backup) bool {
		return b.Status.State == api.BackupDeleting && strings.Contains(b.Status.Message, "on holiday")
	})
	w.store.set(nil, nil)
	w.AwaitDeleted(b, &api.BackupList{})
	w.held()
	w.check(0)
	must(t, w.Client.Get(w.Ctx, client.ObjectKeyFromObject(w.target), w.target))
	if at := w.target.Status.SweepRequested; at == nil || !at.After(before.Add(time.Minute)) {
		t.Error("nothing asks for a sweep of what the backup uploaded")
	}
}

// TestDeletionWithoutTarget: the repository of a target that was deleted cannot be asked, and delays no deletion.
func TestDeletionWithoutTarget(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	g := newGate("put", "data/")
	w.store.set(g.hook, nil)
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.receive(g.reached, "the backup uploads")
	w.Delete(w.target)
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	w.held()
}

// TestDeletionWithoutDisk: a disk that failed for good delays no deletion. Its hold ends when the disk answers again.
func TestDeletionWithoutDisk(t *testing.T) {
	w := newWorld(t)
	w.opts.CollectEvery = 50 * time.Millisecond
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	g := newGate("put", "data/")
	w.store.set(g.hook, nil)
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.receive(g.reached, "the backup uploads")
	w.broken.Store(true)
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	w.check(0)
	w.broken.Store(false)
	w.awaitReleased()
}

// TestSourceIsTakenAway: a node whose backup the planner gives to another node stops the work, releases the snapshot,
// and leaves the status alone.
func TestSourceIsTakenAway(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	g := newGate("put", "data/")
	w.store.set(g.hook, nil)
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.receive(g.reached, "the backup uploads")
	apitest.Edit(w.Server, b, func(b *api.Backup) { b.Spec.Source.Node = "node-2" })
	w.awaitReleased()
	w.stop()
	w.await(b, "as before", func(b *api.Backup) bool { return b.Status.State == api.BackupInProgress })
	if b.Status.Message != "" || b.Status.Attempts != 0 {
		t.Errorf("status %+v", b.Status)
	}
	w.check(0)
}

// TestHoldsOfFormerProcessesAreReleased: a new process releases the holds of Backups that do not exist or have ended,
// and keeps those of unfinished ones.
func TestHoldsOfFormerProcessesAreReleased(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	ended := w.newBackup("ended", v, 0)
	apitest.EditStatus(w.Server, ended, func(b *api.Backup) { b.Status.State = api.BackupError })
	elsewhere := w.newBackup("elsewhere", v, 0, func(b *api.Backup) { b.Spec.Source.Node = "node-2" })
	g := newGate("put", "data/")
	w.store.set(g.hook, nil)
	unfinished := w.newBackup("unfinished", v, 0)
	for _, b := range []*api.Backup{ended, elsewhere, unfinished} {
		w.hold(v, string(b.UID))
	}
	w.hold(v, string(api.NewUID()))
	w.start(nil)
	w.receive(g.reached, "the unfinished backup uploads")
	w.awaitHolds(1)
	w.held(unfinished)
	close(g.opened)
	w.awaitState(unfinished, api.BackupCompleted)
	w.awaitReleased()
}
