package stack

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
)

// slowReads is a loop with a disk which does a read every 12 ms.
type slowReads struct {
	*uring.Loop
	waiting []func()
}

func (s *slowReads) Read(op *uring.Op, fd int, buf []byte, off int64) {
	s.waiting = append(s.waiting, func() { s.Loop.Read(op, fd, buf, off) })
}

// TestExpandBesideManyReads: a volume expands even if the slow disk takes longer than a moment for the I/O in progress.
func TestExpandBesideManyReads(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	const size, depth = 4 << 20, 128
	slow := &slowReads{Loop: startLoop(t)}
	r := mergeable(t, slow, newDisk(t), size)
	tick := time.NewTicker(12 * time.Millisecond)
	defer tick.Stop()
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			case <-tick.C:
			}
			slow.Post(func() {
				if len(slow.waiting) > 0 {
					next := slow.waiting[0]
					slow.waiting = slow.waiting[1:]
					next()
				}
			})
		}
	}()
	stop, done := false, make(chan error, depth)
	w := &block.Request{Op: block.OpWrite, Len: blockSize, Buf: numbered(1), Done: func(q *block.Request) { done <- q.Err }}
	slow.Post(func() { r.Submit(w) })
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	slow.Post(func() {
		for range depth {
			q := &block.Request{Op: block.OpRead, Len: blockSize, Buf: block.AlignedBuffer(int(blockSize))}
			q.Done = func(*block.Request) {
				if stop || q.Err != nil {
					done <- q.Err
					return
				}
				slow.Post(func() { r.Submit(q) })
			}
			r.Submit(q)
		}
	})
	for n := int64(2); n < 4; n++ {
		if err := r.Expand(context.Background(), n*size); err != nil {
			t.Error(err)
		}
	}
	slow.Post(func() { stop = true })
	for range depth {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	close(end)
	<-ended
}
