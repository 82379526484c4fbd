package block_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// sparse makes a file of size bytes with some data, and returns its name and content.
func sparse(t *testing.T, rng *rand.Rand, size int64) (string, []byte) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "src")
	want := make([]byte, size)
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for range 12 {
		off := rng.Int64N(size)
		b := bytes.Repeat([]byte{byte(1 + rng.IntN(255))}, int(min(1+rng.Int64N(3<<20), size-off)))
		copy(want[off:], b)
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
	return name, want
}

func TestCopyKeepsContentAndHoles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int64{1, 4095, 5 << 20, 40<<20 + 513} {
		name, want := sparse(t, rng, size)
		src, err := file.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		to := filepath.Join(t.TempDir(), "dst")
		dst, err := file.Create(to, size, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer dst.Close()
		var last, calls int64
		err = block.Copy(context.Background(), dst, src, block.CopyOptions{Workers: 3, Progress: func(done, total int64) {
			if done < last || total != size {
				t.Errorf("progress %d after %d, of %d", done, last, total)
			}
			last = done
			calls++
		}})
		if err != nil || last != size || calls == 0 {
			t.Fatalf("size %d: %v; progress ended at %d", size, err, last)
		}
		if err := dst.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("size %d: content differs, %v", size, err)
		}
		copied, err := file.Open(to)
		if err != nil {
			t.Fatal(err)
		}
		defer copied.Close()
		if a, b := data(t, src), data(t, copied); a != b {
			t.Errorf("size %d: %d bytes of data became %d", size, a, b)
		}
	}
}

func data(t *testing.T, s block.Source) (n int64) {
	t.Helper()
	for off := int64(0); off < s.Size(); {
		e, err := s.Next(off)
		if err != nil {
			t.Fatal(err)
		}
		if e.Kind == block.Data {
			n += e.Len
		}
		off = e.End()
	}
	return n
}

// pattern is a source that is all data, except for what its kinds say, and that can break.
type pattern struct {
	size  int64
	kind  func(chunk int64) block.Kind
	fail  int64 // reads from here on fail
	short int64 // reads from here on end early
	wrong bool  // the map makes no sense
}

var errBroken = errors.New("broken")

func (p pattern) ReadAt(b []byte, off int64) (int, error) {
	if p.fail > 0 && off >= p.fail {
		return 0, errBroken
	}
	if p.short > 0 && off >= p.short {
		return len(b) / 2, nil
	}
	for i := range b {
		b[i] = byte((off+int64(i))>>12) | 1
	}
	return len(b), nil
}
func (p pattern) Size() int64  { return p.size }
func (p pattern) Close() error { return nil }
func (p pattern) Next(off int64) (block.Extent, error) {
	if p.wrong {
		return block.Extent{Off: off, Len: p.size + 1, Kind: block.Data}, nil
	}
	if p.kind == nil {
		return block.Extent{Off: off, Len: p.size - off, Kind: block.Data}, nil
	}
	c := off / block.ChunkSize
	return block.Extent{Off: off, Len: min((c+1)*block.ChunkSize, p.size) - off, Kind: p.kind(c)}, nil
}

// record is a sink that remembers what it was given.
type record struct {
	mu     sync.Mutex
	wrote  map[int64]int64
	zeroed map[int64]int64
	fail   bool
}

func (r *record) WriteAt(b []byte, off int64) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail {
		return 0, errBroken
	}
	r.wrote[off] = int64(len(b))
	return len(b), nil
}

func (r *record) ZeroAt(off, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.zeroed[off] = n
	return nil
}
func (r *record) Sync(context.Context) error { return nil }

func newRecord() *record { return &record{wrote: make(map[int64]int64), zeroed: make(map[int64]int64)} }

func TestCopyTellsZerosFromHoles(t *testing.T) {
	dst := newRecord()
	src := pattern{size: 9*block.ChunkSize - 100, kind: func(c int64) block.Kind { return block.Kind(c % 3) }}
	if err := block.Copy(context.Background(), dst, src, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	for c := range int64(9) {
		off := c * block.ChunkSize
		want := min(block.ChunkSize, src.size-off)
		w, z := dst.wrote[off], dst.zeroed[off]
		if k := block.Kind(c % 3); (w == want) != (k == block.Data) || (z == want) != (k == block.Zero) {
			t.Errorf("chunk %d of kind %d: wrote %d, zeroed %d", c, k, w, z)
		}
	}
}

func TestCopyReportsErrors(t *testing.T) {
	const size = 20 * block.ChunkSize
	for name, c := range map[string]struct {
		src pattern
		dst *record
	}{
		"read":       {pattern{size: size, fail: 5 * block.ChunkSize}, newRecord()},
		"short read": {pattern{size: size, short: 5 * block.ChunkSize}, newRecord()},
		"map":        {pattern{size: size, wrong: true}, newRecord()},
		"write":      {pattern{size: size}, &record{fail: true}},
	} {
		if err := block.Copy(context.Background(), c.dst, c.src, block.CopyOptions{}); err == nil {
			t.Errorf("%s: no error", name)
		} else if (name == "read" || name == "write") && !errors.Is(err, errBroken) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCopyStops(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	src := pattern{size: 1 << 40}
	dst := newRecord()
	err := block.Copy(ctx, dst, src, block.CopyOptions{Progress: func(done, total int64) {
		if done > 8*block.ChunkSize {
			cancel(errBroken)
		}
	}})
	if !errors.Is(err, errBroken) {
		t.Fatal(err)
	}
}

func TestCopyKeepsToItsLimit(t *testing.T) {
	start := time.Now()
	err := block.Copy(context.Background(), newRecord(), pattern{size: 8 * block.ChunkSize},
		block.CopyOptions{Limit: 40 * block.ChunkSize})
	if took := time.Since(start); err != nil || took < 150*time.Millisecond {
		t.Fatalf("16 MiB at 80 MiB/s took %v, %v", took, err)
	}
}
