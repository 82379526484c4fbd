package mover

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/block/suite"
)

// newOther is a world whose repository has another key.
func newOther(t *testing.T) *world {
	t.Helper()
	w := &world{TB: t, folder: t.TempDir()}
	w.location = w.folder
	s, err := folder.Open(t.Context(), w.folder)
	must(t, err)
	must(t, repo.Init(t.Context(), s, password, repo.Options{}))
	w.store = &hookedStore{Store: s, counts: map[string]int{}}
	w.open()
	return w
}

func copyOptions() CopyOptions {
	return CopyOptions{Program: "drover test", Writer: repo.WriterOptions{PackSize: 5 << 20,
		Memory: 20 << 20}, Progress: &Progress{},
		Tags: func(_ context.Context, origin repo.Snapshot, _ Result) ([]string, error) {
			return append(slices.Clone(origin.Tags), "copied"), nil
		}}
}

// TestCopyMovesABackup: a full backup and one with fragments are copied into another repository, with the time, path and
// tags of the origin. The second copy reads and writes only what the first one did not bring, and a third one nothing.
// restic finds no error.
func TestCopyMovesABackup(t *testing.T) {
	suite.System(t)
	a, b := newWorld(t), newOther(t)
	v := newDisk(70*chunkSize + 4096)
	v.fill(1, 0, 1, 5, 66, 70)
	first := a.backup(v, options("v")).Snapshot
	old := v.copy(v.size)
	o := options("v")
	o.Base, o.Changed, o.FragmentSize = &first, []int64{1, 3}, 128<<10
	_, err := v.WriteAt(randomBytes(9, 4096), chunkSize+64<<10)
	must(t, err)
	v.fill(2, 3)
	second := a.backup(v, o).Snapshot

	do := copyOptions()
	result, err := Copy(t.Context(), a.r, first, b.r, do)
	must(t, err)
	if result.Read < 4*chunkSize || result.StoredBytes < 4*chunkSize {
		t.Errorf("the first copy: %+v", result)
	}
	if do.Progress.At(time.Now()).EstimatedEnd == nil {
		t.Error("the end of the copy is not known")
	}
	if done, total := do.Progress.Bytes(); done != v.size || total != v.size {
		t.Errorf("progress %d of %d bytes", done, total)
	}
	b.compare(result.Snapshot, old)

	again, err := Copy(t.Context(), a.r, second, b.r, copyOptions())
	must(t, err)
	if again.Read < 2*chunkSize || again.Read > 2*chunkSize+64<<10 {
		t.Errorf("the second copy reads %d bytes, want two chunks", again.Read)
	}
	b.compare(again.Snapshot, v)

	reads, packs := a.store.counts["get data"], b.packs()
	third, err := Copy(t.Context(), a.r, second, b.r, copyOptions())
	must(t, err)
	if third.Read > 0 || third.NewBlobs > 0 || !slices.Equal(b.packs(), packs) || third.Snapshot != again.Snapshot &&
		a.store.counts["get data"] > reads {
		t.Errorf("the third copy: %+v", third)
	}
	file, err := b.r.FindSnapshot(t.Context(), again.Snapshot)
	must(t, err)
	s, err := b.r.LoadSnapshot(t.Context(), file)
	must(t, err)
	if !s.Time.Equal(time.Unix(1_700_000_000, 0)) || s.Hostname != "cluster" || s.Paths[0] != "/volumes/v" ||
		!slices.Equal(s.Tags, []string{"drover", "copied"}) || s.Parent != nil {
		t.Errorf("the copied snapshot: %+v", s)
	}
	b.check()
}

// TestCopyKeepsItsOrigin: a user deletes the origin, and a sweep of another process waits, while a copy reads; the copy
// is whole. A copy of a deleted origin fails, and leaves no snapshot.
func TestCopyKeepsItsOrigin(t *testing.T) {
	a, b := newWorld(t), newOther(t)
	v := newDisk(20 * chunkSize)
	for c := range int64(20) {
		v.fill(1, c)
	}
	id := a.backup(v, options("v")).Snapshot
	deleted := false
	b.store.before = func(operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "data/") && !deleted {
			deleted = true
			must(t, a.r.DeleteSnapshots(t.Context(), id))
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if stats, err := a.r.Sweep(ctx, repo.SweepOptions{Poll: time.Millisecond, Empty: true}); stats.DeletedPacks > 0 {
				t.Errorf("a sweep deleted packs below a copy: %+v, %v", stats, err)
			}
		}
		return nil
	}
	result, err := Copy(t.Context(), a.r, id, b.r, copyOptions())
	must(t, err)
	if !deleted {
		t.Error("the copy wrote no pack")
	}
	b.compare(result.Snapshot, v)
	if _, err := Copy(t.Context(), a.r, id, b.r, copyOptions()); !api.Is(err, api.NotFound) {
		t.Errorf("a copy of a deleted backup: %v", err)
	}
	b.hasBackups(result.Snapshot)
}

// TestCopyContinuesAfterAKill: what an ended process uploaded is not read again.
func TestCopyContinuesAfterAKill(t *testing.T) {
	a, b := newWorld(t), newOther(t)
	v := newDisk(6 * chunkSize)
	v.fill(1, 0, 1, 2, 3)
	id := a.backup(v, options("v")).Snapshot
	o := copyOptions()
	o.Tags = func(context.Context, repo.Snapshot, Result) ([]string, error) {
		return nil, api.Errorf(api.Unavailable, "the process is killed here")
	}
	if _, err := Copy(t.Context(), a.r, id, b.r, o); !api.Is(err, api.Unavailable) {
		t.Errorf("%v", err)
	}
	b.hasBackups()
	b.open()
	again, err := Copy(t.Context(), a.r, id, b.r, copyOptions())
	must(t, err)
	if again.Read > 0 {
		t.Errorf("the next copy reads %d bytes again", again.Read)
	}
	b.compare(again.Snapshot, v)
}

// TestCopyRefusesADamagedOrigin: a blob that the origin damaged ends the copy, and no snapshot is made.
func TestCopyRefusesADamagedOrigin(t *testing.T) {
	a, b := newWorld(t), newOther(t)
	v := newDisk(4 * chunkSize)
	v.fill(1, 0, 1)
	id := a.backup(v, options("v")).Snapshot
	blobs, _ := a.load(id)
	l, _, err := blobs.Find(t.Context(), blob.Sum(v.chunks[1]), blob.Data)
	must(t, err)
	path := filepath.Join(a.folder, "data", l.Pack.String()[:2], l.Pack.String())
	body, err := os.ReadFile(path)
	must(t, err)
	body[l.Offset+l.Length/2] ^= 1
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, body, 0o600))
	if _, err := Copy(t.Context(), a.r, id, b.r, copyOptions()); !api.Is(err, api.Corrupt) {
		t.Errorf("%v, want an error of kind corrupt", err)
	}
	b.hasBackups()
}
