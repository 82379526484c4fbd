package mover

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
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

// opensTo is an OpenSource.
func opensTo(src block.Source, err error) OpenSource {
	return func(context.Context) (block.Source, error) { return src, err }
}

// yieldNamed yields sources for volumes of a name.
func yieldNamed(name string, all ...OpenSource) Sources {
	return Sources{AtPlaces: func(_ context.Context, d manifest.Description) iter.Seq2[OpenSource, error] {
		return func(yield func(OpenSource, error) bool) {
			for _, open := range all {
				if d.Name != name || !yield(open, nil) {
					return
				}
			}
		}
	}}
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
	healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, yieldNamed("v", opensTo(v, nil)))
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
	healed, err := Heal(t.Context(), w.r, ids, repo.WriterOptions{}, yieldNamed("here", opensTo(here, nil)))
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
	sources := yieldNamed("v", func(context.Context) (block.Source, error) {
		found.Done()
		found.Wait()
		return v, nil
	})
	var nodes errgroup.Group
	for range 2 {
		nodes.Go(func() error {
			healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, sources)
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

// failingDisk fails each read.
type failingDisk struct {
	*disk
	failure error
}

func (d failingDisk) ReadAt([]byte, int64) (int, error) { return 0, d.failure }

// TestSourceThatDoesNotAnswerLacksNothing: the process has no more files for the newest snapshot, and another source
// cannot be opened. The heal stores what the oldest snapshot has, and ends with the error. Heals that reach the sources
// store the rest. A source that says of its own damage ends no heal.
func TestSourceThatDoesNotAnswerLacksNothing(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(manifest.SegmentSize)
	v.fill(1, 0, 1)
	oldest := v.copy(v.size)
	oldest.fill(9, 1)
	w.backup(v, options("v"))
	w.damagePack(blob.Sum(v.chunks[0]))
	w.damagePack(blob.Sum(v.chunks[1]))
	damage := w.verify()
	tooMany := opensTo(failingDisk{v, &fs.PathError{Op: "open", Path: "data", Err: syscall.EMFILE}}, nil)
	closed := errors.New("the disk does not answer")
	for _, c := range []struct {
		sources Sources
		want    error
		healed  int64
	}{
		{yieldNamed("v", tooMany, opensTo(oldest, nil)), syscall.EMFILE, 1},
		{yieldNamed("v", tooMany, opensTo(oldest, nil)), syscall.EMFILE, 0},
		{yieldNamed("v", opensTo(nil, closed), opensTo(oldest, nil)), closed, 0},
		{yieldNamed("v", opensTo(failingDisk{v, api.Errorf(api.Corrupt, "the chunk is damaged")}, nil),
			opensTo(oldest, nil)), nil, 0},
		{yieldNamed("v", opensTo(oldest, nil), opensTo(v, nil)), nil, 1},
	} {
		healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, c.sources)
		if !errors.Is(err, c.want) || healed != c.healed {
			t.Errorf("%d blobs healed, %v; want %d, %v", healed, err, c.healed, c.want)
		}
	}
	if d := w.verify(); !d.IsZero() {
		t.Errorf("left: %+v", d)
	}
}

// badSectorDisk cannot read some chunks.
type badSectorDisk struct {
	*disk
	bad     []int64
	failure error
}

func (d badSectorDisk) ReadAt(p []byte, off int64) (int, error) {
	n, err := d.disk.ReadAt(p, off)
	for _, c := range d.bad {
		if from := c*chunkSize + 4096; from < off+int64(n) && off < (c+1)*chunkSize {
			return int(max(from-off, 0)), d.failure
		}
	}
	return n, err
}

// TestBadSectorCostsItsChunkAlone: of four lost chunks the disk cannot read the first and the third. The heal stores the
// other two, asks for each chunk once although two backups need the chunk, and tells of the failure. A source that fails
// otherwise, as a disk does that hangs, is asked for no further chunk of the batch.
func TestBadSectorCostsItsChunkAlone(t *testing.T) {
	suite.System(t)
	badSector := &fs.PathError{Op: "read", Path: "data", Err: syscall.EIO}
	hangs := api.Errorf(api.Unavailable, "disk d: does not answer")
	for _, c := range []struct {
		name    string
		source  func(v *disk) block.DigestSource
		failure error
		healed  int64
		reads   int64
	}{
		{"bad sectors", func(v *disk) block.DigestSource { return badSectorDisk{v, []int64{0, 2}, badSector} }, badSector, 2, 4},
		{"a disk that hangs", func(v *disk) block.DigestSource { return badSectorDisk{v, []int64{1}, hangs} }, hangs, 1, 3},
	} {
		w := newWorld(t)
		v := newDisk(manifest.SegmentSize)
		v.fill(1, 0, 1, 2, 3)
		w.backup(v, options("v"))
		o := options("v")
		o.Snapshot.Time = time.Unix(1_800_000_000, 0)
		w.backup(v, o)
		for i := range int64(4) {
			w.damagePack(blob.Sum(v.chunks[i]))
		}
		damage := w.verify()
		if len(damage.Snapshots) != 2 {
			t.Fatalf("damage: %+v", damage)
		}
		before := v.reads.Load()
		healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, yieldNamed("v", opensTo(c.source(v), nil)))
		if reads := v.reads.Load() - before; healed != c.healed || reads != c.reads || !errors.Is(err, c.failure) {
			t.Errorf("%s: %d blobs healed with %d reads, %v; want %d, %d, %v", c.name, healed, reads, err, c.healed, c.reads,
				c.failure)
		}
	}
}

// TestHealGivesWayToGuests: a heal reads no source while the node's work rests for guests.
func TestHealGivesWayToGuests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		v := newDisk(manifest.SegmentSize)
		v.fill(1, 0)
		w.backup(v, options("v"))
		w.damagePack(blob.Sum(v.chunks[0]))
		damage := w.verify()
		rests, end := make(chan struct{}), make(chan struct{})
		n := 0
		p := pace.New(pace.Options{Keep: func(context.Context) float64 { return 0.85 },
			Guests: func(context.Context) (pace.GuestIO, error) {
				if n++; n == 3 { // after a period of work, and the begin of a rest
					close(rests)
					<-end
				}
				return pace.GuestIO{Requests: uint64(n) * 1000, Latency: time.Duration(n) * time.Millisecond}, nil
			}})
		stop := p.Begin()
		<-rests
		before := v.reads.Load()
		healed := make(chan int64, 1)
		go func() {
			n, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{Pacer: p}, yieldNamed("v", opensTo(v, nil)))
			if err != nil {
				t.Error(err)
			}
			healed <- n
		}()
		synctest.Wait()
		if n := v.reads.Load() - before; n > 0 {
			t.Errorf("%d reads during a rest", n)
		}
		close(end)
		if n := <-healed; n != 1 {
			t.Errorf("%d blobs healed", n)
		}
		stop()
	})
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
