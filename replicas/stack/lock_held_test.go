package stack

import (
	"context"
	"errors"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// gaveUp fails unless a call which waits for quiet soon ends with Busy.
func gaveUp(t *testing.T, what string, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		if !api.Is(err, api.Busy) {
			t.Fatalf("%s beside I/O that hangs: %v", what, err)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("%s waits for I/O that hangs", what)
	}
}

// TestHoldsBesideIOThatHangs: an operation which needs the end of all I/O does not make other I/O wait for a hanging
// request. The operation gives up, changes nothing, and succeeds later.
func TestHoldsBesideIOThatHangs(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const size = 4 << 20
	snapshot := func() Snapshot {
		return Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Created: time.Now()}
	}
	for name, do := range map[string]func(r *Replica) error{
		"expand": func(r *Replica) error { return r.Expand(ctx, 2*size) },
		"cut":    func(r *Replica) error { return r.Cut(ctx, snapshot()) },
		"group": func(r *Replica) error {
			c, err := r.PrepareCut(ctx, snapshot())
			if err != nil {
				return err
			}
			release, err := c.Hold(ctx)
			if err != nil {
				return errors.Join(err, c.Abort())
			}
			defer release()
			return c.Do(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			disk := &slowDisk{Loop: startLoop(t)}
			r := mergeable(t, disk, newDisk(t), size)
			mustIssue(t, disk, r, block.OpWrite, 5<<blockBits, blockSize, numbered(6))
			layers := len(r.Meta().Layers)
			defer disk.set(false)
			disk.set(true)
			hangs := disk.later(r, block.OpDiscard, 5, 1, nil)
			until(t, "the discard is on its way", func() bool { return disk.waiting() > 0 })
			if err := r.onLoop(func() { disk.slow = false }); err != nil { // for the next requests
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- do(r) }()
			gaveUp(t, name, ended)
			goesOn(t, disk, r, "after it was given up")
			if m := r.Meta(); m.Size != size || len(m.Layers) != layers {
				t.Fatalf("it was given up, and the volume has %d bytes, %d layers", m.Size, len(m.Layers))
			}
			disk.set(false)
			if err := <-hangs; err != nil {
				t.Fatal(err)
			}
			patient(t, func() error { return do(r) })
			if m := r.Meta(); m.Size == size && len(m.Layers) == layers {
				t.Fatal("it was done, and nothing has changed")
			}
			goesOn(t, disk, r, "after it was done")
			buf := block.AlignedBuffer(int(blockSize))
			mustIssue(t, disk, r, block.OpRead, 5<<blockBits, blockSize, buf)
			if string(buf) != string(numbered(0)) {
				t.Fatalf("what was discarded begins with %x", buf[:8])
			}
		})
	}
}
