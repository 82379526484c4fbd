package mover

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// hookedDisk calls before in front of each read.
type hookedDisk struct {
	*disk
	before func()
}

func (d *hookedDisk) ReadAt(p []byte, off int64) (int, error) {
	d.before()
	return d.disk.ReadAt(p, off)
}

// ageLocks makes all locks 31 minutes older, by the store's clock.
func (w *world) ageLocks() {
	files, err := os.ReadDir(filepath.Join(w.folder, "locks"))
	must(w, err)
	old := time.Now().Add(-31 * time.Minute)
	for _, f := range files {
		if len(f.Name()) == 64 {
			must(w, os.Chtimes(filepath.Join(w.folder, "locks", f.Name()), old, old))
		}
	}
}

// sweep is a sweep by another process.
func (w *world) sweep() repo.SweepStats {
	inner := *w
	s := &hookedStore{Store: w.store.Store, counts: map[string]int{}}
	inner.store = s
	inner.open()
	ctx, cancel := context.WithTimeout(w.Context(), 20*time.Second)
	defer cancel()
	stats, err := inner.r.Sweep(ctx, repo.SweepOptions{Poll: time.Millisecond, Empty: true})
	must(w, err)
	return stats
}

// sleepDuring is a source of v on a machine that sleeps in the middle of the upload, after two packs, for more than 30
// minutes; its monotonic clock sleeps, too. A sweep takes the lock as stale, and deletes the packs that no index file
// names.
func (w *world) sleepDuring(v *disk) Source {
	packs, slept := len(w.packs()), false
	src := &hookedDisk{disk: v}
	src.before = func() {
		if slept || v.reads.Load() < 15 {
			return
		}
		slept = true
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for len(w.packs()) < packs+2 {
			<-ticker.C
		}
		w.ageLocks()
		if stats := w.sweep(); stats.DeletedPacks < 2 {
			w.Errorf("the sweep deletes no packs of the sleeper: %+v", stats)
		}
	}
	return src
}

// hasBackups demands that just these backups are listed.
func (w *world) hasBackups(want ...blob.ID) {
	w.Helper()
	files, err := w.r.ListSnapshots(w.Context())
	must(w, err)
	for _, f := range files {
		if !slices.Contains(want, f.ID) {
			w.Errorf("backup %.8s is listed", f.ID)
		}
	}
	if len(files) != len(want) {
		w.Errorf("%d backups are listed, want %d", len(files), len(want))
	}
}

// TestBackupAfterASleepFails: a sweep has deleted packs of a session that slept. The session's backup fails, its index
// file is deleted, and the next backup stores all chunks again.
func TestBackupAfterASleepFails(t *testing.T) {
	w := newWorld(t)
	other := newDisk(chunkSize)
	other.fill(9, 0)
	first := w.backup(other, options("other")).Snapshot
	v := newDisk(20 * chunkSize)
	for c := range int64(20) {
		v.fill(1, c)
	}
	o := options("v")
	o.Workers = 1
	if result, err := Backup(t.Context(), w.r, w.sleepDuring(v), o); !api.Is(err, api.Unavailable) {
		t.Errorf("%+v, %v, want an error of kind unavailable", result, err)
	}
	w.hasBackups(first)
	w.open()
	second := w.backup(v, options("v")).Snapshot
	w.compare(second, v)
	w.compare(first, other)
}

// TestBackupWithoutASecondLookFails: the store does not answer the look after the commit. The backup fails, and its
// snapshot is deleted, or the result names the snapshot.
func TestBackupWithoutASecondLookFails(t *testing.T) {
	for _, deletable := range []bool{true, false} {
		w := newWorld(t)
		v := newDisk(4 * chunkSize)
		v.fill(1, 0, 1)
		var saved atomic.Bool
		w.store.before = func(operation, name string) error {
			if operation == "put" && strings.HasPrefix(name, "snapshots/") {
				saved.Store(true)
			}
			if saved.Load() && (operation == "list" && name == "index/" || operation == "delete" && !deletable) {
				return api.Errorf(api.Unavailable, "no answer")
			}
			return nil
		}
		result, err := Backup(t.Context(), w.r, v, options("v"))
		w.store.before = nil
		if !saved.Load() || !api.Is(err, api.Unavailable) || (result.Snapshot == blob.ID{}) != deletable {
			t.Errorf("snapshot %.8s, %v, want an error of kind unavailable", result.Snapshot, err)
		}
		if deletable {
			w.hasBackups()
		} else {
			w.hasBackups(result.Snapshot)
		}
	}
}

// TestBackupIsCompleteWithoutTheDeletionOfItsLock: a lock that cannot be deleted is no error of a committed backup.
func TestBackupIsCompleteWithoutTheDeletionOfItsLock(t *testing.T) {
	w := newWorld(t)
	v := newDisk(2 * chunkSize)
	v.fill(1, 0)
	w.store.before = func(operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, "locks/") {
			return api.Errorf(api.Unavailable, "no answer")
		}
		return nil
	}
	result := w.backup(v, options("v"))
	w.store.before = nil
	w.hasBackups(result.Snapshot)
}

// TestWrongOptionsAreRefusedAtOnce: no chunk is read for a name or a size of fragments that no backup has.
func TestWrongOptionsAreRefusedAtOnce(t *testing.T) {
	w := newWorld(t)
	v := newDisk(10 * chunkSize)
	v.fill(1, 0, 1, 2, 3)
	for _, change := range []func(*BackupOptions){
		func(o *BackupOptions) { o.Description.Name = "my volume" },
		func(o *BackupOptions) { o.Description.Kind = "disk" },
		func(o *BackupOptions) { o.FragmentSize = 100_000 },
	} {
		o := options("v")
		change(&o)
		if _, err := Backup(t.Context(), w.r, v, o); !api.Is(err, api.Invalid) || v.reads.Load() > 0 {
			t.Errorf("%d chunks were read: %v, want an error of kind invalid", v.reads.Load(), err)
		}
	}
}

// TestIndexFileOfALostSessionKeepsPacksThatExist: the lock of a session is removed while the session writes an index
// file. The backup fails. Packs that a sweep deleted are in no index file afterwards; other sessions may rely on the
// other packs already, so these stay in the index.
func TestIndexFileOfALostSessionKeepsPacksThatExist(t *testing.T) {
	for lost := range 3 { // of two packs
		w := newWorld(t)
		v := newDisk(2 * chunkSize)
		v.fill(1, 0)
		w.store.before = func(operation, name string) error {
			if operation != "put" || !strings.HasPrefix(name, "index/") {
				return nil
			}
			must(t, os.RemoveAll(filepath.Join(w.folder, "locks")))
			for _, name := range w.packs()[:lost] {
				must(t, os.Remove(filepath.Join(w.folder, name)))
			}
			w.store.before = nil
			return nil
		}
		_, err := Backup(t.Context(), w.r, v, options("v"))
		if !api.Is(err, api.Unavailable) {
			t.Errorf("%v, want an error of kind unavailable", err)
		}
		w.hasBackups()
		files := w.indexFiles()
		if len(w.packs()) != 2-lost || (len(files) == 1) != (lost < 2) {
			t.Errorf("%d packs are lost: %d packs and %d index files are left", lost, len(w.packs()), len(files))
		}
		w.open()
		if damage, err := w.r.Check(t.Context(), repo.WriterOptions{}); err != nil || !damage.IsZero() {
			t.Errorf("%d packs are lost: damage %+v, %v", lost, damage, err)
		}
	}
}
