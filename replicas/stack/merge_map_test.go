package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// TestMergeMapsInPieces: while a merge has written a part of the map, the open replica, a view and a newly opened
// replica read the same data as before. The merge continues from there.
func TestMergeMapsInPieces(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx, loop := context.Background(), startLoop(t)
	const size = int64(260) << 20 // five pages, the last page short
	low := []int64{1, 600, 20000, 40000, 40001, 66000}
	high := []int64{5, 600, 20001, 40001, 40002, 66001}
	for _, up := range []bool{true, false} {
		for pieces := 1; pieces < 5; pieces++ {
			t.Run(fmt.Sprintf("up=%v,pieces=%d", up, pieces), func(t *testing.T) {
				d, f := tap(t, newDisk(t))
				d.piece = 1
				e := make(expect)
				of := [][]int64{append(slices.Clone(low), 700), high}
				if up {
					of = [][]int64{low, append(slices.Clone(high), 700)}
				}
				spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
					Layers: []string{filledLayer(t, d, size, of[0], 1<<32, e), filledLayer(t, d, size, of[1], 2<<32, e)}}
				if err := d.CreateReplica(ctx, spec); err != nil {
					t.Fatal(err)
				}
				r, err := d.OpenReplica(ctx, spec.UID, loop)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = r.Close() }()
				was, err := r.Changed(ctx, "", "", nil, chunkSize)
				if err != nil {
					t.Fatal(err)
				}
				f.set(func(op, name string) (func(), error) {
					if g := r.Meta().Merge; op == opSync && strings.Contains(name, layer.Dir) && g != nil && g.Mapped == pieces {
						return nil, unix.EIO
					}
					return nil, nil
				})
				if _, err := r.Merge(ctx, MergeOptions{}); !errors.Is(err, unix.EIO) {
					t.Fatalf("it was to fail: %v", err)
				}
				f.set(nil)
				if g := r.Meta().Merge; g == nil || g.Mapped != pieces || g.Up != up {
					t.Fatalf("%+v", g)
				}
				if now, err := r.Changed(ctx, "", "", nil, chunkSize); err != nil || !slices.Equal(now, was) {
					t.Fatalf("changed: %v, not %v; %v", now, was, err)
				}
				buf := block.AlignedBuffer(1 << 20)
				for off := int64(0); off < size; off += int64(len(buf)) { // no page is built yet
					mustIssue(t, loop, r, block.OpRead, off, int64(len(buf)), buf)
					e.holds(t, off, buf)
				}
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
				src, err := d.OpenView(spec.UID)
				if err != nil {
					t.Fatal(err)
				}
				for off := int64(0); off < size; off += int64(len(buf)) {
					if _, err := src.ReadAt(buf, off); err != nil && !errors.Is(err, io.EOF) {
						t.Fatal(err)
					}
					e.holds(t, off, buf)
				}
				if err := src.Close(); err != nil {
					t.Fatal(err)
				}
				e.check(t, d, loop, spec.UID)
				if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
					t.Fatal(err)
				}
				if err := mergeAll(r); err != nil {
					t.Fatal(err)
				}
				if now, err := r.Changed(ctx, "", "", nil, chunkSize); err != nil || !slices.Equal(now, was) {
					t.Fatalf("changed: %v, not %v; %v", now, was, err)
				}
				layers := r.Meta().Layers
				if err := r.Close(); err != nil || len(layers) != 1 {
					t.Fatal(layers, err)
				}
				if err := d.Verify(ctx, layers[0]); err != nil {
					t.Fatal(err)
				}
				checksummed(t, d, layers[0])
				e.check(t, d, loop, spec.UID)
			})
		}
	}
}

// holds checks the data read at off.
func (e expect) holds(t testing.TB, off int64, buf []byte) {
	t.Helper()
	want := block.AlignedBuffer(int(blockSize))
	for at := int64(0); at < int64(len(buf)); at += blockSize {
		v := uint64(0)
		if may := e[(off+at)/512]; len(may) > 0 {
			v = may[0]
		}
		if fill(want, v); string(want) != string(buf[at:at+blockSize]) {
			t.Fatalf("block %d holds something else than %#x", (off+at)>>blockBits, v)
		}
	}
}

// TestMergeMapNeedsLittleRoom: the map and the digests of a merged layer take at most 64 MiB beside the old maps and
// digests, however large the layers are.
func TestMergeMapNeedsLittleRoom(t *testing.T) {
	suite.Long(t)
	t.Parallel()
	const mib, size, room = int64(1) << 20, int64(9) << 37, int64(64) << 20 // the map alone is 72 MiB
	dir, _ := mounted(t, 400*mib, "", "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-N", "1024")
	ctx := context.Background()
	d, err := Add(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	d.window = 64 << 30 // nothing moves
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	for k := range int64(2) {
		uid := string(api.NewUID())
		w, err := d.Create(ctx, uid, size)
		if err != nil {
			t.Fatal(err)
		}
		for p := range size / pageSize {
			if err := w.ZeroAt(p*pageSize+k*blockSize, blockSize); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := w.Seal(ctx); err != nil {
			t.Fatal(err)
		}
		spec.Layers = append(spec.Layers, uid)
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	if _, available, _, err := d.Statfs(); err != nil {
		t.Fatal(err)
	} else {
		run(t, "fallocate", "-l", fmt.Sprint(available-room), filepath.Join(dir, "ballast"))
	}
	r, err := d.OpenReplica(ctx, spec.UID, startLoop(t))
	if err != nil {
		t.Fatal(err)
	}
	merr := mergeAll(r)
	layers := r.Meta().Layers
	if err := errors.Join(merr, r.Close()); err != nil || len(layers) != 1 {
		t.Fatal(layers, err)
	}
	if err := d.Verify(ctx, layers[0]); err != nil {
		t.Fatal(err)
	}
	l, err := d.OpenLayer(layers[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	kinds := new([pageBlocks]block.Kind)
	for p := range int(size / pageSize) {
		if err := l.Map.Load(p, kinds); err != nil || kinds[0] != block.Zero || kinds[1] != block.Zero || kinds[2] != block.Hole {
			t.Fatalf("page %d: %v, %v", p, kinds[:3], err)
		}
	}
}

// BenchmarkMergeSparse merges two layers of 100 GiB with 4 MiB of scattered data each.
func BenchmarkMergeSparse(b *testing.B) {
	ctx, size := context.Background(), int64(100)<<30
	d, err := Add(ctx, b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	for b.Loop() {
		b.StopTimer()
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
		for k := range int64(2) {
			var blocks []int64
			for i := range int64(1000) {
				blocks = append(blocks, i*26000+k)
			}
			spec.Layers = append(spec.Layers, filledLayer(b, d, size, blocks, uint64(k)<<32, make(expect)))
		}
		if err := d.CreateReplica(ctx, spec); err != nil {
			b.Fatal(err)
		}
		r, err := d.OpenReplica(ctx, spec.UID, startLoop(b))
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := mergeAll(r); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := errors.Join(r.Close(), d.RemoveReplica(spec.UID)); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
