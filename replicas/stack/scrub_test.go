package stack

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// TestScrub: a chunk which a scrub finds damaged is neither served nor merged until the chunk is whole again.
func TestScrub(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx, c := context.Background(), newChained(t)
	snaps := c.scribble(3)
	uids, err := c.d.Unfinished()
	if err != nil || len(uids) != 3 {
		t.Fatal(uids, err)
	}
	if _, err := c.d.Scrub(ctx, uids[0], 0); !api.Is(err, api.Unavailable) {
		t.Fatalf("a layer without digests: %v", err)
	}
	for _, uid := range uids {
		if err := c.d.Finish(ctx, uid); err != nil {
			t.Fatal(err)
		}
		if list, err := c.d.Scrub(ctx, uid, 0); err != nil || len(list) > 0 {
			t.Fatal(list, err)
		}
	}
	m, err := c.d.readStack(c.uid)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			r.Close()
		}
	}()
	// A block of the middle layer.
	at := int64(-1)
	for b := int64(0); b < r.idx.Blocks && at < 0; b++ {
		buf := block.AlignedBuffer(int(blockSize))
		mustIssue(t, c.loop, r, block.OpRead, b<<blockBits, blockSize, buf)
		if err := r.onLoop(func() {
			if v, _ := r.idx.Run(b, b+1); v == fromLayer+1 {
				at = b << blockBits
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if at < 0 {
		t.Skip("the middle layer is covered: a matter of luck")
	}
	name := c.d.Join(layer.Dir, m.Layers[1], layer.DataFile)
	flip := func() {
		t.Helper()
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at+77); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 4
		if _, err := f.WriteAt(b, at+77); err != nil {
			t.Fatal(err)
		}
	}
	flip()
	list, err := c.d.Scrub(ctx, m.Layers[1], 0)
	if want := []Damage{{Off: at &^ (chunkSize - 1), Len: chunkSize}}; err != nil || !slices.Equal(list, want) {
		t.Fatalf("%v, %v; not %v", list, err, want)
	}
	if err := r.Knows(m.Layers[1], list); err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(blockSize))
	if err := issue(c.loop, r, block.OpRead, at, blockSize, buf, false); !errors.Is(err, unix.EIO) {
		t.Fatalf("damage was served: %v", err)
	}
	all := block.AlignedBuffer(1 << 20)
	if err := issue(c.loop, r, block.OpRead, at&^(1<<20-1), 1<<20, all, false); !errors.Is(err, unix.EIO) {
		t.Fatalf("damage was served: %v", err)
	}
	randomBytes(c.rng, buf) // new data over the damage is whole
	mustIssue(t, c.loop, r, block.OpWrite, at, blockSize, buf)
	got := block.AlignedBuffer(int(blockSize))
	mustIssue(t, c.loop, r, block.OpRead, at, blockSize, got)
	if !bytes.Equal(got, buf) {
		t.Fatal("what was written is not read")
	}
	copy(c.model[at:], buf)
	src, err := c.d.OpenStack(m.Layers, int64(len(c.model)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := src.ReadAt(got, at); !api.Is(err, api.Corrupt) {
		t.Fatalf("damage was served: %v", err)
	}
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
	for _, uid := range snaps[:2] {
		if err := r.DropSnapshot(uid); err != nil {
			t.Fatal(err)
		}
		delete(c.snaps, uid)
	}
	if did, err := r.Merge(ctx, MergeOptions{}); did || err != nil {
		t.Fatalf("a damaged layer was merged: %v, %v", did, err)
	}
	closed = true
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	flip() // the chunk is whole again, as after a repair of the file system
	if list, err := c.d.Scrub(ctx, m.Layers[1], 0); err != nil || len(list) > 0 {
		t.Fatal(list, err)
	}
	c.check()
	// A merge finds unknown damage before the damage would get matching digests.
	flip()
	c.epoch += 10
	if r, err = c.d.OpenReplica(ctx, c.uid, c.loop); err != nil {
		t.Fatal(err)
	}
	did, err := r.Merge(ctx, MergeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	damaged := m.Layers[1]
	if did { // by chance the merge moved nothing into the chunk, and the old digest stays
		damaged = r.Meta().Layers[0]
		if slices.Contains(m.Layers, damaged) {
			t.Fatalf("layers %v became %v", m.Layers, r.Meta().Layers)
		}
		name = c.d.Join(layer.Dir, damaged, layer.DataFile)
		list, err := c.d.Scrub(ctx, damaged, 0)
		if want := []Damage{{Off: at &^ (chunkSize - 1), Len: chunkSize}}; err != nil || !slices.Equal(list, want) {
			t.Fatalf("a damaged layer was merged: %v, %v", list, err)
		}
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	flip()
	if list, err := c.d.Scrub(ctx, damaged, 0); err != nil || len(list) > 0 {
		t.Fatal(list, err)
	}
	c.mergeAll()
	c.check()
}
