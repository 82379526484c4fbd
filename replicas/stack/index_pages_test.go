package stack

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// TestIndexMissesNoBlock: a block which the index finds nowhere reads as zeros, and the index finds each block of the
// head and of the layers.
func TestIndexMissesNoBlock(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	const size = 192 << 20
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	var r *Replica
	open := func(epoch int64) {
		t.Helper()
		var err error
		if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
			t.Fatal(err)
		}
		if err := r.Adopt(ctx, epoch, 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
	}
	is := func(want bool, off, n int64) {
		t.Helper()
		var got bool
		if err := r.onLoop(func() { got = r.Nothing(off, n) }); err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("nothing at %d+%d: %v", off, n, got)
		}
	}
	look := func() { mustIssue(t, loop, r, block.OpRead, 0, size, block.AlignedBuffer(size)) }
	open(1)
	is(false, 0, blockSize) // no read has filled the index yet
	look()
	is(true, 0, size)
	mustIssue(t, loop, r, block.OpWrite, 100<<20, blockSize, numbered(7))
	is(false, 0, size)
	is(false, 100<<20, blockSize)
	is(true, 0, 100<<20)
	is(true, 100<<20+blockSize, 92<<20-blockSize)
	s := Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID()), Created: time.Now()}
	if err := r.Cut(ctx, s); err != nil {
		t.Fatal(err)
	}
	is(false, 100<<20, blockSize) // in a layer now
	mustIssue(t, loop, r, block.OpDiscard, 100<<20, blockSize, nil)
	is(true, 0, size) // zeros hide the layer's block
	for _, bad := range [][2]int64{{-blockSize, blockSize}, {0, 0}, {1, blockSize}, {0, blockSize + 1}, {size, blockSize},
		{0, size + blockSize}} {
		is(false, bad[0], bad[1])
	}
	if _, err := r.Hold(ctx); err != nil {
		t.Fatal(err)
	}
	is(false, 0, size)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	open(2)
	is(false, 0, size)
	look()
	is(true, 0, size)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestDropPages: the index frees the memory of unused pages. The next I/O finds the blocks of the head, of the layers
// and of the zero records again.
func TestDropPages(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	const size = 256 << 20
	e := make(expect)
	layer := filledLayer(t, d, size, []int64{2, 4, 6, 20000, 20002, 50000}, 1<<32, e)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layer}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	put := func(b int64, v uint64) {
		t.Helper()
		mustIssue(t, loop, r, block.OpWrite, b<<blockBits, blockSize, numbered(v))
		e.put(b, v)
	}
	drops := func(what string, want bool) {
		t.Helper()
		before, err := r.IndexMemory()
		if err != nil {
			t.Fatal(err)
		}
		freed, err := r.DropPages(ctx)
		if err != nil || freed > 0 != want {
			t.Errorf("%s: %d bytes freed, %v", what, freed, err)
		}
		if after, err := r.IndexMemory(); err != nil || after != before-freed {
			t.Errorf("%s: %d bytes less %d are %d, %v", what, before, freed, after, err)
		}
	}
	reads := func() {
		t.Helper()
		buf := block.AlignedBuffer(int(blockSize))
		for sector, want := range e {
			b := sector / perBlock
			mustIssue(t, loop, r, block.OpRead, b<<blockBits, blockSize, buf)
			if got := binary.LittleEndian.Uint64(buf[sector%perBlock*512:]); got != want[0] {
				t.Errorf("block %d begins with %#x, want %#x", b, got, want[0])
			}
		}
	}
	for page := range int64(4) { // the head was empty at the open
		put(page<<pageBits|1, 100+uint64(page))
	}
	mustIssue(t, loop, r, block.OpDiscard, 2<<blockBits, blockSize, nil)
	e.put(2, 0)
	put(20000, 0) // zeros over data
	drops("used since the open", false)
	put(1<<pageBits|3, 200)
	drops("three pages are unused", true)
	if !slices.Equal(built(t, r), []bool{false, true, false, false}) {
		t.Errorf("built: %v", built(t, r))
	}
	reads()
	drops("all pages are used", false)
	drops("all pages are unused", true)
	if err := r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID()), Created: time.Now()}); err != nil {
		t.Fatal(err)
	}
	put(7, 300)
	reads()
	drops("used after a cut", false)
	drops("unused after a cut", true)
	reads()
	d.DropPages(ctx, 1<<30)
	d.DropPages(ctx, 1<<30)
	if slices.Contains(built(t, r), false) {
		t.Errorf("pages are dropped that had room: %v", built(t, r))
	}
	d.DropPages(ctx, 1)
	d.DropPages(ctx, 1)
	if slices.Contains(built(t, r), true) {
		t.Errorf("pages stay that have no room: %v", built(t, r))
	}
	reads()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	e.check(t, d, loop, spec.UID)
}

func built(t *testing.T, r *Replica) (all []bool) {
	t.Helper()
	if err := r.onLoop(func() {
		for p := range r.idx.Packed {
			all = append(all, r.idx.Built(p))
		}
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestUnreadableMapFailsItsPageAlone: while a page of a layer's map cannot be read, I/O there fails like I/O on a
// failing disk, for which an engine drops a member, and not as damage, for which an engine does not. Other pages and
// flushes continue, and so does the page once the map can be read.
func TestUnreadableMapFailsItsPageAlone(t *testing.T) {
	ctx, loop, d := context.Background(), startLoop(t), newDisk(t)
	const size = 128 << 20
	layers := []string{filledLayer(t, d, size, []int64{2, 4, 20000, 20002}, 1<<32, make(expect))}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: layers}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(blockSize))
	for _, b := range []int64{2, 20000} {
		mustIssue(t, loop, r, block.OpRead, b<<blockBits, blockSize, buf)
	}
	for range 2 {
		if _, err := r.DropPages(ctx); err != nil {
			t.Fatal(err)
		}
	}
	name := d.Join(layer.Dir, layers[0], layer.MapFile)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	page := int64(binary.LittleEndian.Uint64(whole[format.MapHeader+8:])) // the first page
	flipBit(t, name, page)
	for _, op := range []block.Op{block.OpRead, block.OpWrite, block.OpDiscard} {
		b := buf
		if op == block.OpDiscard {
			b = nil
		}
		err := issue(loop, r, op, 3<<blockBits, blockSize, b, false)
		if !errors.Is(err, unix.EIO) || api.Is(err, api.Corrupt) {
			t.Errorf("op %d: %v", op, err)
		}
		if op != block.OpDiscard {
			mustIssue(t, loop, r, op, 20001<<blockBits, blockSize, b)
		}
	}
	mustIssue(t, loop, r, block.OpFlush, 0, 0, nil)
	flipBit(t, name, page)
	mustIssue(t, loop, r, block.OpRead, 2<<blockBits, blockSize, buf)
	if got := binary.LittleEndian.Uint64(buf); got == 0 {
		t.Error("the layer's block is not read")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}
