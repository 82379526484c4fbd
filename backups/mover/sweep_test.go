package mover

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// onIndexList calls each in front of the n-th list of the index folder, counted from now on, and of every later one.
func (w *world) onIndexList(n int, each func()) {
	lists := 0
	w.store.before = func(operation, name string) error {
		if operation == "list" && name == "index/" {
			if lists++; lists >= n {
				each()
			}
		}
		return nil
	}
}

// indexFiles are the names of the index files.
func (w *world) indexFiles() []string {
	files, err := os.ReadDir(filepath.Join(w.folder, "index"))
	if !errors.Is(err, fs.ErrNotExist) { // before the first index file
		must(w, err)
	}
	names := make([]string, 0, len(files))
	for _, f := range files {
		if len(f.Name()) == len(blob.ID{})*2 {
			names = append(names, f.Name())
		}
	}
	return names
}

func (w *world) removeIndexFile(name string) {
	must(w, os.Remove(filepath.Join(w.folder, "index", name)))
}

// TestBackupNoticesASweep: after the upload and before the commit, a sweep hides a pack of an earlier backup on whose
// chunks the new one relies. The backup stores these chunks again; restic finds no error.
func TestBackupNoticesASweep(t *testing.T) { testSweepAtIndexList(t, 3, 1) }

// TestBackupLooksAgainAfterItsCommit: the same sweep between the look before the commit and the commit.
func TestBackupLooksAgainAfterItsCommit(t *testing.T) { testSweepAtIndexList(t, 4, 2) }

// testSweepAtIndexList sweeps in front of the n-th list of the index: the first two are LoadIndex, the third one is
// before the commit, the fourth one after it. snapshots is how many snapshots the backup saves.
func testSweepAtIndexList(t *testing.T, n, snapshots int) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(10 * chunkSize)
	v.fill(1, 0, 5)
	deleted := w.backup(v, options("v")).Snapshot
	must(t, w.r.DeleteSnapshots(t.Context(), deleted))
	old := w.indexFiles()
	v.fill(2, 6)
	swept := false
	w.onIndexList(n, func() {
		if !swept {
			swept = true
			for _, name := range old {
				w.removeIndexFile(name)
			}
		}
	})
	saved := w.store.counts["put snapshots"]
	o := options("v")
	o.Progress = &Progress{}
	result := w.backup(v, o)
	w.store.before = nil
	if done, total := o.Progress.Bytes(); done != 3*chunkSize || total != done {
		t.Errorf("progress %d of %d bytes after the last attempt, want three chunks", done, total)
	}
	if saved = w.store.counts["put snapshots"] - saved; saved != snapshots {
		t.Errorf("the backup saved %d snapshots, want %d", saved, snapshots)
	}
	if !swept || result.Read != 3*chunkSize {
		t.Errorf("the last attempt read %d bytes, want three chunks; swept: %v", result.Read, swept)
	}
	files, err := w.r.ListSnapshots(t.Context())
	must(t, err)
	if len(files) != 1 || files[0].ID != result.Snapshot {
		t.Errorf("%d backups are listed, want the last attempt's alone", len(files))
	}
	w.open()
	w.compare(result.Snapshot, v)
	w.check()
}

// TestBackupSurvivesSweepsThatTakeNothing: before each of three looks at the index, a sweep takes a deleted backup of
// another volume away. The backup reads and stores nothing twice.
func TestBackupSurvivesSweepsThatTakeNothing(t *testing.T) {
	w := newWorld(t)
	var others []string
	for i := range uint64(3) {
		other := newDisk(chunkSize)
		other.fill(100+i, 0)
		must(t, w.r.DeleteSnapshots(t.Context(), w.backup(other, options("other")).Snapshot))
		for _, name := range w.indexFiles() {
			if !slices.Contains(others, name) {
				others = append(others, name)
			}
		}
	}
	v := newDisk(10 * chunkSize)
	v.fill(1, 0, 5)
	first := w.backup(v, options("v")).Snapshot
	v.fill(2, 6)
	v.reads.Store(0)
	w.onIndexList(3, func() {
		if len(others) > 0 {
			w.removeIndexFile(others[0])
			others = others[1:]
		}
	})
	o := options("v")
	o.Base, o.Changed = &first, []int64{6}
	result := w.backup(v, o)
	w.store.before = nil
	if len(others) > 0 || result.Full || v.reads.Load() != 1 {
		t.Errorf("%d sweeps did not run: %d reads, %+v", len(others), v.reads.Load(), result)
	}
	w.compare(result.Snapshot, v)
}

// TestBackupGivesUpAfterManySweeps: sweeps that take blobs away in every attempt are an error of kind busy, and no
// backup is listed.
func TestBackupGivesUpAfterManySweeps(t *testing.T) {
	w := newWorld(t)
	v := newDisk(10 * chunkSize)
	v.fill(1, 0, 5)
	w.onIndexList(1, func() {
		for _, name := range w.indexFiles() {
			w.removeIndexFile(name)
		}
	})
	_, err := Backup(t.Context(), w.r, v, options("v"))
	w.store.before = nil
	files, listErr := w.r.ListSnapshots(t.Context())
	must(t, listErr)
	if !api.Is(err, api.Busy) || !strings.Contains(err.Error(), "volume v") || len(files) > 0 {
		t.Errorf("%d backups are listed: %v, want an error of kind busy", len(files), err)
	}
	locks, err := os.ReadDir(filepath.Join(w.folder, "locks"))
	must(t, err)
	if slices.ContainsFunc(locks, func(e os.DirEntry) bool { return len(e.Name()) == 64 }) {
		t.Error("the backup left a lock")
	}
}
