package peer

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"drover.io/drover/block"
)

// hung is a replica whose disk hangs.
type hung struct {
	prompt
	kept chan *block.Request
}

func (h hung) Submit(r *block.Request) { h.kept <- r }

// TestBesideAHungLastReplica: a replica without a stall timeout hangs, and has all credit of a connection. The server
// still serves and adopts another replica on the same connection.
func TestBesideAHungLastReplica(t *testing.T) {
	const size = 1 << 20
	f := newFar(t, testSize, nil)
	f.stop()
	h := hung{prompt{1 << 40}, make(chan *block.Request, 2*connCredit/size)}
	f.o.Open = func(_ context.Context, uid, _ string) (Replica, Loop, error) {
		if uid == "hung" {
			return h, f.loop, nil
		}
		return h.prompt, f.loop, nil
	}
	f.start()
	d, loop := newDialer(t, f.at), startLoop(t)
	on := func(replica string) *Member {
		m := member(t, d, f, loop, func(o *Options) { o.Replica, o.Volume = replica, replica })
		m.lane = 0
		adoptAs(t, m, 1, 1)
		return m
	}
	a, b := on("hung"), on("well")
	var asked sync.WaitGroup
	submit := func(m *Member, op block.Op, n int) <-chan error {
		done := make(chan error, 1)
		asked.Add(1)
		buf := block.AlignedBuffer(n)
		loop.Post(func() {
			m.Submit(&block.Request{Op: op, Len: int64(n), Buf: buf, Done: func(r *block.Request) { done <- r.Err; asked.Done() }})
		})
		return done
	}
	for range connCredit/size + 4 {
		submit(a, block.OpWrite, size)
	}
	var kept []*block.Request
	defer func() { // the disk continues
		answered := make(chan struct{})
		go func() { asked.Wait(); close(answered) }()
		for {
			for _, r := range kept {
				f.loop.Post(func() { r.Done(r) })
			}
			select {
			case r := <-h.kept:
				kept = []*block.Request{r}
				continue
			case <-answered:
			}
			break
		}
		for _, m := range []*Member{a, b} {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	}()
	for range connCredit / size {
		kept = append(kept, <-h.kept)
	}
	late := time.After(30 * time.Second)
	for _, q := range []struct {
		op block.Op
		n  int
	}{{block.OpWrite, 4096}, {block.OpRead, 4096}, {block.OpFlush, 0}, {block.OpDiscard, 0}, {block.OpWrite, size}} {
		select {
		case err := <-submit(b, q.op, q.n):
			if err != nil {
				t.Errorf("op %d of %d bytes: %v", q.op, q.n, err)
			}
		case <-late:
			t.Fatalf("op %d of %d bytes of a healthy replica waits for one whose disk hangs", q.op, q.n)
		}
	}
	adoptAs(t, b, 2, 1)
	if len(h.kept) > 0 {
		t.Error("the replica whose disk hangs was asked for more than its connection's credit")
	}
}

// TestPassedOver: a session's requests are sent in order, and other sessions pass a session that waits for credit.
func TestPassedOver(t *testing.T) {
	const mib = 1 << 20
	c := &conn{credit: 4 * mib, table: map[uint64]*slot{}, shares: map[uint32]int64{}}
	c.work = sync.NewCond(&c.mu)
	slots := map[[2]int64]*slot{}
	queue := func(session uint32, off, weight int64) {
		s := &slot{h: header{session: session, off: off}, weight: weight}
		slots[[2]int64{int64(session), off}] = s
		c.enqueueSlot(s)
	}
	answered := func(session, off int64) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.forgetSlot(slots[[2]int64{session, off}])
	}
	sends := func(want ...[2]int64) {
		t.Helper()
		c.mu.Lock()
		defer c.mu.Unlock()
		var list [][2]int64
		for s := c.nextSlot(); s != nil; s = c.nextSlot() {
			list = append(list, [2]int64{int64(s.h.session), s.h.off})
		}
		if !slices.Equal(list, want) {
			t.Errorf("%v are sent (session, offset), not %v", list, want)
		}
	}
	queue(1, 0, 3*mib)
	queue(1, 1, 2*mib)
	queue(1, 2, 4096)
	queue(1, 3, 0)
	queue(2, 0, 128<<10)
	queue(2, 1, 256<<10)
	queue(2, 2, mib)
	queue(2, 3, 0)
	queue(3, 0, 2*mib)
	queue(3, 1, 4096)
	if !c.cancelSlot(slots[[2]int64{1, 2}]) {
		t.Fatal("what was not sent is not given back")
	}
	sends([2]int64{1, 0}, [2]int64{2, 0}, [2]int64{2, 1}, [2]int64{3, 0})
	answered(1, 0)
	sends([2]int64{1, 1}, [2]int64{1, 3})
	answered(3, 0)
	sends([2]int64{2, 2}, [2]int64{2, 3}, [2]int64{3, 1})
	for _, s := range c.table {
		answered(int64(s.h.session), s.h.off)
	}
	if c.flying != 0 || len(c.shares) > 0 || len(c.queue) > 0 {
		t.Errorf("at the end %d bytes are under way, %v, %d slots wait", c.flying, c.shares, len(c.queue))
	}
}
