package engine

import (
	"bytes"
	"testing"
	"time"

	"drover.io/drover/block"
)

// TestPoolOutlived: a closed pool keeps the memory that a hanging disk may still use.
func TestPoolOutlived(t *testing.T) {
	p, err := NewPool()
	if err != nil {
		t.Fatal(err)
	}
	b := &p.reads
	n := len(b.free) - 1
	lent := b.free[n]
	b.free = append(b.free[:n], block.AlignedBuffer(bounceSize)) // another buffer takes the free place
	p.Close()
	clear(lent) // a fault, if the memory is unmapped
	if len(b.all) != 1 || len(p.writes.all) != 0 {
		t.Errorf("%d and %d buffers are mapped", len(b.all), len(p.writes.all))
	}
	b.putBuffer(lent)
	if len(b.all) != 0 {
		t.Error("it stays mapped")
	}
}

// TestPartialBlocksBesideAHungVolume: volumes whose disks hang have many partial reads and writes in progress, and the
// I/O thread still serves another volume. In the end every request has an answer, and the pool has all its buffers.
func TestPartialBlocksBesideAHungVolume(t *testing.T) {
	p, err := NewPool()
	if err != nil {
		t.Fatal(err)
	}
	var l *testLoop
	volume := func() *rig {
		r := newRig(t, 1, func(c *Config) {
			c.Pool = p
			if l != nil {
				c.Loop = l
			}
		})
		if l == nil {
			l = r.l
		}
		r.l = l
		return r
	}
	const each = 20
	hung, well := []*rig{volume(), volume(), volume()}, volume()
	var waiting []chan error
	under := 0
	for _, r := range hung {
		for i := range int64(each) {
			waiting = append(waiting, r.start(block.OpWrite, i*16384+512, fill(512, 1), 0),
				r.start(block.OpRead, i*16384+8192+512, make([]byte, 512), 0))
		}
		under += r.pending(0)
	}
	if want := 2 * (bounceMax + len(hung)); under != want {
		t.Errorf("%d requests are with disks that hang, not %d", under, want)
	}
	l.do(func() { well.m[0].auto = true })
	got := make([]byte, 1024)
	for _, q := range []struct {
		op  block.Op
		off int64
		buf []byte
		n   int64
	}{{block.OpWrite, 512, fill(1024, 2), 0}, {block.OpWrite, 8192 + 512, fill(512, 3), 0},
		{block.OpDiscard, 512, nil, 512}, {block.OpRead, 512, got, 0}} {
		select {
		case err := <-well.start(q.op, q.off, q.buf, q.n):
			if err != nil {
				t.Errorf("op %d: %v", q.op, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("op %d of a healthy volume waits for those whose disks hang", q.op)
		}
	}
	if !bytes.Equal(got, append(fill(512, 0), fill(512, 2)...)) {
		t.Error("the healthy volume reads something else than was written")
	}
	// Further partial writes of the healthy volume take turns.
	var turns []chan error
	l.do(func() { well.m[0].auto = false })
	for i := range int64(3) {
		turns = append(turns, well.start(block.OpWrite, i*16384+512, fill(512, 4), 0))
	}
	if n := well.pending(0); n != 1 {
		t.Errorf("%d partial writes are under way beside those that have all buffers", n)
	}
	l.do(func() {
		well.m[0].auto = true
		well.m[0].next(0)
	})
	for _, done := range turns {
		is(t, done, nil)
	}
	for _, r := range hung {
		l.do(func() { r.m[0].auto = true })
	}
	l.do(func() {
		for _, r := range hung {
			for len(r.m[0].pending) > 0 {
				r.m[0].next(0)
			}
		}
	})
	for _, done := range waiting {
		is(t, done, nil)
	}
	l.do(func() {
		for _, b := range []*bounces{&p.reads, &p.writes} {
			if len(b.held) > 0 || b.more != 0 || len(b.queue) > 0 || len(b.free) != bounceMax+len(hung)+1 {
				t.Errorf("buffers: %d are held, %d beside the first, %d wait, %d are free", len(b.held), b.more,
					len(b.queue), len(b.free))
			}
		}
	})
	for _, r := range append(hung, well) {
		r.close()
	}
	if len(p.reads.all) != bounceMax || len(p.writes.all) != bounceMax {
		t.Errorf("without a volume there are %d and %d buffers", len(p.reads.all), len(p.writes.all))
	}
	p.Close()
}
