package engine

import (
	"testing"

	"drover.io/drover/block"
)

func TestNothingIsAllocatedPerBlock(t *testing.T) {
	r := newRig(t, 1, nil)
	r.m[0].auto = true
	buf := fill(4096, 1)
	var count int
	req := &block.Request{Len: 4096, Buf: buf, Done: func(*block.Request) { count++ }}
	r.m[0].pending = make([]*block.Request, 0, 8)
	var allocs float64
	r.l.do(func() {
		m := r.m[0]
		r.e.cfg.Members[0].Member = direct{m} // a scripted member allocates
		allocs = testing.AllocsPerRun(1000, func() {
			req.Op = block.OpWrite
			r.e.Submit(req)
			req.Op = block.OpRead
			r.e.Submit(req)
		})
		r.e.cfg.Members[0].Member = m
	})
	if allocs != 0 || count < 2000 {
		t.Fatalf("%v allocations, %d requests done", allocs, count)
	}
}

func BenchmarkWholeBlock(b *testing.B) {
	b.ReportAllocs()
	r := newRig(b, 1, nil)
	req := &block.Request{Op: block.OpWrite, Len: 4096, Buf: fill(4096, 1), Done: func(*block.Request) {}}
	r.l.do(func() {
		m := r.m[0]
		r.e.cfg.Members[0].Member = direct{m}
		for b.Loop() {
			r.e.Submit(req)
		}
		r.e.cfg.Members[0].Member = m
	})
}

// TestNothingIsAllocatedPerWatchedBlock: the stall timeout allocates nothing, either.
func TestNothingIsAllocatedPerWatchedBlock(t *testing.T) {
	w := NewWatch()
	defer w.Close()
	m := w.Member(prompt{}, WatchOptions{Loop: newLoop(t), Replica: "r"})
	count := 0
	req := &block.Request{Op: block.OpWrite, Len: 4096, Buf: fill(4096, 1), Done: func(*block.Request) { count++ }}
	if allocs := testing.AllocsPerRun(1000, func() { m.Submit(req) }); allocs != 0 || count < 1000 {
		t.Errorf("%v allocations, %d requests done", allocs, count)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// prompt is a member that answers immediately.
type prompt struct{ Cutter }

func (prompt) Submit(r *block.Request) { r.Err = nil; r.Done(r) }
func (prompt) Close() error            { return nil }

func BenchmarkWatchedBlock(b *testing.B) {
	w := NewWatch()
	defer w.Close()
	m := w.Member(prompt{}, WatchOptions{Loop: newLoop(b), Replica: "r"})
	req := &block.Request{Op: block.OpWrite, Len: 4096, Buf: fill(4096, 1), Done: func(*block.Request) {}}
	b.ReportAllocs()
	for b.Loop() {
		m.Submit(req)
	}
	_ = m.Close()
}
