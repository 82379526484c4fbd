package repo

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/budget"
	"drover.io/drover/block/suite"
)

// manyBlobs stores data blobs in packs, and returns their ids.
func manyBlobs(t *testing.T, r *Repository, n, packSize int) (ids []blob.ID, bodies [][]byte) {
	w := newWriter(t, loadIndex(t, r), WriterOptions{PackSize: packSize, Memory: int64(3 * packSize)})
	for i := range n {
		body := content(i)
		id, _, err := w.Add(t.Context(), blob.Data, body)
		must(t, err)
		ids, bodies = append(ids, id), append(bodies, body)
	}
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	return ids, bodies
}

// TestReadManyReadsNeighboursTogether: all blobs, in random order and some of them twice, arrive once per place; a pack
// costs one request.
func TestReadManyReadsNeighboursTogether(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	ids, bodies := manyBlobs(t, r, 300, 60_000)
	random := rand.New(rand.NewPCG(suite.Seed(t), 0))
	places := append(random.Perm(len(ids)), random.Perm(len(ids))[:100]...)
	wanted := make([]blob.ID, len(places))
	for i, p := range places {
		wanted[i] = ids[p]
	}
	b := loadIndex(t, r)
	var mu sync.Mutex
	gets := 0
	store.before = func(operation, name string) error {
		mu.Lock()
		defer mu.Unlock()
		if operation == "get" {
			gets++
		}
		return nil
	}
	seen := map[int]int{}
	must(t, b.ReadMany(t.Context(), blob.Data, wanted, func(place int, plain []byte, err error) error {
		mu.Lock()
		defer mu.Unlock()
		if seen[place]++; err != nil || !bytes.Equal(plain, bodies[places[place]]) {
			t.Errorf("place %d: %d bytes, %v", place, len(plain), err)
		}
		return nil
	}))
	if packs := len(store.names(dataFolder)); len(seen) != len(places) || gets != packs || packs < 4 {
		t.Errorf("%d of %d places by %d requests of %d packs", len(seen), len(places), gets, packs)
	}
	for place, n := range seen {
		if n != 1 {
			t.Errorf("place %d was read %d times", place, n)
		}
	}
}

// TestReadManyReportsDamageAlone: a damaged blob, blobs of a lost pack and a blob that the index does not have are
// reported with their places; all others are read.
func TestReadManyReportsDamageAlone(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	ids, bodies := manyBlobs(t, r, 100, 60_000)
	b := loadIndex(t, r)
	find := func(i int) (pack string, off uint32) {
		l, _, err := b.Find(t.Context(), ids[i], blob.Data)
		must(t, err)
		return packName(l.Pack), l.Offset
	}
	damagedPack, off := find(0)
	lostPack, _ := find(99)
	if damagedPack == lostPack {
		t.Fatal("the blobs are in one pack")
	}
	store.change(damagedPack, func(body []byte) []byte { body[off+20] ^= 1; return body })
	must(t, store.Delete(t.Context(), lostPack))
	ids = append(ids, blob.Sum([]byte("missing")))
	var mu sync.Mutex
	must(t, b.ReadMany(t.Context(), blob.Data, ids, func(place int, plain []byte, err error) error {
		mu.Lock()
		defer mu.Unlock()
		var damage *DamagedError
		switch {
		case place == 100:
			if !api.Is(err, api.NotFound) || errors.As(err, &damage) {
				t.Errorf("a missing blob: %v, want an error of kind not found", err)
			}
			return nil
		case !IsDamage(err) && err != nil:
			t.Errorf("place %d: %v", place, err)
		}
		pack, _ := find(place)
		if bad := place == 0 || pack == lostPack; bad != errors.As(err, &damage) ||
			!bad && !bytes.Equal(plain, bodies[place]) || bad && damage.Blob != ids[place] {
			t.Errorf("place %d, damaged %v: %d bytes, %v", place, bad, len(plain), err)
		}
		return nil
	}))
}

// TestReadManyEndsWithAnError: an error of the callback, and that of a store that does not answer, end ReadMany.
func TestReadManyEndsWithAnError(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	ids, _ := manyBlobs(t, r, 50, 60_000)
	b := loadIndex(t, r)
	stop := errors.New("stop")
	for _, list := range [][]blob.ID{ids, {{}}} {
		err := b.ReadMany(t.Context(), blob.Data, list, func(int, []byte, error) error { return stop })
		if !errors.Is(err, stop) {
			t.Errorf("%v, want the error of the callback", err)
		}
	}
	store.before = func(string, string) error { return api.Errorf(api.Unavailable, "no answer") }
	err := b.ReadMany(t.Context(), blob.Data, ids, func(int, []byte, error) error {
		t.Error("the callback is called")
		return nil
	})
	if !api.Is(err, api.Unavailable) {
		t.Errorf("%v, want an error of kind unavailable", err)
	}
}

// TestRunsAreBounded: blobs that are neighbours are read together up to the bound of a request; far ones apart.
func TestRunsAreBounded(t *testing.T) {
	blobAt := func(pack byte, off, n uint32) *foundBlob {
		f := &foundBlob{}
		f.Pack[0], f.Offset, f.Length = pack, off, n
		return f
	}
	sorted := []*foundBlob{
		blobAt(1, 0, 1000), blobAt(1, 1000, 1000), blobAt(1, 2000+runGap, 1000), // together
		blobAt(1, 3001+2*runGap, 1000),      // too far
		blobAt(2, 4001+2*runGap, 1000),      // another pack
		blobAt(2, 5001+2*runGap, runLength), // too large together
		blobAt(3, 10, runLength-20), blobAt(3, runLength-10, 20),
		blobAt(4, 0, 100), blobAt(4, 50, 100), // overlap: at least one is damaged
	}
	var got []int
	for _, run := range splitRuns(sorted) {
		got = append(got, len(run))
	}
	if want := []int{3, 1, 1, 1, 2, 1, 1}; !slices.Equal(got, want) {
		t.Errorf("the runs have %v blobs, want %v", got, want)
	}
	if splitRuns(nil) != nil {
		t.Error("no blobs make a run")
	}
}

// TestUrgentReadsDoNotWaitForOthers: while other reads have all their memory, an urgent read ends, and another read waits
// until the end of its context.
func TestUrgentReadsDoNotWaitForOthers(t *testing.T) {
	r := newRepository(t, newMemoryStore())
	ids, _ := manyBlobs(t, r, 3, 60_000)
	memory := budget.New(16 << 20)
	r.options.Reads, r.options.Urgent = memory.NewPart(8<<20), memory.NewPart(8<<20)
	release, err := r.options.Reads.Reserve(t.Context(), 8<<20)
	must(t, err)
	defer release()
	b := loadIndex(t, r)
	var read atomic.Int64
	count := func(_ int, _ []byte, err error) error { read.Add(1); return err }
	late, cancel := context.WithTimeout(t.Context(), time.Minute) // a read that waits fails, and does not hang
	defer cancel()
	must(t, b.ReadMany(UrgentContext(late), blob.Data, ids, count))
	stopped := errors.New("not wanted any more")
	waits, stop := context.WithCancelCause(t.Context())
	stop(stopped)
	if err := b.ReadMany(waits, blob.Data, ids, count); !errors.Is(err, stopped) || read.Load() != 3 {
		t.Errorf("%d blobs were read, %v", read.Load(), err)
	}
}
