package engine

import (
	"bytes"
	"runtime"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block"
)

// TestFailedWritesAreMadeAlike: a write that failed after one member took it is on that one only. The members are made
// equal there, and the engine knows it.
func TestFailedWritesAreMadeAlike(t *testing.T) {
	r := newRig(t, 2, nil)
	failed := make(chan error, 1)
	r.l.do(func() {
		for _, m := range r.m {
			m.auto = true
		}
		copy(r.m[1].data[8192:], fill(4096, 7))
		q := &block.Request{Op: block.OpWrite, Off: 8192, Len: 4096, Buf: fill(4096, 7)}
		q.Done = func(q *block.Request) { failed <- q.Err }
		o := r.e.take(q)
		r.e.busy.push(o)
		r.e.finish(o, syscall.EIO)
		if r.e.steady() {
			t.Error("a write failed, and the members are said to be equal")
		}
		r.e.alikeSoon()
	})
	is(t, failed, syscall.EIO)
	for end := time.Now().Add(5 * time.Minute); ; runtime.Gosched() {
		equal, steady := false, false
		r.l.do(func() { equal, steady = bytes.Equal(r.m[0].data, r.m[1].data), r.e.steady() })
		if equal && steady {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("equal: %v, known to be so: %v", equal, steady)
		}
	}
	is(t, r.start(block.OpWrite, 8192, fill(4096, 9), 0), nil)
}
