package stack

import (
	"context"
	"errors"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestScatterErrorIsNotLost: the device fails to take acknowledged data from the page cache. The kernel reports the
// error to the waiting process, but not to a process which opens the head later. So the replica takes no more writes.
func TestScatterErrorIsNotLost(t *testing.T) {
	suite.System(t)
	room := t.TempDir()
	run(t, "mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", room)
	defer unmount(t, room)
	t.Setenv("TMPDIR", room)
	t.Run("full", func(t *testing.T) {
		dir, _ := mounted(t, 256<<20, "", "mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal")
		ctx, loop := context.Background(), startLoop(t)
		d, err := Add(ctx, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		const size = 64 << 20
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
		if err := d.CreateReplica(ctx, spec); err != nil {
			t.Fatal(err)
		}
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }() // the disk is broken
		if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
		buf := block.AlignedBuffer(1 << 20)
		fill(buf, 7)
		for off := int64(0); off < size && err == nil; off += int64(len(buf)) {
			q := &block.Request{Op: block.OpWrite, Off: off, Len: int64(len(buf)), Buf: buf,
				Spans: []block.Span{{Off: 0, Len: 512 << 10}, {Off: 516 << 10, Len: 508 << 10}}}
			done := make(chan error, 1)
			q.Done = func(q *block.Request) { done <- q.Err }
			loop.Post(func() { r.Submit(q) })
			err = <-done
		}
		if err == nil {
			t.Error("all writes were acknowledged")
		}
		if err := r.Failed(); !errors.Is(err, ErrFailed) {
			t.Errorf("the replica: %v", err)
		}
	})
}
