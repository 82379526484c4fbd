package mover

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// layerDisk is a disk with layers, of which at most one may be open at a time.
type layerDisk struct {
	testing.TB
	layers map[string]*disk
	busy   map[string]bool       // layers in a merge
	visit  func(uid string) bool // before each opening, if set; false: the layer does not exist any more
	open   atomic.Int32
	opened []string
}

func (d *layerDisk) LayerNames() ([]string, error) { return slices.Sorted(maps.Keys(d.layers)), nil }

func (d *layerDisk) ChunkDigests(uid string, first, n int64) (sums []byte, err error) {
	l := d.layers[uid]
	if l == nil {
		return nil, api.Errorf(api.NotFound, "layer %s: does not exist", uid)
	}
	for c := first; c < first+n && c*chunkSize < l.size; c++ {
		b := make([]byte, l.length(c))
		copy(b, l.chunks[c])
		sum := blob.Sum(b)
		sums = append(sums, sum[:]...)
	}
	return sums, nil
}

func (d *layerDisk) Open(uid string) (block.Source, error) {
	d.opened = append(d.opened, uid)
	if d.visit != nil && !d.visit(uid) {
		return nil, api.Errorf(api.NotFound, "layer %s: does not exist", uid)
	}
	if d.busy[uid] {
		return nil, api.Errorf(api.Busy, "layer %s: a merge is in progress", uid)
	}
	if d.open.Add(1) > 1 {
		d.Errorf("layer %s is open beside another one", uid)
	}
	return &openLayer{d.layers[uid], d}, nil
}

// openLayer is an open layer of a layerDisk.
type openLayer struct {
	*disk
	on *layerDisk
}

func (l *openLayer) Close() error {
	l.on.open.Add(-1)
	return nil
}

// sources are the layers of the disk alone.
func (d *layerDisk) sources() Sources {
	s := yieldNamed("")
	s.Disks = func(context.Context) iter.Seq2[block.LayerReader, error] {
		return func(yield func(block.LayerReader, error) bool) { yield(d, nil) }
	}
	return s
}

// damaged backs a volume up, whose first chunks the store damages.
func (w *world) damaged(v *disk, chunks int64) repo.Damage {
	w.Helper()
	w.backup(v, options("v"))
	for c := range chunks {
		w.damagePack(blob.Sum(v.chunks[c]))
	}
	return w.verify()
}

// TestHealFindsChunksAtAnyPlace: the layers of a disk have lost chunks of a backup at other places, among them one in two
// layers, and the short last chunk, which ends within a block. The heal stores all, opens no layer without a lost chunk,
// and reads each chunk once.
func TestHealFindsChunksAtAnyPlace(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(3*chunkSize - 512)
	v.fill(1, 0, 1, 2)
	damage := w.damaged(v, 3)
	first, second, other := newDisk(9*chunkSize), newDisk(3*chunkSize), newDisk(3*chunkSize)
	first.chunks[7] = v.chunks[0]
	second.chunks[0], second.chunks[1] = v.chunks[1], v.chunks[0]
	second.chunks[2] = append(slices.Clone(v.chunks[2]), make([]byte, 512)...)
	other.fill(5, 0)
	d := &layerDisk{TB: t, layers: map[string]*disk{"a": first, "b": second, "c": other, "d": newDisk(chunkSize)}}
	healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, d.sources())
	must(t, err)
	if left := w.verify(); healed != 3 || !left.IsZero() {
		t.Errorf("%d blobs healed; left: %+v", healed, left)
	}
	if n := first.reads.Load() + second.reads.Load(); n != 3 || slices.Contains(d.opened, "c") ||
		slices.Contains(d.opened, "d") {
		t.Errorf("%d reads, opened: %v", n, d.opened)
	}
}

// TestHealLooksIntoTheResultOfAMerge: when a heal opens a layer with a lost chunk, the layer has just been merged into
// another one. The heal finds the chunk in the result.
func TestHealLooksIntoTheResultOfAMerge(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(2 * chunkSize)
	v.fill(1, 0, 1)
	damage := w.damaged(v, 1)
	d := &layerDisk{TB: t, layers: map[string]*disk{"lower": v, "upper": newDisk(chunkSize)}}
	d.visit = func(uid string) bool {
		if uid == "lower" {
			d.layers = map[string]*disk{"a result": v}
		}
		return d.layers[uid] != nil
	}
	healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, d.sources())
	must(t, err)
	if left := w.verify(); healed != 1 || !left.IsZero() {
		t.Errorf("%d blobs healed; left: %+v", healed, left)
	}
}

// TestLayerInAMergeIsNoFailure: the layer with a lost chunk is in a merge. The heal stores the chunk that another layer
// has, comes back to the layer, and ends with an error of kind busy while the merge lasts. A layer whose merge ends
// meanwhile is read. The same holds for a snapshot.
func TestLayerInAMergeIsNoFailure(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v, other := newDisk(2*chunkSize), newDisk(2*chunkSize)
	v.fill(1, 0, 1)
	other.chunks[1] = v.chunks[1]
	damage := w.damaged(v, 2)
	d := &layerDisk{TB: t, layers: map[string]*disk{"a": v, "b": other}, busy: map[string]bool{"a": true}}
	healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, d.sources())
	if healed != 1 || !api.Is(err, api.Busy) || !slices.Equal(d.opened, []string{"a", "b", "a"}) {
		t.Errorf("%d blobs healed, %v; opened %v", healed, err, d.opened)
	}
	times := 0
	snapshot := func(context.Context) (block.Source, error) {
		if times++; times == 1 {
			return nil, api.Errorf(api.Busy, "a cut is in progress")
		}
		return v, nil
	}
	healed, err = Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{}, yieldNamed("v", snapshot))
	must(t, err)
	if left := w.verify(); healed != 1 || times != 2 || !left.IsZero() {
		t.Errorf("%d blobs healed, %d times; left: %+v", healed, times, left)
	}
}

// TestNoLayerIsOpenWhileTheStoreHangs: the store hangs in the middle of a heal, which has filled its packs. No layer is
// open then, and the heal holds the memory of its writer and of its batch alone. When the store answers, the heal goes
// on.
func TestNoLayerIsOpenWhileTheStoreHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		v := newDisk(16 * chunkSize)
		chunks := make([]int64, 16)
		for i := range chunks {
			chunks[i] = int64(i)
		}
		v.fill(1, chunks...)
		damage := w.damaged(v, 16)
		for _, c := range []struct {
			name    string
			sources func(*layerDisk) Sources
		}{
			{"layers", (*layerDisk).sources},
			{"snapshots", func(d *layerDisk) Sources {
				return yieldNamed("v", func(context.Context) (block.Source, error) { return d.Open("a") })
			}},
		} {
			d := &layerDisk{TB: t, layers: map[string]*disk{"a": v}}
			hangs, fails := make(chan struct{}), errors.New("the store is gone")
			w.store.before = func(operation, name string) error {
				if operation == "put" && strings.HasPrefix(name, "data/") {
					<-hangs
					return fails
				}
				return nil
			}
			read := v.reads.Load()
			ended := make(chan error, 1)
			o := repo.WriterOptions{PackSize: 3 << 20, Memory: 12 << 20, Beside: 2 * chunkSize}
			go func() {
				_, err := Heal(t.Context(), w.r, damage.Snapshots, o, c.sources(d))
				ended <- err
			}()
			synctest.Wait()
			if n := v.reads.Load() - read; d.open.Load() != 0 || n < 4 || n > 8 {
				t.Errorf("%s: %d layers are open while the store hangs, after %d reads", c.name, d.open.Load(), n)
			}
			close(hangs)
			if err := <-ended; !errors.Is(err, fails) {
				t.Errorf("%s: %v", c.name, err)
			}
			w.store.before = nil
		}
		d := &layerDisk{TB: t, layers: map[string]*disk{"a": v}}
		healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{Beside: 2 * chunkSize}, d.sources())
		must(t, err)
		if left := w.verify(); healed != 16 || !left.IsZero() {
			t.Errorf("%d blobs healed; left: %+v", healed, left)
		}
	})
}

// slowSource is a source of a slow disk, which records when it was open.
type slowSource struct {
	*disk
	opens *[]time.Duration // when the source was opened and closed, in turn
	began time.Time
}

func (s *slowSource) ReadAt(p []byte, off int64) (int, error) {
	time.Sleep(300 * time.Millisecond)
	return s.disk.ReadAt(p, off)
}

func (s *slowSource) Close() error {
	*s.opens = append(*s.opens, time.Since(s.began))
	return nil
}

// TestHealLetsMergesBegin: a heal of a slow disk keeps no source open for long, neither for chunks that the source has
// nor for others, and sources are closed for a second in every few seconds, in which a merge begins.
func TestHealLetsMergesBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		v := newDisk(32 * chunkSize)
		chunks := make([]int64, 32)
		for i := range chunks {
			chunks[i] = int64(i)
		}
		v.fill(1, chunks...)
		other := v.copy(v.size)
		other.fill(2, chunks[8:]...)
		damage := w.damaged(v, 32)
		var opens []time.Duration
		began := time.Now()
		source := func(context.Context) (block.Source, error) {
			opens = append(opens, time.Since(began))
			return &slowSource{other, &opens, began}, nil
		}
		healed, err := Heal(t.Context(), w.r, damage.Snapshots, repo.WriterOptions{Beside: 2 * chunkSize},
			yieldNamed("v", source))
		must(t, err)
		if healed != 8 || len(opens) < 12 {
			t.Errorf("%d blobs healed, opened and closed at %v", healed, opens)
		}
		pause := time.Duration(0)
		for i := 0; i+1 < len(opens); i += 2 {
			if i > 0 && opens[i]-opens[i-1] >= time.Second {
				pause = opens[i]
			}
			if open := opens[i+1] - opens[i]; open > 2*time.Second || opens[i+1]-pause > 4*time.Second {
				t.Errorf("open for %v, %v after a pause; opened and closed at %v", open, opens[i+1]-pause, opens)
			}
		}
	})
}
