package longhorn

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"

	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/digests"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
)

// countingStore counts the reads of blocks.
type countingStore struct {
	target.Store
	mu    sync.Mutex
	reads map[string]int
}

func (s *countingStore) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	if strings.HasSuffix(name, ".blk") {
		s.mu.Lock()
		s.reads[name]++
		s.mu.Unlock()
	}
	return s.Store.Get(ctx, name, off, n)
}

// take returns how many blocks were read since the last call, and the most reads of one block.
func (s *countingStore) take() (blocks, most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.reads {
		blocks, most = blocks+1, max(most, n)
	}
	clear(s.reads)
	return blocks, most
}

// tableWorld is a store with a table of digests.
type tableWorld struct {
	*testing.T
	store *countingStore
	path  string
	table *digests.Table
}

func newTableWorld(t *testing.T) *tableWorld {
	w := &tableWorld{T: t, store: &countingStore{Store: newStore(t), reads: map[string]int{}},
		path: filepath.Join(t.TempDir(), "digests")}
	w.openTable()
	return w
}

func (w *tableWorld) openTable() {
	w.Helper()
	if w.table != nil {
		must(w, w.table.Close())
	}
	var err error
	w.table, err = digests.Open(w.path)
	must(w, err)
	w.Cleanup(func() { _ = w.table.Close() })
}

// open opens backup-1 of volume pvc-1.
func (w *tableWorld) open() *Opened {
	w.Helper()
	o, err := New(w.store, Options{Cache: w.TempDir(), Digests: w.table, Memory: NewMemory(32 * mib)}).
		OpenBackup(w.Context(), Name{"pvc-1", "backup-1"}, rawImages())
	must(w, err)
	w.Cleanup(func() { _ = o.Close() })
	w.store.take()
	return o
}

// demandUnknown demands that the list of digests is refused.
func (w *tableWorld) demandUnknown(o *Opened) {
	w.Helper()
	if err := o.Digests(w.Context(), func(int64, [32]byte) {}); !api.Is(err, api.Unsupported) {
		w.Errorf("digests that are not known: %v", err)
	}
}

// compareChunks demands the digests of all chunks of want that are not zeros, and reads all chunks.
func (w *tableWorld) compareChunks(o *Opened, want []byte) {
	w.Helper()
	got := map[int64][32]byte{}
	must(w, o.Digests(w.Context(), func(c int64, sum [32]byte) { got[c] = sum }))
	known, total, err := o.Known()
	if err != nil || known != total {
		w.Errorf("%d of %d chunks are known, %v", known, total, err)
	}
	n := int64(0)
	for chunk := range slices.Chunk(want, block.ChunkSize) {
		sum, is := got[n]
		if isZero(chunk) == is || is && sum != sha256.Sum256(chunk) {
			w.Errorf("chunk %d has the digest %x, %v", n, sum, is)
		}
		if digest, known := o.Digest(n); is && (!known || digest != sum) {
			w.Errorf("chunk %d has the digest %x for a copy", n, digest)
		}
		n++
	}
	if blocks, _ := w.store.take(); blocks > 0 {
		w.Errorf("the digests took reads of %d blocks", blocks)
	}
	var readers sync.WaitGroup
	for c := range n {
		readers.Go(func() {
			buf := bytes.Repeat([]byte{1}, int(min(block.ChunkSize, int64(len(want))-c*block.ChunkSize)))
			if err := o.ReadChunk(w.Context(), c, buf); err != nil || !bytes.Equal(buf, want[c*block.ChunkSize:][:len(buf)]) {
				w.Errorf("chunk %d: other bytes, or %v", c, err)
			}
		})
	}
	readers.Wait()
}

// TestVerifiedBackupIsKnownByChunks: after a verification, or a restore, of a backup above an image, the digests of all
// chunks are known without a read, also by another process, and the chunks are read one by one. The eight chunks of a
// block of 16 MiB take one read. Without the table the digests are refused, and chunks are read nevertheless.
func TestVerifiedBackupIsKnownByChunks(t *testing.T) {
	for name, blockSize := range map[string]int64{"2 MiB": 2 * mib, "16 MiB": 16 * mib} {
		for _, restore := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				w := newTableWorld(t)
				image, want := aboveImage(t, w.store, blockSize, "")
				longhorntest.AddImage(t, w.store, longhorntest.Image{Name: "golden", Content: image, Method: "lz4", Sparse: true})
				o := w.open()
				w.demandUnknown(o)
				if restore {
					must(t, o.Restore(t.Context(), &memory{bytes: make([]byte, len(want))}))
				} else if stats, err := o.Verify(t.Context(), VerifyOptions{Mark: 1}); err != nil || !stats.Done ||
					len(stats.Damaged) > 0 || stats.Bytes == 0 {
					t.Errorf("verification %+v, %v", stats, err)
				}
				w.openTable()
				o = w.open()
				w.compareChunks(o, want)
				if _, most := w.store.take(); blockSize == 16*mib && most != 1 {
					t.Errorf("a block was read %d times", most)
				}
				must(t, w.table.Close())
				must(t, os.WriteFile(w.path, []byte("changed"), 0o600))
				w.table = nil
				w.openTable()
				o = w.open()
				w.demandUnknown(o)
				buf := make([]byte, block.ChunkSize)
				if err := o.ReadChunk(t.Context(), 16, buf); err != nil || !bytes.Equal(buf, want[32*mib:][:len(buf)]) {
					t.Errorf("without a table: other bytes, or %v", err)
				}
			})
		}
	}
}

// oneBackup is a backup of three blocks, the middle one of which has chunks of zeros, and a short end.
func (w *tableWorld) oneBackup(blockSize int64) (blocks map[int64][]byte, want []byte) {
	size := 2*blockSize + mib
	want = make([]byte, size)
	blocks = map[int64][]byte{}
	for i := range int64(3) {
		b := content(byte(i+1), int(min(blockSize, size-i*blockSize)))
		if i == 1 && blockSize > 2*mib {
			clear(b[4*mib : 10*mib])
		}
		blocks[i*blockSize] = b
		copy(want[i*blockSize:], b)
	}
	longhorntest.AddBackup(w.T, w.store, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: size,
		BlockSize: blockSize, Method: "lz4", Blocks: blocks})
	return blocks, want
}

func blockName(b []byte) string {
	return longhorntest.BlockName(longhorntest.VolumeFolder("pvc-1")+"blocks/", b)
}

// TestVerificationContinues: a verification that ends early continues behind its last block, in another process, too, and
// another verification reads all again. A verification without a mark reads what is not known.
func TestVerificationContinues(t *testing.T) {
	w := newTableWorld(t)
	w.oneBackup(2 * mib)
	verify := func(o VerifyOptions) VerifyStats {
		stats, err := w.open().Verify(t.Context(), o)
		must(t, err)
		w.openTable()
		return stats
	}
	read := int64(0)
	for done := false; !done; {
		stats := verify(VerifyOptions{Mark: 1, Most: 1})
		read, done = read+stats.Blocks, stats.Done
		if !done && stats.Blocks == 0 {
			t.Fatal("the verification makes no progress")
		}
	}
	if read != 3 {
		t.Errorf("%d of 3 blocks were read", read)
	}
	if stats := verify(VerifyOptions{}); stats.Blocks != 0 {
		t.Errorf("%d blocks that are known were read", stats.Blocks)
	}
	if stats := verify(VerifyOptions{Mark: 2}); stats.Blocks != 3 || stats.Bytes != 5*mib {
		t.Errorf("the next verification: %+v", stats)
	}
}

// TestDamageIsFoundAgain: a verification names the blocks that the store damaged or lost, each time, though their
// digests are known, and a read of their chunks tells the damage. In a store without the description of the backup the
// blocks are not damaged, but away.
func TestDamageIsFoundAgain(t *testing.T) {
	for name, blockSize := range map[string]int64{"2 MiB": 2 * mib, "16 MiB": 16 * mib} {
		t.Run(name, func(t *testing.T) {
			w := newTableWorld(t)
			blocks, want := w.oneBackup(blockSize)
			_, err := w.open().Verify(t.Context(), VerifyOptions{Mark: 1})
			must(t, err)
			must(t, w.store.Delete(t.Context(), blockName(blocks[0])))
			must(t, w.store.Put(t.Context(), blockName(blocks[blockSize]), []byte("changed")))
			damaged := []string{longhorntest.Sum(blocks[0]), longhorntest.Sum(blocks[blockSize])}
			slices.Sort(damaged)
			for mark := range uint64(2) {
				stats, err := w.open().Verify(t.Context(), VerifyOptions{Mark: mark + 2})
				if err != nil || !slices.Equal(stats.Damaged, damaged) || !stats.Done || stats.Blocks != 1 {
					t.Errorf("verification %+v, %v", stats, err)
				}
			}
			o := w.open()
			must(t, o.Digests(t.Context(), func(int64, [32]byte) {}))
			buf := make([]byte, block.ChunkSize)
			for c := range 2 * blockSize / block.ChunkSize {
				if err := o.ReadChunk(t.Context(), c, buf); !api.Is(err, api.Corrupt) {
					t.Errorf("chunk %d of a damaged block: %v", c, err)
				}
			}
			if err := o.ReadChunk(t.Context(), 2*blockSize/block.ChunkSize, buf[:mib]); err != nil ||
				!bytes.Equal(buf[:mib], want[2*blockSize:]) {
				t.Errorf("the intact block: other bytes, or %v", err)
			}
			must(t, w.store.Delete(t.Context(), longhorntest.CfgName("pvc-1", "backup-1")))
			if err := o.ReadChunk(t.Context(), 0, buf); !api.Is(err, api.Unavailable) {
				t.Errorf("a chunk of a store that is away: %v", err)
			}
			if _, err := o.Verify(t.Context(), VerifyOptions{Mark: 9}); !api.Is(err, api.Unavailable) {
				t.Errorf("a verification of a store that is away: %v", err)
			}
		})
	}
}

// TestWrongDigestIsCorrected: a read of a chunk compares the bytes with the digest that the table has, and corrects the
// table, so that nobody uses bytes for a digest that they do not have.
func TestWrongDigestIsCorrected(t *testing.T) {
	for name, blockSize := range map[string]int64{"2 MiB": 2 * mib, "16 MiB": 16 * mib} {
		t.Run(name, func(t *testing.T) {
			w := newTableWorld(t)
			_, want := w.oneBackup(blockSize)
			_, err := w.open().Verify(t.Context(), VerifyOptions{})
			must(t, err)
			for place, read := range map[string]func(*Opened) error{
				"chunk": func(o *Opened) error { return o.ReadChunk(t.Context(), 0, make([]byte, block.ChunkSize)) },
				"range": func(o *Opened) error {
					_, err := o.ReadAt(make([]byte, block.ChunkSize), 0)
					return err
				},
				"restore": func(o *Opened) error {
					return o.Restore(t.Context(), &memory{bytes: make([]byte, len(want))})
				},
			} {
				o := w.open()
				k, _, err := o.keyOf(0)
				must(t, err)
				w.table.Put(k, [32]byte{1}, 0)
				if err := read(o); !api.Is(err, api.Unavailable) {
					t.Errorf("%s: a read of other bytes than those of the digest: %v", place, err)
				}
				w.compareChunks(w.open(), want)
			}
		})
	}
}

// strictSink takes the chunks that its digests allow.
type strictSink struct {
	memory
	refuses int64 // chunk
}

func (s *strictSink) WriteChunk(p []byte, off int64, digest [32]byte) error {
	if digest != sha256.Sum256(p) {
		return errors.New("the digest is not that of the bytes")
	}
	if off == s.refuses*block.ChunkSize {
		return api.Errorf(api.Corrupt, "another chunk is wanted")
	}
	_, err := s.WriteAt(p, off)
	return err
}

// TestChunkThatTheSinkRefusesIsDamaged: the sink knows the digest that readers got; a chunk with another one is left out,
// alone.
func TestChunkThatTheSinkRefusesIsDamaged(t *testing.T) {
	w := newTableWorld(t)
	_, want := w.oneBackup(16 * mib)
	sink := &strictSink{memory: memory{bytes: make([]byte, len(want))}, refuses: 9}
	damaged, err := w.open().RestoreIntact(t.Context(), sink, nil)
	clear(want[18*mib : 20*mib])
	if err != nil || !slices.Equal(damaged, []int64{9}) || !bytes.Equal(sink.bytes, want) {
		t.Errorf("damaged chunks %v, %v, or other bytes", damaged, err)
	}
	if err := w.open().Restore(t.Context(), sink); !api.Is(err, api.Corrupt) {
		t.Errorf("a restore of everything: %v", err)
	}
}

// TestMemoryOfBlocksIsBounded: open backups keep one block each, and more while the node has memory for them.
func TestMemoryOfBlocksIsBounded(t *testing.T) {
	w := newTableWorld(t)
	_, want := w.oneBackup(16 * mib)
	m := NewMemory(16 * mib)
	var all []*Opened
	kept := 0
	for range 3 {
		o, err := New(w.store, Options{Cache: t.TempDir(), Memory: m}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, nil)
		must(t, err)
		buf := make([]byte, block.ChunkSize)
		for _, c := range []int64{0, 8, 1, 9} {
			must(t, o.ReadChunk(t.Context(), c, buf))
			if !bytes.Equal(buf, want[c*block.ChunkSize:][:len(buf)]) {
				t.Errorf("chunk %d has other bytes", c)
			}
		}
		kept += len(o.cache.recent)
		all = append(all, o)
	}
	if kept != 4 || m.free != 0 {
		t.Errorf("%d blocks are kept, and %d bytes are free", kept, m.free)
	}
	for _, o := range all {
		must(t, o.Close())
	}
	if m.free != 16*mib {
		t.Errorf("%d bytes are free in the end", m.free)
	}
}
