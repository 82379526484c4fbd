// Package oracle compares the readers of foreign disk images with qemu-img, their oracle: an image made by qemu-img
// must read the same here. The package serves the tests of the readers and is part of no program. The caller waits for
// every goroutine; there is no lock.
package oracle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

const sector = 512

// Qemu runs a tool, which must succeed.
func Qemu(t testing.TB, name string, args ...string) []byte {
	t.Helper()
	suite.Slow(t)
	cmd := exec.Command(name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, stderr.Bytes())
	}
	return out
}

// Create makes an empty image.
func Create(t testing.TB, format, options, path string, size int64) {
	t.Helper()
	args := []string{"create", "-q", "-f", format}
	if options != "" {
		args = append(args, "-o", options)
	}
	Qemu(t, "qemu-img", append(args, path, fmt.Sprint(size))...)
}

// Write runs commands of qemu-io on an image; each must succeed.
func Write(t testing.TB, format, path string, cmds ...string) {
	t.Helper()
	args := []string{"-f", format}
	for _, c := range cmds {
		args = append(args, "-c", c)
	}
	out := Qemu(t, "qemu-io", append(args, path)...)
	if bytes.Contains(out, []byte("failed")) {
		t.Fatalf("qemu-io: %s", out)
	}
}

// Scribble returns commands that write at random: small ranges, whole units, zeros. All are multiples of 512 bytes.
func Scribble(rng *rand.Rand, size, unit int64, n int) []string {
	var cmds []string
	for range n {
		align, most := int64(sector), int64(300)
		if rng.IntN(3) == 0 {
			align, most = unit, 3
		}
		off := rng.Int64N(max(size/align, 1)) * align
		length := min((1+rng.Int64N(most))*align, size-off)
		if rng.IntN(5) == 0 {
			cmds = append(cmds, fmt.Sprintf("write -z %d %d", off, length))
		} else {
			cmds = append(cmds, fmt.Sprintf("write -P %d %d %d", 1+rng.IntN(255), off, length))
		}
	}
	return cmds
}

// Raw makes a sparse raw disk of random content: text-like and random bytes in ranges of all sizes, including the last
// sector of the disk.
func Raw(t testing.TB, rng *rand.Rand, path string, size int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	write := func(off, n int64) {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
			if off%1024 == 0 {
				b[i] = "drover "[i%7] + b[i]&1
			}
		}
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		off := rng.Int64N(max(size/sector, 1)) * sector
		write(off, min((1+rng.Int64N(1<<rng.IntN(10)))*sector, size-off))
	}
	if size >= sector {
		write(size-sector, sector)
	}
}

// Memory is a sink that checks that every byte arrives at most once.
type Memory struct {
	mu   sync.Mutex
	B    []byte
	Kind []block.Kind // per sector
}

func (m *Memory) setKind(off, n int64, k block.Kind) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if off%sector != 0 || n%sector != 0 && off+n != int64(len(m.B)) {
		return fmt.Errorf("a piece of %d bytes at %d", n, off)
	}
	for i := off / sector; i*sector < off+n; i++ {
		if m.Kind[i] != block.Hole {
			return fmt.Errorf("sector %d is given twice", i)
		}
		m.Kind[i] = k
	}
	return nil
}

// WriteAt takes data.
func (m *Memory) WriteAt(p []byte, off int64) (int, error) {
	return copy(m.B[off:], p), m.setKind(off, int64(len(p)), block.Data)
}

// ZeroAt takes zeros.
func (m *Memory) ZeroAt(off, n int64) error {
	clear(m.B[off : off+n])
	return m.setKind(off, n, block.Zero)
}

// Sync does nothing.
func (m *Memory) Sync(context.Context) error { return nil }

// Content copies all of an image, holes made zeros.
func Content(src block.Source) (*Memory, error) {
	n := src.Size()
	m := &Memory{B: bytes.Repeat([]byte{0xEE}, int(n)), Kind: make([]block.Kind, (n+sector-1)/sector)}
	if err := block.Copy(context.Background(), m, src, block.CopyOptions{}); err != nil {
		return nil, err
	}
	for i, k := range m.Kind {
		if k == block.Hole {
			clear(m.B[i*sector : min((i+1)*sector, len(m.B))])
		}
	}
	return m, nil
}

// Opener opens an image in a reader.
type Opener func(r io.ReaderAt, size int64) (block.Source, error)

// OpenFile opens an image in a file, which must succeed.
func OpenFile(t testing.TB, open Opener, path string) block.Source {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	src, err := open(f, st.Size())
	if err != nil {
		t.Fatal(err)
	}
	return src
}

// Extents is how exact qemu-img map is about the kind of a sector.
type Extents int

// Compared are: no kinds, data, or data, zeros and holes.
const (
	NoExtents Extents = iota
	DataExtents
	AllExtents
)

// Compare compares an image with qemu-img: size, content, and reads at odd places from several goroutines. Compare also
// compares the extents of the image with qemu-img map, sector by sector.
func Compare(t testing.TB, open Opener, format, path string, extents Extents) block.Source {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "raw")
	Qemu(t, "qemu-img", "convert", "-f", format, "-O", "raw", path, raw)
	want, err := os.ReadFile(raw)
	if err != nil {
		t.Fatal(err)
	}
	src := OpenFile(t, open, path)
	got := Same(t, src, want)
	compareReach(t, open, path, want)
	if extents != NoExtents {
		compareKinds(t, got, Qemu(t, "qemu-img", "map", "--output=json", "-f", format, path), extents)
	}
	return src
}

// Same compares an image with its content.
func Same(t testing.TB, src block.Source, want []byte) *Memory {
	t.Helper()
	if src.Size() != int64(len(want)) {
		t.Fatalf("virtual size %d, want %d", src.Size(), len(want))
	}
	got, err := Content(src)
	if err != nil {
		t.Fatal(err)
	}
	if i := Differs(got.B, want); i >= 0 {
		t.Fatalf("byte %d is %#x, want %#x", i, got.B[i], want[i])
	}
	readRandomly(t, src, want)
	return got
}

// compareReach compares Reach of an image with its reads.
func compareReach(t testing.TB, open Opener, path string, want []byte) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b := &bounded{r: f}
	src, err := open(b, st.Size())
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	img, ok := src.(interface {
		Reach(off, n int64) (int64, error)
	})
	if !ok {
		return
	}
	for off := int64(0); off < src.Size(); off += block.ChunkSize {
		p := make([]byte, min(block.ChunkSize, src.Size()-off))
		b.most, b.limit = 0, 0
		end, err := img.Reach(off, int64(len(p)))
		if err != nil || end > st.Size() {
			t.Fatalf("reads of %d bytes at %d go to %d of %d, %v", len(p), off, end, st.Size(), err)
		}
		b.limit = max(end, b.most, 1)
		if _, err := src.ReadAt(p, off); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(p, want[off:][:len(p)]) {
			t.Fatalf("reads of %d bytes at %d need more than %d, %v", len(p), off, b.limit, err)
		}
	}
}

// bounded is a reader that knows how far it was read, and fails behind a limit.
type bounded struct {
	r           io.ReaderAt
	most, limit int64
}

func (b *bounded) ReadAt(p []byte, off int64) (int, error) {
	end := off + int64(len(p))
	if b.limit > 0 && end > b.limit {
		return 0, errors.New("these bytes have not come yet")
	}
	b.most = max(b.most, end)
	return b.r.ReadAt(p, off)
}

func compareKinds(t testing.TB, got *Memory, raw []byte, extents Extents) {
	t.Helper()
	var runs []struct {
		Start, Length       int64
		Data, Zero, Present bool
	}
	if err := json.Unmarshal(raw, &runs); err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		kind := block.Hole
		switch {
		case r.Data:
			kind = block.Data
		case r.Present && extents == AllExtents:
			kind = block.Zero
		}
		for i := r.Start / sector; i*sector < r.Start+r.Length; i++ {
			if got.Kind[i] != kind {
				t.Fatalf("sector %d is of kind %d, want %d of %+v", i, got.Kind[i], kind, r)
			}
		}
	}
}

// readRandomly reads at odd places, from several goroutines.
func readRandomly(t testing.TB, src block.Source, want []byte) {
	t.Helper()
	var wg sync.WaitGroup
	for seed := range uint64(3) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 1))
			for range 50 {
				off := rng.Int64N(int64(len(want)) + 1)
				p := bytes.Repeat([]byte{0xEE}, 1+rng.IntN(1<<uint(rng.IntN(20))))
				n, err := src.ReadAt(p, off)
				if end := min(off+int64(len(p)), int64(len(want))); int64(n) != end-off ||
					(err != nil) != (n < len(p)) || err != nil && !errors.Is(err, io.EOF) {
					t.Errorf("read %d at %d of %d: %d, %v", len(p), off, len(want), n, err)
				} else if !bytes.Equal(p[:n], want[off:end]) {
					t.Errorf("read %d at %d differs", len(p), off)
				}
			}
		})
	}
	wg.Wait()
}

// Differs returns the first different byte, or -1.
func Differs(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// Read opens an image in memory and reads all of it.
func Read(open Opener, b []byte) ([]byte, error) {
	src, err := open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, err
	}
	m, err := Content(src)
	if err != nil {
		return nil, err
	}
	return m.B, nil
}

// Refused fails the test unless reading the image fails with an error of the kind and with the text.
func Refused(t *testing.T, open Opener, b []byte, kind api.Kind, says string) {
	t.Helper()
	_, err := Read(open, b)
	if err == nil || api.KindOf(err) != kind || !strings.Contains(err.Error(), says) {
		t.Fatalf("error %v of kind %v, want kind %v and %q", err, api.KindOf(err), kind, says)
	}
}

// Known fails the test unless the kind of the error is a kind of damaged images.
func Known(t *testing.T, err error) {
	t.Helper()
	switch api.KindOf(err) {
	case api.Corrupt, api.Unsupported, api.OutOfRange, api.Invalid:
	default:
		t.Fatalf("error %v of kind %v", err, api.KindOf(err))
	}
}

// Sound checks an image of any bytes: the image has extents from its start to its end, each extent reads the same in
// large and in small reads, extents without data read as zeros, and every error has a known kind. Sound checks the
// first few hundred extents, each at its start and its end.
func Sound(t *testing.T, open Opener, r io.ReaderAt, size int64) {
	t.Helper()
	src, err := open(r, size)
	if err != nil {
		Known(t, err)
		return
	}
	const edge = 3000
	buf := make([]byte, 3*edge)
	for off, n := int64(0), 0; off < src.Size() && n < 300; n++ {
		e, err := src.Next(off)
		if err != nil {
			Known(t, err)
			return
		}
		if e.Off != off || e.Len <= 0 || e.End() > src.Size() {
			t.Fatalf("extent %+v at %d of %d", e, off, src.Size())
		}
		off = e.End()
		for _, at := range []int64{max(e.Off-edge/2, 0), max(e.Off, e.End()-edge)} {
			p, small := buf[:edge:edge], buf[edge:2*edge]
			n, err := src.ReadAt(p, at)
			if want := min(edge, src.Size()-at); int64(n) < want {
				Known(t, err)
				continue
			}
			for i := 0; i < n; i += 700 {
				if _, err := src.ReadAt(small[i:min(i+700, n)], at+int64(i)); err != nil && !errors.Is(err, io.EOF) {
					t.Fatalf("reading at %d: %v, but not in larger pieces", at+int64(i), err)
				}
			}
			if !bytes.Equal(p[:n], small[:n]) {
				t.Fatalf("reading %d bytes at %d differs", n, at)
			}
			from, to := max(e.Off-at, 0), min(e.End()-at, int64(n))
			if e.Kind != block.Data && len(bytes.Trim(p[from:to], "\x00")) > 0 {
				t.Fatalf("the extent %+v holds data", e)
			}
		}
	}
}

// Frugal fails the test unless opening an image allocates less than 128 MiB, with any outcome.
func Frugal(t *testing.T, open Opener, r io.ReaderAt, size int64) error {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := open(r, size)
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n >= 128<<20 {
		t.Fatalf("%d MiB were allocated", n>>20)
	}
	return err
}

// Func is a reader whose bytes follow from their place.
type Func func(p []byte, off int64)

// ReadAt reads everywhere.
func (f Func) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	f(p, off)
	return len(p), nil
}

// failing is a reader whose disk is gone.
type failing struct{}

func (failing) ReadAt([]byte, int64) (int, error) {
	return 0, api.Errorf(api.Unavailable, "the disk is gone")
}

// ReaderFails checks that errors of the reader stay the same, and that a shrinking file is found.
func ReaderFails(t *testing.T, open Opener, b []byte) {
	t.Helper()
	if _, err := open(failing{}, int64(len(b))); !api.Is(err, api.Unavailable) {
		t.Fatalf("error of the reader at open: %v", err)
	}
	r := &switched{r: bytes.NewReader(b)}
	src, err := open(r, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	r.r = failing{}
	if _, err := Content(src); !api.Is(err, api.Unavailable) {
		t.Fatalf("error of the reader: %v", err)
	}
	r.r = bytes.NewReader(b[:len(b)/2])
	if _, err := Content(src); !api.Is(err, api.Corrupt) {
		t.Fatalf("a file that shrank: %v", err)
	}
	if _, err := src.ReadAt(make([]byte, 1), -1); !api.Is(err, api.OutOfRange) {
		t.Fatalf("read at -1: %v", err)
	}
	for _, off := range []int64{-1, src.Size()} {
		if _, err := src.Next(off); !api.Is(err, api.OutOfRange) {
			t.Fatalf("extent at %d: %v", off, err)
		}
	}
}

type switched struct{ r io.ReaderAt }

func (s *switched) ReadAt(p []byte, off int64) (int, error) { return s.r.ReadAt(p, off) }
