package stack

import (
	"context"
	"errors"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/suite"
)

// mergeable opens a replica with two mergeable layers of a block each, and a head with another block.
func mergeable(t *testing.T, disk ring, d *Disk, size int64) *Replica {
	t.Helper()
	ctx := context.Background()
	d.window = 1 << 20
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, spec.UID, disk)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	for i := range int64(2) {
		mustIssue(t, disk, r, block.OpWrite, i<<blockBits, blockSize, numbered(uint64(i)+1))
		s := Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Created: time.Now()}
		if err := r.Cut(ctx, s); err != nil {
			t.Fatal(err)
		}
		if err := d.Finish(ctx, s.Layer); err != nil {
			t.Fatal(err)
		}
	}
	mustIssue(t, disk, r, block.OpWrite, 2<<blockBits, blockSize, numbered(3))
	return r
}

// goesOn fails unless the replica answers reads, also of blocks which a merge moves.
func goesOn(t *testing.T, s *slowDisk, r *Replica, when string) {
	t.Helper()
	for b := range int64(3) {
		buf := block.AlignedBuffer(int(blockSize))
		select {
		case err := <-s.later(r, block.OpRead, b, 1, buf):
			if err != nil || string(buf) != string(numbered(uint64(b)+1)) {
				t.Fatalf("%s: block %d begins with %x, %v", when, b, buf[:8], err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: block %d is not read", when, b)
		}
	}
}

// TestMergeRestsWithoutIOHeld: while a throttled merge rests, I/O and snapshots continue.
func TestMergeRestsWithoutIOHeld(t *testing.T) {
	t.Parallel()
	disk := &slowDisk{Loop: startLoop(t)}
	r := mergeable(t, disk, newDisk(t), 4<<20)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var w *merger
	patient(t, func() (err error) { w, err = r.beginMerge(); return err })
	merged := make(chan error, 1)
	go func() { merged <- w.mergeRest(ctx, MergeOptions{BytesPerSecond: 1}) }() // more than an hour per block
	for g := r.Meta().Merge; g == nil || g.Done == 0; g = r.Meta().Merge {
		select {
		case err := <-merged:
			t.Fatalf("the merge is over: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	goesOn(t, disk, r, "while a merge rests")
	if err := r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Created: time.Now()}); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-merged
	w.close()
	goesOn(t, disk, r, "after it was interrupted")
}

// TestMergeBesideIOThatHangs: a merge does not make other I/O wait for a hanging request, and continues after the
// request ended.
func TestMergeBesideIOThatHangs(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	disk := &slowDisk{Loop: startLoop(t)}
	r := mergeable(t, disk, newDisk(t), 4<<20)
	disk.set(true)
	hangs := disk.later(r, block.OpWrite, 5, 1, numbered(6))
	until(t, "the write is on its way", func() bool { return disk.waiting() > 0 })
	if err := r.onLoop(func() { disk.slow = false }); err != nil { // for the next requests
		t.Fatal(err)
	}
	over, stop := context.WithCancel(context.Background())
	defer stop()
	merged := make(chan error, 1)
	go func() {
		for {
			_, err := r.Merge(over, MergeOptions{})
			if len(r.Meta().Layers) == 1 || err != nil && !api.Is(err, api.Busy) {
				merged <- err
				return
			}
		}
	}()
	for holding := 0; holding == 0; {
		select {
		case err := <-merged:
			t.Fatalf("the merge is over before the write: %v", err)
		default:
		}
		if err := r.onLoop(func() { holding = r.holding }); err != nil {
			t.Fatal(err)
		}
	}
	goesOn(t, disk, r, "while a merge waits for a write that hangs")
	disk.set(false)
	if err := <-hangs; err != nil {
		t.Fatal(err)
	}
	if err := <-merged; err != nil {
		t.Fatal(err)
	}
	goesOn(t, disk, r, "after the merge")
}

// TestInterruptedMergeLeavesNothingTwice: a process recorded data as moved and ended before the removal of the old
// data. The next process removes the old data. At no time is more than a window on the disk twice, however often a
// merge is interrupted.
func TestInterruptedMergeLeavesNothingTwice(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	loop := startLoop(t)
	d := newDisk(t)
	first := mergeable(t, loop, d, 4<<20)
	var w *merger
	patient(t, func() (err error) { w, err = first.beginMerge(); return err })
	err := w.copyNextWindow(ctx)
	w.close()
	if err := errors.Join(err, first.Close()); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, first.Meta().UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	patient(t, func() (err error) { w, err = r.beginMerge(); return err })
	done := w.seen.Done
	if at, _, err := file.NextData(int(w.from.Fd()), 0, done); err != nil || at < done || done == 0 {
		t.Errorf("of what was moved up to %d some is at %d in the layer that gave it, too: %v", done, at, err)
	}
	w.close()
	slow := &slowDisk{Loop: loop}
	goesOn(t, slow, r, "after an interruption")
	for more := true; more; {
		if more, err = r.Merge(ctx, MergeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	goesOn(t, slow, r, "after the merge")
}
