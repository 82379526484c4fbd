package stack

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
)

// What is said to be nowhere is read as zeros; what is in the head or in a layer is never said to be nowhere.
func TestNothing(t *testing.T) {
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
	look := func() { mustIssue(t, loop, r, block.OpRead, 0, size, diskfs.AlignedBuffer(size)) }
	open(1)
	is(false, 0, blockSize) // nobody has looked yet
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
	is(true, 0, size) // zeros over it
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
