package mover

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// damagePack flips a byte of a blob in its pack.
func (w *world) damagePack(id blob.ID) {
	w.Helper()
	blobs, err := w.r.LoadIndex(w.Context())
	must(w, err)
	l, ok, err := blobs.Find(w.Context(), id, blob.Data)
	must(w, err)
	must(w, blobs.Close())
	if !ok {
		w.Fatalf("no blob %s", id)
	}
	name := l.Pack.String()
	path := filepath.Join(w.folder, "data", name[:2], name)
	b, err := os.ReadFile(path)
	must(w, err)
	b[l.Offset+20] ^= 1
	must(w, os.Remove(path))
	must(w, os.WriteFile(path, b, 0o600))
}

// verify verifies and checks the repository.
func (w *world) verify() repo.Damage {
	w.Helper()
	var last blob.ID
	for i := range last {
		last[i] = 0xff
	}
	stats, err := w.r.Verify(w.Context(), repo.VerifyOptions{Until: last})
	must(w, err)
	if !stats.Done {
		w.Error("not all packs were verified")
	}
	d, err := w.r.Check(w.Context(), repo.WriterOptions{})
	must(w, err)
	return d
}

// TestHealWritesLostChunksAndFragmentsAgain: a chunk, fragments, and the chunk of zeros of a chain of backups are
// damaged, and another chunk that no disk has any more. Heal finds the others on disks and says how many; every backup
// without the lost chunk restores. A full backup of a disk with that chunk heals the rest. After a sweep restic finds no
// error.
func TestHealWritesLostChunksAndFragmentsAgain(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(2 * manifest.SegmentSize)
	v.fill(1, 0, 1, 2, 100)
	first, old := w.backup(v, options("v")), v.copy(v.size)
	_, err := v.WriteAt(randomBytes(7, 4096), chunkSize+8192)
	must(t, err)
	v.fill(50, 100)
	o := options("v")
	o.Base, o.Changed, o.FragmentSize = &first.Snapshot, []int64{1, 100}, 128<<10
	second := w.backup(v, o)
	w.damagePack(blob.Sum(v.chunks[2]))
	w.damagePack(blob.Sum(v.chunks[1][:128<<10])) // the changed fragment
	w.damagePack(blob.Sum(v.chunks[100][256<<10 : 384<<10]))
	w.damagePack(manifest.Zeros(chunkSize).Digest)
	w.damagePack(blob.Sum(old.chunks[100]))
	damage := w.verify()
	lost := blob.Sum(old.chunks[100])
	if _, ok := damage.Blobs[lost]; !ok || len(damage.Blobs) < 5 || len(damage.Snapshots) != 2 {
		t.Fatalf("damage: %+v", damage)
	}
	find := func(of *disk) FindChunk {
		return func(_ context.Context, d manifest.Description, number int64, _ blob.ID, b []byte) (bool, error) {
			_, err := of.ReadAt(b, number*chunkSize)
			return d.Name == "v", err
		}
	}
	healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, find(v))
	must(t, err)
	after := w.verify()
	if _, ok := after.Blobs[lost]; !ok || len(after.Blobs) != 1 || int(healed) != len(damage.Blobs)-1 ||
		!slices.Equal(after.Snapshots, []blob.ID{first.Snapshot}) {
		t.Fatalf("%d blobs healed; left: %+v", healed, after)
	}
	w.compare(second.Snapshot, v)
	o = options("v")
	o.Reread, o.Snapshot.Time = true, time.Unix(1_800_000_000, 0)
	w.backup(old, o)
	if d := w.verify(); !d.IsZero() {
		t.Errorf("after the full backup: %+v", d)
	}
	w.compare(first.Snapshot, old)
	w.compare(second.Snapshot, v)
	_, err = w.r.Sweep(t.Context(), repo.SweepOptions{Poll: time.Millisecond})
	must(t, err)
	if output := w.restic("check", "--read-data"); !strings.Contains(output, "no errors were found") {
		t.Errorf("restic check: %.2000s", output)
	}
	w.compare(first.Snapshot, old)
}

// TestHealLooksForAChunkInEachVolume: two volumes have the same chunk, at different places, and a disk has one of the
// volumes alone. Beside their snapshots, one of another program needs a lost blob, too. Heal heals the chunk.
func TestHealLooksForAChunkInEachVolume(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	gone, here := newDisk(2*chunkSize), newDisk(2*chunkSize)
	gone.fill(1, 0)
	here.fill(1, 1)
	copy(here.chunks[1], gone.chunks[0])
	first, second := w.backup(gone, options("gone")), w.backup(here, options("here"))
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, randomBytes(9, 4096), 0o600))
	w.restic("backup", file)
	files, err := w.r.ListSnapshots(t.Context())
	must(t, err)
	w.damagePack(blob.Sum(here.chunks[1]))
	ids := []blob.ID{first.Snapshot}
	for _, f := range files {
		if id := f.ID; id != first.Snapshot && id != second.Snapshot {
			ids = append(ids, id)
		}
	}
	if ids = append(ids, second.Snapshot); len(ids) != 3 {
		t.Fatalf("%d snapshots", len(ids))
	}
	w.verify()
	healed, err := Heal(t.Context(), w.r, ids, repo.WriterOptions{},
		func(_ context.Context, d manifest.Description, number int64, _ blob.ID, b []byte) (bool, error) {
			_, err := here.ReadAt(b, number*chunkSize)
			return d.Name == "here", err
		})
	must(t, err)
	if d := w.verify(); healed != 1 || !d.IsZero() {
		t.Errorf("%d blobs healed; left: %+v", healed, d)
	}
	w.compare(first.Snapshot, gone)
	w.compare(second.Snapshot, here)
}

// TestTwoNodesHealTheSameChunk: two nodes find the same lost chunk, and both write it. The backup is whole, and restic
// finds no error after a sweep.
func TestTwoNodesHealTheSameChunk(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(manifest.SegmentSize)
	v.fill(1, 0, 1)
	made := w.backup(v, options("v"))
	w.damagePack(blob.Sum(v.chunks[0]))
	damage := w.verify()
	var found sync.WaitGroup // both nodes: each loaded the index before the other wrote
	found.Add(2)
	find := func(_ context.Context, _ manifest.Description, number int64, _ blob.ID, b []byte) (bool, error) {
		found.Done()
		found.Wait()
		_, err := v.ReadAt(b, number*chunkSize)
		return true, err
	}
	var nodes errgroup.Group
	for range 2 {
		nodes.Go(func() error {
			healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, find)
			if healed != 1 {
				t.Errorf("a node healed %d blobs", healed)
			}
			return err
		})
	}
	must(t, nodes.Wait())
	if d := w.verify(); !d.IsZero() {
		t.Errorf("after two heals: %+v", d)
	}
	w.compare(made.Snapshot, v)
	_, err := w.r.Sweep(t.Context(), repo.SweepOptions{Poll: time.Millisecond})
	must(t, err)
	if output := w.restic("check", "--read-data"); !strings.Contains(output, "no errors were found") {
		t.Errorf("restic check: %.2000s", output)
	}
	w.compare(made.Snapshot, v)
}

// TestBaseThatLostBlobsIsNoBase: the store lost a chunk of the newest backup, which another cluster's verification found. The
// next incremental backup does not share the loss.
func TestBaseThatLostBlobsIsNoBase(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(manifest.SegmentSize)
	v.fill(1, 0, 1)
	first := w.backup(v, options("v"))
	w.damagePack(blob.Sum(v.chunks[0]))
	if d := w.verify(); len(d.Snapshots) != 1 {
		t.Fatalf("damage: %+v", d)
	}
	v.fill(2, 1)
	o := options("v")
	o.Base, o.Changed, o.Snapshot.Time = &first.Snapshot, []int64{1}, time.Unix(1_800_000_000, 0)
	w.compare(w.backup(v, o).Snapshot, v)
}
