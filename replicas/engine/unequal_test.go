package engine

import (
	"bytes"
	"maps"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// TestFailedWritesAreResynced: only one member has a write that failed. The engine resyncs the members there, and
// records that the members are equal.
func TestFailedWritesAreResynced(t *testing.T) {
	r := newRig(t, 2, nil)
	failed := make(chan error, 1)
	r.l.do(func() {
		for _, m := range r.m {
			m.auto = true
		}
		copy(r.m[1].data[8192:], fill(4096, 7))
		q := &block.Request{Op: block.OpWrite, Off: 8192, Len: 4096, Buf: fill(4096, 7)}
		q.Done = func(q *block.Request) { failed <- q.Err }
		o := r.e.startOp(q)
		r.e.ranges.busy.push(o)
		r.e.finishOp(o, syscall.EIO)
		if r.e.membersComplete() {
			t.Error("a write failed, and the members are said to be equal")
		}
		r.e.unequal.requestResync()
	})
	is(t, failed, syscall.EIO)
	for end := time.Now().Add(5 * time.Minute); ; runtime.Gosched() {
		equal, steady := false, false
		r.l.do(func() { equal, steady = bytes.Equal(r.m[0].data, r.m[1].data), r.e.membersComplete() })
		if equal && steady {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("equal: %v, known to be so: %v", equal, steady)
		}
	}
	is(t, r.start(block.OpWrite, 8192, fill(4096, 9), 0), nil)
}

// TestMembersAreResyncedBesideAnUnfetchedPiece: if a write failed in a piece that a member still fetches, the engine
// reads the piece from another member. An unfetched piece of all members delays the resync of no other piece.
func TestMembersAreResyncedBesideAnUnfetchedPiece(t *testing.T) {
	r := newRig(t, 2, nil)
	lacks := func(pieces ...int64) func(q *block.Request) error {
		return func(q *block.Request) error {
			if q.Op == block.OpRead && slices.Contains(pieces, q.Off/unequalPiece) {
				return stack.ErrNotFetched
			}
			return nil
		}
	}
	r.l.do(func() {
		for i, m := range r.m {
			m.auto = true
			m.fail = lacks([][]int64{{0, 1}, {1}}[i]...)
		}
		for k := range int64(3) {
			copy(r.m[1].data[k*unequalPiece:], fill(4096, 7))
			r.e.unequal.pieces[k] = true
		}
		r.e.unequal.requestResync()
	})
	for end := time.Now().Add(5 * time.Minute); ; runtime.Gosched() {
		var left []int64
		r.l.do(func() { left = slices.Collect(maps.Keys(r.e.unequal.pieces)) })
		if slices.Equal(left, []int64{1}) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("pieces %v are left", left)
		}
	}
	r.l.do(func() {
		if a, b := r.m[0].data, r.m[1].data; a[0] != 7 || !bytes.Equal(a[2*unequalPiece:], b[2*unequalPiece:]) {
			t.Error("the members differ")
		}
	})
}
