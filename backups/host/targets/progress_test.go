package targets

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// gate is the client of a node. An error of before fails the creation of a Backup.
type gate struct {
	client.Client
	mu     sync.Mutex
	before func(ctx context.Context) error
}

func (g *gate) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	if _, is := o.(*api.Backup); is {
		g.mu.Lock()
		before := g.before
		g.mu.Unlock()
		if err := before(ctx); err != nil {
			return err
		}
	}
	return g.Client.Create(ctx, o, opts...)
}

func (g *gate) set(before func(ctx context.Context) error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.before = before
}

// startGated starts a cluster of one node, whose creations of Backups pass the gate.
func startGated(t *testing.T, before func(ctx context.Context) error) (*world, *gate) {
	g := &gate{before: before}
	return startWorld(t, func(r *targetReconciler) { g.Client, r.Client = r.Client, g }, "node-1"), g
}

const (
	manyVolumes   = 8
	manyPerVolume = 30
	manyBackups   = manyVolumes * manyPerVolume // more than quietPull
)

// saveVolumes saves manyBackups backups; all backups of a volume are newer than the backups of the volumes before.
func saveVolumes(s *shelf) {
	var all [][]string
	for i := range manyBackups {
		f := factsOf(fmt.Sprintf("of-%d-%d", i/manyPerVolume, i%manyPerVolume))
		f.Volume, f.Object = fmt.Sprintf("vol-%d", i/manyPerVolume), api.NewUID()
		f.SnapshotCreated = time.Unix(1_700_000_000+int64(i)*3600, 0).UTC().Format(time.RFC3339)
		all = append(all, f.Tags())
	}
	s.saveMany(1000, all...)
}

// TestNewestBackupsComeFirst: a visit creates the object of the newest backup of each volume, then that of the second
// newest of each, and so on. A visit that the API server cuts is followed by another one, which reads no backup again
// and creates the other objects. The status says how many are left.
func TestNewestBackupsComeFirst(t *testing.T) {
	t.Parallel()
	const allowed = 5 * manyVolumes
	var mu sync.Mutex
	left := allowed + pullWorkers - 1 // as many may overtake another one
	w, g := startGated(t, func(context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		if left--; left < 0 {
			return errors.New("the API server refuses")
		}
		return nil
	})
	s := newShelf(t, api.PublishedPassword)
	saveVolumes(s)
	w.addTarget("default", s.url(), "")
	cut := w.awaitTarget("default", "cut", func(b *api.BackupTarget) bool {
		return b.Status.Backups == manyBackups && b.Status.Unlisted < manyBackups
	})
	found := w.backups()
	// A visit may be cut between an object and its status.
	least := manyBackups - int32(len(found))
	if st := cut.Status; !st.Available || st.LastSyncedAt != nil || !cut.HasUnlisted() || st.Unlisted < least ||
		st.Unlisted > least+pullWorkers {
		t.Errorf("after a visit that was cut: %d Backups, status %+v", len(found), st)
	}
	for v := range manyVolumes {
		for n := range manyPerVolume {
			name := fmt.Sprintf("of-%d-%d", v, manyPerVolume-1-n)
			switch _, is := found[name]; {
			case !is && n < allowed/manyVolumes:
				t.Errorf("backup %s has no object; %d newer ones of its volume have one", name, n)
			case is && n > (allowed+2*pullWorkers)/manyVolumes:
				t.Errorf("backup %s has an object before newer ones of other volumes", name)
			}
		}
	}

	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "get" && strings.HasPrefix(name, "snapshots/") {
			t.Errorf("the next visit reads %s again", name)
		}
		return nil
	})
	g.set(func(context.Context) error { return nil })
	w.clock.advance(time.Minute)
	w.wake("default")
	end := w.awaitTarget("default", "listed", func(b *api.BackupTarget) bool { return b.Status.LastSyncedAt != nil })
	if n := len(w.backups()); n != manyBackups || end.Status.Backups != manyBackups || end.HasUnlisted() {
		t.Errorf("after the next visit: %d Backups, status %+v", n, end.Status)
	}
	for name, b := range w.backups() {
		if b.Status.State != api.BackupCompleted {
			t.Errorf("backup %s: %+v", name, b.Status.CommonBackupStatus)
		}
	}
}

// TestTargetIsAvailableBeforeItsObjects: once the list of a store with many backups is read, the target is available,
// and its status has the number of backups, all without an object.
func TestTargetIsAvailableBeforeItsObjects(t *testing.T) {
	t.Parallel()
	open := make(chan struct{})
	w, _ := startGated(t, func(ctx context.Context) error {
		select {
		case <-open:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	s := newShelf(t, "x")
	saveVolumes(s)
	w.addTarget("default", s.url(), "x")
	early := w.awaitTarget("default", "available", func(b *api.BackupTarget) bool { return b.Status.Available })
	if st := early.Status; st.Backups != manyBackups || st.Unlisted != manyBackups || st.LastSyncedAt != nil ||
		st.RepositoryID == "" || !st.Encrypted || st.Format != api.FormatRestic || len(w.backups()) > 0 {
		t.Errorf("before the objects: %+v", st)
	}
	if note := w.awaitEvent("BackupTargetAvailable"); note != fmt.Sprintf("%d backups in the store", manyBackups) {
		t.Errorf("event: %s", note)
	}
	close(open)
	end := w.awaitReason("default", api.ReasonAvailable, "")
	if end.HasUnlisted() || len(w.backups()) != manyBackups {
		t.Errorf("after the visit: %d Backups, status %+v", len(w.backups()), end.Status)
	}
}
