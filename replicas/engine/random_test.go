package engine

import (
	"bytes"
	"context"
	"math/rand/v2"
	"runtime"
	"syscall"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestRandom plays a guest that keeps many requests of any multiple of 512 in flight, sharing blocks but never sectors,
// against members that answer in any order and fail now and then. Reads must return the model's content, and in the end
// every member of the epoch has exactly the model's content.
func TestRandom(t *testing.T) {
	suite.Slow(t)
	for seed := range uint64(24) {
		for _, n := range []int{1, 2, 3} {
			random(t, seed, n, false)
		}
	}
}

// TestRandomOverlap: requests may overlap, so the guest cannot expect any order, but all members must be equal.
func TestRandomOverlap(t *testing.T) {
	for seed := range uint64(16) {
		random(t, seed, 3, true)
	}
}

type flight struct {
	req      *block.Request
	from, to int64 // sectors
	val      byte
	done     bool
}

func random(t *testing.T, seed uint64, members int, overlap bool) {
	t.Helper()
	const size, sector = 256 << 10, 512
	rng := rand.New(rand.NewPCG(seed, uint64(members)))
	unknown := rng.IntN(3)
	r := newRig(t, members, func(c *Config) {
		c.Size = size
		c.Drop = func(context.Context, int64, string) error { // the engine makes one call at a time
			if unknown > 0 {
				unknown--
				return api.Errorf(api.Unavailable, "unknown outcome")
			}
			return nil
		}
		c.OnSpace, c.OnDrop = nil, nil
	})
	full := false
	// Either disks fill up or members break: with both, the last member may break, and then the guest must get an
	// error.
	fills := members == 1 || seed%4 == 1
	breaks := !fills && seed%4 == 2 // and often no member breaks, so that several members are left in the end
	for i, m := range r.m {
		m.data = m.data[:size]
		m.fail = func(q *block.Request) error {
			if full && q.Op != block.OpRead && q.Op != block.OpFlush && rng.IntN(2) == 0 {
				return syscall.ENOSPC
			}
			if i > 0 && breaks && rng.IntN(400) == 0 {
				return syscall.EIO
			}
			return nil
		}
	}
	model := make([]byte, size)
	var flights []*flight
	free := func(from, to int64) bool {
		for _, f := range flights {
			if from < f.to && f.from < to {
				return false
			}
		}
		return true
	}
	submit := func() {
		from := rng.Int64N(size/sector - 1)
		to := min(from+1+rng.Int64N([]int64{2, 8, 40, 200}[rng.IntN(4)]), size/sector)
		if rng.IntN(2) == 0 { // whole blocks
			from = from &^ 7
			to = min((to+7)&^7, size/sector)
		}
		kind := []block.Op{block.OpRead, block.OpWrite, block.OpWrite, block.OpWrite, block.OpDiscard, block.OpZero,
			block.OpFlush}[rng.IntN(7)]
		if !overlap && kind != block.OpFlush && !free(from, to) {
			return
		}
		f := &flight{from: from, to: to}
		f.req = &block.Request{Op: kind, Off: from * sector, Len: (to - from) * sector}
		switch kind {
		case block.OpFlush:
			f.from, f.to, f.req.Off, f.req.Len = 0, 0, 0, 0
		case block.OpRead:
			f.req.Buf = fill(int(f.req.Len), 0xee)
		case block.OpWrite:
			f.val = byte(1 + rng.IntN(250))
			f.req.Buf = fill(int(f.req.Len), f.val)
		}
		f.req.Done = func(q *block.Request) {
			if f.done {
				t.Errorf("seed %d: a request was done twice", seed)
			}
			f.done = true
			if q.Err != nil {
				t.Errorf("seed %d: op %d at %d+%d: %v", seed, q.Op, q.Off, q.Len, q.Err)
			}
			at := model[f.from*sector : f.to*sector]
			switch {
			case q.Op == block.OpRead && !overlap && !bytes.Equal(q.Buf, at):
				t.Errorf("seed %d: read of %d+%d is not what was written", seed, q.Off, q.Len)
			case q.Op == block.OpWrite:
				copy(at, q.Buf)
			case q.Op == block.OpDiscard || q.Op == block.OpZero:
				clear(at)
			}
		}
		flights = append(flights, f)
		r.e.Submit(f.req)
	}
	answer := func() bool {
		var ready []*memory
		for _, m := range r.m {
			if len(m.pending) > 0 {
				ready = append(ready, m)
			}
		}
		if len(ready) == 0 {
			return false
		}
		m := ready[rng.IntN(len(ready))]
		// Overlapping requests of one member are never in flight together, so the order is free.
		m.next(rng.IntN(len(m.pending)))
		return true
	}
	tidy := func() {
		keep := flights[:0]
		for _, f := range flights {
			if !f.done {
				keep = append(keep, f)
			}
		}
		flights = keep
	}
	for range 400 {
		r.l.do(func() {
			if fills && rng.IntN(60) == 0 {
				full = !full
			}
			if len(flights) < 24 {
				submit()
			}
			for range rng.IntN(3) {
				answer()
			}
			tidy()
		})
		if rng.IntN(10) == 0 {
			r.e.Retry()
		}
	}
	for left := 1; left > 0; runtime.Gosched() {
		r.e.Retry()
		r.l.do(func() {
			full = false
			for answer() {
			}
			tidy()
			left = len(flights)
		})
	}
	r.l.do(func() {
		for i, m := range r.m {
			if !r.e.members.has(i) {
				continue
			}
			if overlap {
				model = r.m[r.e.members.first()].data
			}
			if !bytes.Equal(m.data, model) {
				t.Errorf("seed %d, %d members: member %d differs", seed, members, i)
			}
		}
		if r.e.ranges.slow != 0 || r.e.inflight != 0 || r.e.ranges.busy.head != nil || r.e.ranges.queue.head != nil || r.e.room.full {
			t.Errorf("seed %d: something is left over: slow %d, in flight %d", seed, r.e.ranges.slow, r.e.inflight)
		}
	})
	r.close()
	if t.Failed() {
		t.FailNow()
	}
}
