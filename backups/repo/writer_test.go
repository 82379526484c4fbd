package repo

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/block/suite"
)

// content is the i-th blob of the tests: of different sizes, half of them compressible.
func content(i int) []byte {
	random := rand.New(rand.NewPCG(uint64(i), 7))
	b := make([]byte, 8+random.IntN(3000))
	for j := range b {
		if i%2 == 0 {
			b[j] = byte(random.Uint32())
		}
	}
	binary.LittleEndian.PutUint64(b, uint64(i))
	return b
}

func kindOf(i int) blob.Kind { return blob.Kind(i % 3 / 2) }

func newWriter(t testing.TB, b *Blobs, o WriterOptions) *Writer {
	t.Helper()
	w, err := NewWriter(t.Context(), b, o)
	must(t, err)
	return w
}

func addBlobs(t testing.TB, w *Writer, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		_, _, err := w.Add(t.Context(), kindOf(i), content(i))
		must(t, err)
	}
}

func compareBlobs(t testing.TB, b *Blobs, from, to int) {
	t.Helper()
	into := make([]byte, 4000)
	for i := from; i < to; i++ {
		plain, err := b.Read(t.Context(), blob.Sum(content(i)), kindOf(i), into)
		if err != nil || !bytes.Equal(plain, content(i)) {
			t.Fatalf("blob %d: read %d bytes, %v", i, len(plain), err)
		}
	}
}

// packEntries reads the headers of all packs in the store.
func packEntries(t testing.TB, r *Repository, store *memoryStore) map[blobHandle]int {
	t.Helper()
	count := map[blobHandle]int{}
	for _, name := range store.names(dataFolder) {
		entries, err := pack.ReadHeader(r.key, int64(len(store.objects[name].body)), func(off, n int64) ([]byte, error) {
			return store.Get(t.Context(), name, off, n)
		})
		must(t, err)
		for _, e := range entries {
			count[blobHandle{e.ID, e.Kind}]++
		}
		if id := blob.Sum(store.objects[name].body); packName(id) != name {
			t.Errorf("pack %s has the bytes of %s", name, id)
		}
	}
	return count
}

// TestEqualBlobsAreStoredOnce: eight goroutines that add the same blobs in different orders, in two sessions, store
// each blob in one pack, and every reader finds all blobs: in the Writer's session and in a new one, and with so few
// blobs in memory that the index table is merged again and again.
func TestEqualBlobsAreStoredOnce(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	const blobs = 600
	var added atomic.Int64
	for session := range 2 {
		b := loadIndex(t, r)
		b.limit = 50
		w := newWriter(t, b, WriterOptions{PackSize: 20_000, Memory: 100_000})
		group, ctx := errgroup.WithContext(t.Context())
		for g := range 8 {
			group.Go(func() error {
				for _, i := range rand.New(rand.NewPCG(uint64(g), suite.Seed(t))).Perm(blobs) {
					_, isNew, err := w.Add(ctx, kindOf(i), content(i))
					if err != nil {
						return err
					}
					if isNew {
						added.Add(1)
					}
				}
				return nil
			})
		}
		must(t, group.Wait())
		must(t, w.Flush(t.Context()))
		compareBlobs(t, b, 0, blobs)
		stats := w.Stats()
		want := int64(blobs * (1 - session))
		if stats.NewBlobs != want || added.Load() != blobs || stats.KnownBlobs != 8*blobs-want {
			t.Errorf("session %d: %+v, %d added", session, stats, added.Load())
		}
		must(t, w.Close())
	}
	entries := packEntries(t, r, store)
	for h, n := range entries {
		if n != 1 {
			t.Errorf("%v blob %s lies in %d packs", h.kind, h.id, n)
		}
	}
	if len(entries) != blobs {
		t.Errorf("the packs have %d blobs, want %d", len(entries), blobs)
	}
	compareBlobs(t, loadIndex(t, openRepository(t, store)), 0, blobs)
}

// TestPacksAreDurableBeforeTheirIndex: whenever an index file is written, the store has all packs in it; data and trees
// never share a pack.
func TestPacksAreDurableBeforeTheirIndex(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	indexed := 0
	store.after = func(operation, name string) error {
		id, err := blob.Parse(strings.TrimPrefix(name, indexFolder))
		if operation != "put" || err != nil {
			return nil
		}
		return scanIndexFile(r, store, id, func(p index.Pack) error {
			indexed += len(p.Entries)
			for _, e := range p.Entries {
				if e.Kind != p.Entries[0].Kind {
					t.Errorf("pack %s has data and trees", p.ID)
				}
			}
			_, err := store.Stat(context.Background(), packName(p.ID))
			return err
		})
	}
	w := newWriter(t, loadIndex(t, r), WriterOptions{PackSize: 5000})
	addBlobs(t, w, 0, 2000)
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	if indexed != 2000 {
		t.Errorf("the index files have %d blobs, want 2000", indexed)
	}
	if n := len(store.names(indexFolder)); n < 2 {
		t.Errorf("%d index files for %d packs, want one per 256", n, w.Stats().Packs)
	}
}

func scanIndexFile(r *Repository, store *memoryStore, id blob.ID, each func(index.Pack) error) error {
	o, err := store.Stat(context.Background(), indexFolder+id.String())
	if err != nil {
		return err
	}
	return r.loadFile(context.Background(), namedFile{o, id}, indexLimit, indexPlain, func(plain io.Reader) error {
		_, err := index.Scan(plain, each)
		return err
	})
}

// TestIndexIsWrittenByTheClock: a slow backup loses at most the packs of the last 30 seconds.
func TestIndexIsWrittenByTheClock(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		b, err := r.LoadIndex(t.Context())
		must(t, err)
		w := newWriter(t, b, WriterOptions{PackSize: 5000})
		addBlobs(t, w, 0, 20)
		synctest.Wait()
		if n := len(store.names(indexFolder)); n != 0 {
			t.Errorf("%d index files at once", n)
		}
		<-time.After(indexStep)
		synctest.Wait()
		if n := len(store.names(indexFolder)); n != 1 {
			t.Errorf("%d index files after 30 seconds, want 1", n)
		}
		<-time.After(time.Hour)
		synctest.Wait()
		if n := len(store.names(indexFolder)); n != 1 {
			t.Errorf("%d index files of an idle Writer, want 1", n)
		}
		must(t, w.Close())
		must(t, b.Close())
	})
}

// TestMemoryIsBounded: while the store takes no pack, Add blocks before the packs are larger than the memory; the end
// of the caller's context ends the wait and the Writer.
func TestMemoryIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		release := make(chan struct{})
		store.before = func(operation, _ string) error {
			if operation == "put" {
				<-release
			}
			return nil
		}
		b, err := r.LoadIndex(t.Context())
		must(t, err)
		w := newWriter(t, b, WriterOptions{PackSize: 10_000, Memory: 60_000})
		ctx, cancel := context.WithCancel(t.Context())
		var accepted atomic.Int64
		ended := make(chan error)
		go func() {
			for i := 0; ; i += 2 { // random bytes
				if _, _, err := w.Add(ctx, blob.Data, content(i)); err != nil {
					ended <- err
					return
				}
				accepted.Add(int64(len(content(i))))
			}
		}()
		synctest.Wait()
		if n := accepted.Load(); n > 60_000 || n < 30_000 {
			t.Errorf("the Writer took %d bytes with a memory of 60,000", n)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Add ended with %v, want the context's error", err)
		}
		close(release)
		if err := w.Flush(t.Context()); !errors.Is(err, context.Canceled) {
			t.Errorf("Flush after a lost blob: %v, want the error of Add", err)
		}
		if err := w.Close(); !errors.Is(err, context.Canceled) {
			t.Errorf("Close after a lost blob: %v, want the error of Add", err)
		}
		must(t, b.Close())
	})
}

// TestWriterStopsWithTheFirstError: after a failed pack or index file no Add and no Flush succeeds, and Close returns
// the error; a wrong size is the caller's error alone.
func TestWriterStopsWithTheFirstError(t *testing.T) {
	for _, folder := range []string{dataFolder, indexFolder} {
		store := newMemoryStore()
		r := newRepository(t, store)
		w := newWriter(t, loadIndex(t, r), WriterOptions{PackSize: 5000})
		for _, size := range []int{0, 5000} {
			if _, _, err := w.Add(t.Context(), blob.Data, make([]byte, size)); !api.Is(err, api.Invalid) {
				t.Errorf("a blob of %d bytes: %v, want an error of kind invalid", size, err)
			}
		}
		addBlobs(t, w, 0, 10)
		must(t, w.Flush(t.Context()))
		store.before = func(operation, name string) error {
			if operation == "put" && strings.HasPrefix(name, folder) {
				return api.Errorf(api.Full, "the disk is full")
			}
			return nil
		}
		_, _, err := w.Add(t.Context(), blob.Data, content(100))
		must(t, err)
		if err := w.Flush(t.Context()); !api.Is(err, api.Full) {
			t.Errorf("%s: Flush: %v, want an error of kind full", folder, err)
		}
		store.before = nil
		if _, _, err := w.Add(t.Context(), blob.Data, content(100)); !api.Is(err, api.Full) {
			t.Errorf("%s: Add after the error: %v, want an error of kind full", folder, err)
		}
		if err := w.Flush(t.Context()); !api.Is(err, api.Full) {
			t.Errorf("%s: Flush after the error: %v, want an error of kind full", folder, err)
		}
		if err := w.Close(); !api.Is(err, api.Full) {
			t.Errorf("%s: Close: %v, want an error of kind full", folder, err)
		}
	}
}

// TestWriterEndsWithTheSession: a lost lock stops the Writer.
func TestWriterEndsWithTheSession(t *testing.T) {
	r := newRepository(t, newMemoryStore())
	session, end := context.WithCancelCause(t.Context())
	w, err := NewWriter(session, loadIndex(t, r), WriterOptions{})
	must(t, err)
	lost := errors.New("lost")
	end(lost)
	if _, _, err := w.Add(t.Context(), blob.Data, content(1)); !errors.Is(err, lost) {
		t.Errorf("Add: %v, want the session's error", err)
	}
	if err := w.Flush(t.Context()); !errors.Is(err, lost) {
		t.Errorf("Flush: %v, want the session's error", err)
	}
	if err := w.Close(); !errors.Is(err, lost) {
		t.Errorf("Close: %v, want the session's error", err)
	}
}

// TestOnlyWorthwhileCompressionIsStored: text is compressed, random bytes are not, of any size.
func TestOnlyWorthwhileCompressionIsStored(t *testing.T) {
	random := make([]byte, 1<<20)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	for _, n := range []int{1, 100, 50_000, probeFrom, 1<<20 - 1} {
		text := bytes.Repeat([]byte("text "), n/5+1)[:n]
		var scratch []byte
		if stored, plain := compressBlob(blob.Data, text, &scratch); n > 50 && (plain != n || len(stored) > n/2) {
			t.Errorf("%d bytes of text: stored as %d, plain length %d", n, len(stored), plain)
		}
		if stored, plain := compressBlob(blob.Data, random[:n], &scratch); plain != 0 || !bytes.Equal(stored, random[:n]) {
			t.Errorf("%d random bytes: stored as %d, plain length %d", n, len(stored), plain)
		}
	}
}

// TestPacksFollowTheirBound: each pack has at most the bytes that Options.LargestPack allows when the pack begins, and
// those of the Writer's own bound. A blob that is larger than LargestPack allows has a pack of its own.
func TestPacksFollowTheirBound(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	largest := int64(0)
	r.options.LargestPack = func() int64 { return largest }
	w := newWriter(t, loadIndex(t, r), WriterOptions{PackSize: 40_000, Memory: 400_000})
	seen := map[string]bool{}
	sizes := func() (most, count int) {
		for _, name := range store.names(dataFolder) {
			if !seen[name] {
				seen[name], most, count = true, max(most, len(store.objects[name].body)), count+1
			}
		}
		return most, count
	}
	random := rand.NewChaCha8([32]byte{1})
	for _, c := range []struct{ largest, blob, most, least, packs int }{
		{0, 3_000, 40_000, 30_000, 3}, {8_000, 3_000, 8_000, 6_000, 15}, {1 << 30, 3_000, 40_000, 30_000, 3},
		{8_000, 30_000, 31_000, 30_000, 30},
	} {
		largest = int64(c.largest)
		for range 30 {
			body := make([]byte, c.blob)
			_, _ = random.Read(body)
			_, _, err := w.Add(t.Context(), blob.Data, body)
			must(t, err)
		}
		must(t, w.Flush(t.Context()))
		if most, count := sizes(); most > c.most || most < c.least || count != c.packs {
			t.Errorf("at most %d bytes, blobs of %d: %d packs of up to %d bytes, want %d of %d to %d", c.largest, c.blob,
				count, most, c.packs, c.least, c.most)
		}
	}
	must(t, w.Close())
}
