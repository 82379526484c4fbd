package engine

import (
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block"
)

// TestFailedMemberIsNotAskedWithoutAPause: the disk of one member fails each write, and the other member is away. Until
// the other member is back, the engine may ask the failing member again and again, but with pauses.
func TestFailedMemberIsNotAskedWithoutAPause(t *testing.T) {
	r := newRig(t, 2, nil)
	r.l.do(func() {
		for i, m := range r.m {
			m.auto = true
			m.fail = func(*block.Request) error { return []error{syscall.EIO, errAway}[i] }
		}
	})
	r.m[1].mu.Lock()
	r.m[1].refuse = func(int64) error { return errAway }
	r.m[1].mu.Unlock()
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	time.Sleep(time.Second)
	r.m[0].mu.Lock()
	n := len(r.m[0].adopted)
	r.m[0].mu.Unlock()
	if n > 50 {
		t.Errorf("the engine asked the member with the failing disk %d times in a second", n)
	}
	r.m[1].mu.Lock()
	r.m[1].refuse = nil
	r.m[1].mu.Unlock()
	r.l.do(func() { r.m[1].fail = nil })
	go func() {
		for range r.drops {
			r.settle <- nil
		}
	}()
	is(t, done, nil)
	close(r.drops)
}
