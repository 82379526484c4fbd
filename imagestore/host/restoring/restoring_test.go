package restoring

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/replicas/stack"
)

const chunk = block.ChunkSize

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// store is a store with one backup.
type store struct {
	content []byte
	seed    uint64 // of the order and the sizes of a restore's writes

	mu      sync.Mutex
	damaged map[int64]bool
	lost    []int64       // a restore lists them, although it wrote them or needs not to: a list of chunks is damaged
	away    bool          // reads fail
	opens   int           //
	closed  int           //
	left    int           // of the closed ones
	read    map[int64]int // by chunk, for readers
	written map[int64]int // by chunk, for restores
	hold    chan struct{} // a restore waits here behind each chunk; nil: it does not wait
}

func newStore(size int64) *store {
	s := &store{content: make([]byte, size), damaged: map[int64]bool{}, read: map[int64]int{}, written: map[int64]int{}}
	_, _ = rand.NewChaCha8([32]byte{1}).Read(s.content)
	return s
}

func (s *store) open(ctx context.Context) (block.Backup, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, api.Errorf(api.Unavailable, "the store is away")
	}
	s.opens++
	return &backup{store: s, ctx: ctx, damaged: maps.Clone(s.damaged)}, nil
}

func (s *store) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// backup is an open backup; after a failure every use fails, as without the lock of a repository.
type backup struct {
	*store
	ctx     context.Context
	failed  bool           // guarded by store.mu
	damaged map[int64]bool // by the index of when the backup was opened
}

func (b *backup) Size() int64              { return int64(len(b.content)) }
func (b *backup) Restored() (int64, int64) { return 0, b.Size() }
func (b *backup) Checksum() string         { return "" }

func (b *backup) Close() error {
	b.change(func() { b.closed++ })
	return nil
}

// Leave implements block.ContinuedBackup.
func (b *backup) Leave() error {
	b.change(func() { b.left++ })
	return b.Close()
}

func (b *backup) part(c int64) []byte { return b.content[c*chunk : min((c+1)*chunk, b.Size())] }
func (b *backup) chunks() int64       { return (b.Size() + chunk - 1) / chunk }

func (b *backup) isZero(c int64) bool { return len(bytes.Trim(b.part(c), "\x00")) == 0 }

// check fails if the store is away, or was away before.
func (b *backup) check(c int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.failed || b.away:
		b.failed = true
		return api.Errorf(api.Unavailable, "the store is away")
	case b.damaged[c]:
		return api.Errorf(api.Corrupt, "chunk %d is damaged", c)
	}
	return nil
}

func (b *backup) Digests(_ context.Context, each func(int64, [32]byte)) error {
	for c := range b.chunks() {
		if !b.isZero(c) {
			each(c, sha256.Sum256(b.part(c)))
		}
	}
	return nil
}

func (b *backup) ReadChunk(_ context.Context, c int64, buf []byte) error {
	b.change(func() { b.read[c]++ })
	if err := b.check(c); err != nil {
		return err
	}
	copy(buf, b.part(c))
	return nil
}

func (b *backup) Restore(ctx context.Context, sink block.Sink) error {
	_, err := b.RestoreIntact(ctx, sink, nil)
	return err
}

func (b *backup) RestoreIntact(ctx context.Context, sink block.Sink, skip func(int64) bool) (
	damaged []int64, err error) {
	rnd := rand.New(rand.NewPCG(1, b.seed))
	for _, i := range rnd.Perm(int(b.chunks())) {
		c := int64(i)
		if b.isZero(c) || skip != nil && skip(c) {
			continue
		}
		if err := b.check(c); api.Is(err, api.Corrupt) {
			damaged = append(damaged, c)
			continue
		} else if err != nil {
			return nil, err
		}
		b.change(func() { b.written[c]++ })
		step := []int64{chunk, 128 << 10}[rnd.IntN(2)]
		for off := int64(0); off < int64(len(b.part(c))); off += step {
			p := b.part(c)[off:min(off+step, int64(len(b.part(c))))]
			if _, err := sink.WriteAt(p, c*chunk+off); err != nil {
				return nil, err
			}
		}
		if b.hold != nil {
			select {
			case <-b.hold:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
	}
	return append(damaged, b.lost...), sink.Sync(ctx)
}

// world is a Set with a disk and a layer of the store.
type world struct {
	*store
	t    *testing.T
	set  *Set
	disk *stack.Disk
	spec importer.Spec
	l    *Layer
	end  func() // of the process
}

func newDisk(t *testing.T) *stack.Disk {
	t.Helper()
	d, err := stack.Add(t.Context(), t.TempDir())
	must(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func newWorld(t *testing.T, s *store) *world {
	t.Helper()
	return worldOn(t, s, newDisk(t), importer.Spec{UID: api.NewUID(), Name: "golden", Layers: []api.UID{api.NewUID()}})
}

func worldOn(t *testing.T, s *store, on *stack.Disk, spec importer.Spec) *world {
	t.Helper()
	w := &world{store: s, t: t, disk: on, spec: spec,
		set: NewSet(Options{PauseMin: time.Millisecond, PauseMax: 5 * time.Millisecond})}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = w.set.Start(ctx)
	}()
	w.end = sync.OnceFunc(func() {
		cancel()
		<-ended
		s.change(func() {
			if s.opens != s.closed {
				t.Errorf("%d of %d open backups were closed", s.closed, s.opens)
			}
		})
	})
	t.Cleanup(w.end)
	w.l = w.set.Add(w.disk, w.uid(), s.open)
	return w
}

func (w *world) uid() string { return string(w.spec.Layers[0]) }

// plan opens the layer, and returns its root digest.
func (w *world) plan() string {
	w.t.Helper()
	root, size, readable, err := w.l.Open(w.t.Context())
	must(w.t, err)
	if !readable || size != int64(len(w.content)) {
		w.t.Fatalf("the layer of %d bytes is readable: %v", size, readable)
	}
	return root
}

func (w *world) source() block.Source {
	w.t.Helper()
	src, err := w.set.Disk(w.disk).Open(w.uid())
	must(w.t, err)
	w.t.Cleanup(func() { _ = src.Close() })
	return src
}

// compare reads a chunk, and demands the bytes of the backup.
func (w *world) compare(src block.Source, c int64) {
	w.t.Helper()
	n := min(chunk, src.Size()-c*chunk)
	got, want := make([]byte, n), make([]byte, n)
	copy(want, w.content[c*chunk:])
	_, err := src.ReadAt(got, c*chunk)
	must(w.t, err)
	if !bytes.Equal(got, want) {
		w.t.Errorf("chunk %d has other bytes than the backup", c)
	}
}

func (w *world) restore(f *Fill) (importer.Result, error) {
	return importer.Restore(w.t.Context(), w.disk, w.spec, f, nil, &importer.Progress{})
}

// contents are backups with whole chunks of zeros, chunks with zeros inside, and a last part of a block.
func contents() []*store {
	odd := newStore(5*chunk + 3*block.Size + 512)
	clear(odd.content[chunk : 2*chunk])
	clear(odd.content[2*chunk+block.Size : 2*chunk+(1<<20)])
	short := newStore(512)
	zeroEnd := newStore(2*chunk + 512)
	clear(zeroEnd.content[2*chunk:])
	zeros := newStore(3 * chunk)
	clear(zeros.content)
	return []*store{odd, short, zeroEnd, zeros}
}

// TestPlannedLayerIsTheRestoredLayer: the root digest, the digests and the map that readers get before the data are
// those of the layer that the restore seals, in every order and size of its writes. Another disk accepts the map.
func TestPlannedLayerIsTheRestoredLayer(t *testing.T) {
	t.Parallel()
	for _, s := range contents() {
		var roots []string
		for seed := range uint64(2) {
			s.seed = seed
			w := newWorld(t, s)
			root := w.plan()
			roots = append(roots, root)
			on := w.set.Disk(w.disk)
			sums, err := on.(*disk).Sums(w.uid())
			must(t, err)
			src := w.source()
			other := newDisk(t)
			must(t, other.Hydrate(t.Context(), w.uid(), root, src, sums))
			for c := range (src.Size() + chunk - 1) / chunk {
				w.compare(src, c)
			}

			got, err := w.restore(w.l.Fill(false))
			must(t, err)
			if got.Digest != root || got.VirtualSize != int64(len(s.content)) {
				t.Errorf("%d bytes: the restored layer has the root %s, and readers got %s", len(s.content), got.Digest, root)
			}
			if got.Allocated > int64(len(s.content))+64<<10 {
				t.Errorf("%d bytes take %d on the disk", len(s.content), got.Allocated)
			}
			w.set.Remove(w.disk.UID(), w.uid())
			must(t, w.disk.Verify(t.Context(), w.uid()))
			for c := range (src.Size() + chunk - 1) / chunk { // from the disk now
				w.compare(src, c)
			}
		}
		if roots[0] != roots[1] {
			t.Errorf("one backup has the roots %v", roots)
		}
	}
}

// TestChunkIsFetchedOnce: readers of one chunk share a fetch, a reader in order finds the next chunks fetched, a chunk
// that the restore has written is not fetched at all, and the restore does not fetch the chunks of readers.
func TestChunkIsFetchedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(12*chunk))
	w.plan()
	src := w.source()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { w.compare(src, 11) })
	}
	wg.Wait()
	for c := range int64(11) {
		w.compare(src, c)
	}
	w.change(func() {
		for c := range int64(12) {
			if w.read[c] != 1 {
				t.Errorf("chunk %d was fetched %d times", c, w.read[c])
			}
		}
		clear(w.read)
		w.hold = make(chan struct{})
	})
	w.set.forget(w.l)

	ended := make(chan error, 1)
	go func() {
		_, err := w.restore(w.l.Fill(false))
		ended <- err
	}()
	for range 6 {
		w.hold <- struct{}{} // the chunk before it is written
	}
	var filled, left []int64
	for c := range int64(12) {
		if w.l.isFilled(c) {
			filled = append(filled, c)
		} else {
			left = append(left, c)
		}
	}
	for _, c := range filled {
		w.compare(src, c)
	}
	w.change(func() {
		for _, c := range filled {
			if w.read[c] > 0 {
				t.Errorf("chunk %d was fetched although the restore has written it", c)
			}
		}
	})
	if len(filled) < 6 || len(left) == 0 {
		t.Errorf("the restore has written %v, and lacks %v", filled, left)
	}
	for _, c := range left {
		w.compare(src, c)
	}
	for _, c := range left {
		for !w.l.isFilled(c) { // a reader does not wait for the write
			runtime.Gosched()
		}
	}
	close(w.hold)
	must(t, <-ended)
	if n := len(w.written); n > len(filled)+1 { // the restore may have been writing one
		t.Errorf("the restore wrote %d chunks, although readers fetched %v before it", n, left)
	}
	for c := range int64(12) {
		w.compare(src, c)
	}
}

// TestStoreThatWasAway: reads and the restore fail or wait while the store is away, and continue afterwards with a
// backup that was opened again. The restore writes no chunk twice.
func TestStoreThatWasAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(6*chunk))
	w.plan()
	src := w.source()
	w.compare(src, 0)
	w.hold = make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		_, err := w.restore(w.l.Fill(false))
		ended <- err
	}()
	for range 2 {
		w.hold <- struct{}{}
	}
	w.change(func() { w.away = true })
	var lacks int64
	for w.l.isFilled(lacks) || lacks == 0 {
		lacks++
	}
	if _, err := src.ReadAt(make([]byte, chunk), lacks*chunk); !api.Is(err, api.Unavailable) {
		t.Errorf("a read without the store: %v", err)
	}
	if why, _ := w.l.Problem(); !strings.Contains(why, "the store is away") {
		t.Errorf("the problem is %q", why)
	}
	w.change(func() { w.away = false })
	close(w.hold)
	must(t, <-ended)
	w.change(func() {
		for c, n := range w.written {
			if n != 1 {
				t.Errorf("chunk %d was written %d times", c, n)
			}
		}
		if w.opens < 2 {
			t.Error("the backup was not opened again")
		}
	})
	w.compare(src, lacks)
	if why, _ := w.l.Problem(); why != "" {
		t.Errorf("afterwards the problem is %q", why)
	}
}

// TestRemovedLayer: a read of a layer that is not restored any more fails.
func TestRemovedLayer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(2*chunk))
	w.plan()
	src := w.source()
	w.set.Remove(w.disk.UID(), w.uid())
	if _, err := src.ReadAt(make([]byte, chunk), 0); !api.Is(err, api.NotFound) {
		t.Errorf("the read of a removed layer: %v", err)
	}
	if _, err := w.set.Disk(w.disk).Open(w.uid()); !api.Is(err, api.NotFound) {
		t.Errorf("the open of a removed layer: %v", err)
	}
}

// TestChunksOfTheDiskAreNotFetched: a restore takes the chunks that layers of the node's disks have at the same place,
// and the others from the store. The restored layer has the content of the backup, also where a layer of the disk was
// damaged, and where the backup ends within a block.
func TestChunksOfTheDiskAreNotFetched(t *testing.T) {
	t.Parallel()
	const size = 9*chunk + 3*block.Size + 512
	older := newStore(size)
	near := newWorld(t, older)
	near.plan()
	first, err := near.restore(near.l.Fill(false))
	must(t, err)
	near.change(func() {
		if n := len(older.written); n != 10 {
			t.Errorf("the first restore fetched %d chunks", n)
		}
	})

	newer := newStore(size)
	newer.content[3*chunk]++
	clear(newer.content[4*chunk : 5*chunk])
	w := newWorld(t, newer)
	far := near.disk // of the same node
	w.set.Options.Disks = func(context.Context) []block.Layers { return []block.Layers{w.disk, far} }
	damage(t, far, first.Layers[0], 7*chunk)
	w.plan()
	f := w.l.Fill(false)
	_, err = w.restore(f)
	must(t, err)
	w.change(func() {
		if n := newer.written; len(n) != 2 || n[3] != 1 || n[7] != 1 {
			t.Errorf("the store sent the chunks %v; chunk 3 changed, and chunk 7 is damaged on the disk", n)
		}
	})
	if done, total := f.Restored(); done > total || f.local != size-2*chunk-chunk-512+block.Size {
		t.Errorf("%d bytes come from the disk; %d of %d", f.local, done, total)
	}
	src := w.source()
	for c := range int64(10) {
		w.compare(src, c)
	}
	w.set.Remove(w.disk.UID(), w.uid())
	must(t, w.disk.Verify(t.Context(), w.uid()))
}

// TestDiskHealsDamagedBackup: a chunk that the store damaged is restored from a layer of the disk.
func TestDiskHealsDamagedBackup(t *testing.T) {
	t.Parallel()
	s := newStore(3 * chunk)
	w := newWorld(t, s)
	w.plan()
	_, err := w.restore(w.l.Fill(false))
	must(t, err)
	s.damaged[1] = true
	w.spec = importer.Spec{UID: api.NewUID(), Name: "again", Layers: []api.UID{api.NewUID()}}
	w.l = w.set.Add(w.disk, w.uid(), s.open)
	w.plan()
	_, err = w.restore(w.l.Fill(false))
	must(t, err)
	w.compare(w.source(), 1)
}

// damage changes a byte of a layer's file of data.
func damage(t *testing.T, on *stack.Disk, uid string, off int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(on.Root, "layers", uid, "data"), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("damaged"), off)
	must(t, errors.Join(err, f.Close()))
}
