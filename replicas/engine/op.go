package engine

import (
	"errors"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// op is one request of the guest on its way. It is taken from a free list, and so are its requests to members: nothing
// is allocated for an I/O once there were as many at a time.
//
//	begin -> step -> send / read -> answers -> settle -+-> step again (partial blocks, long ranges)
//	                                                   +-> held (no room) -> step again
//	                                                   +-> waiting (a member is being dropped) -> settle
//	                                                   +-> finish
type op struct {
	e      *Engine
	parent *block.Request
	start  int64
	lo, hi int64 // the range in whole blocks

	slow    bool // overlapping operations neither pass it nor are passed by it
	reading bool // the step under way is a read
	waiting bool // for a drop
	again   bool // it was held and is being tried again
	probe   bool // its outcome decides about the other held ones

	// The step under way.
	pending int
	tried   set // members that failed this read
	ok      set
	failed  set
	full    set // failed for want of room
	err     error

	// Of an operation in steps.
	cur    int64 // first byte not done yet
	end    int64
	stage  stage
	bounce []byte
	pa, pb int64 // the piece under way, in whole blocks

	from       int // the member of the read under way
	subs       []block.Request
	next, prev *op
}

type stage uint8

const (
	stageHead  stage = iota // read the first block of the piece, if it is partial
	stageTail               // read the last one
	stageWrite              // write the piece
)

func (o *op) isRead() bool  { return o.parent.Op == block.OpRead }
func (o *op) aligned() bool { return (o.parent.Off|o.parent.Len)&(block.Size-1) == 0 }

func down(n int64) int64 { return n &^ (block.Size - 1) }
func up(n int64) int64   { return (n + block.Size - 1) &^ (block.Size - 1) }

// take starts an operation for r.
func (e *Engine) take(r *block.Request) *op {
	o := e.free
	if o == nil {
		o = e.make()
	} else {
		e.free = o.next
	}
	e.inflight++
	o.next, o.prev = nil, nil
	o.parent = r
	o.start = int64(time.Since(e.base))
	o.cur, o.end = r.Off, r.Off+r.Len
	o.lo, o.hi = down(o.cur), up(o.end)
	o.slow, o.reading, o.waiting, o.again, o.probe = false, false, false, false, false
	o.tried, o.err, o.stage = 0, nil, stageHead
	return o
}

func (e *Engine) make() *op {
	o := &op{e: e, subs: make([]block.Request, len(e.cfg.Members))}
	for i := range o.subs {
		o.subs[i].Done = func(r *block.Request) { o.answer(i, r.Err) }
	}
	return o
}

func (e *Engine) give(o *op) {
	e.inflight--
	o.parent = nil
	for i := range o.subs {
		o.subs[i].Buf = nil
	}
	o.next = e.free
	e.free = o
}

// begin takes the first step of an operation that has its range.
func (o *op) begin() {
	e := o.e
	if e.fenced != nil || e.closing {
		e.finish(o, syscall.EIO)
		return
	}
	r := o.parent
	if o.aligned() {
		o.send(r.Op, r.Buf, r.Off, r.Len, r.FUA)
		return
	}
	if o.bounce == nil && !o.takeBounce() {
		return // begin is called again when there is a buffer
	}
	o.step()
}

// step sends what is to be done next of an operation with partial blocks.
func (o *op) step() {
	r := o.parent
	switch r.Op {
	case block.OpRead:
		o.pa, o.pb = down(o.cur), min(up(o.end), down(o.cur)+bounceSize)
		o.read(o.bounce[:o.pb-o.pa], o.pa)
	case block.OpWrite:
		o.pa, o.pb = down(o.cur), min(up(o.end), down(o.cur)+bounceSize)
		o.merge()
	default:
		if o.cur&(block.Size-1) == 0 && o.end-o.cur >= block.Size {
			o.pa, o.pb = o.cur, down(o.end)
			o.stage = stageWrite
			o.send(r.Op, nil, o.pa, o.pb-o.pa, false)
			return
		}
		o.pa = down(o.cur)
		o.pb = o.pa + block.Size
		o.merge()
	}
}

// merge reads the partial blocks at the ends of the piece, lays the new bytes over them, and writes the piece.
func (o *op) merge() {
	buf, last := o.bounce[:o.pb-o.pa], o.pb-block.Size
	stop := min(o.pb, o.end)
	if o.stage == stageHead {
		if o.cur > o.pa {
			o.read(buf[:block.Size], o.pa)
			return
		}
		o.stage = stageTail
	}
	if o.stage == stageTail {
		if stop < o.pb && !(o.cur > o.pa && last == o.pa) { // not the block that was read as the first one
			o.read(buf[last-o.pa:], last)
			return
		}
		o.stage = stageWrite
	}
	into := buf[o.cur-o.pa : stop-o.pa]
	if o.parent.Op == block.OpWrite {
		copy(into, o.parent.Buf[o.cur-o.parent.Off:])
	} else {
		clear(into)
	}
	o.send(block.OpWrite, buf, o.pa, o.pb-o.pa, o.parent.FUA)
}

// stepped goes on after a step that succeeded.
func (o *op) stepped() {
	e := o.e
	switch {
	case o.slow && o.reading && !o.isRead():
		o.stage++
		o.merge()
		return
	case o.bounce != nil:
		stop := min(o.pb, o.end)
		if o.isRead() {
			copy(o.parent.Buf[o.cur-o.parent.Off:], o.bounce[o.cur-o.pa:stop-o.pa])
		}
		o.cur, o.stage = stop, stageHead
		if o.cur < o.end {
			if e.fenced != nil || e.closing {
				e.finish(o, syscall.EIO)
				return
			}
			o.step()
			return
		}
	}
	e.finish(o, nil)
}

// send gives one request to every member that may have it.
func (o *op) send(kind block.Op, buf []byte, off, n int64, fua bool) {
	o.reading = false
	o.ok, o.failed, o.full, o.err = 0, 0, 0, nil
	live := o.e.members &^ o.e.suspect
	o.pending = live.len() + 1 // the one keeps the step open while requests are sent: a member may answer at once
	for i := range o.subs {
		if live.has(i) {
			o.submit(i, kind, buf, off, n, fua)
		}
	}
	o.arrived()
}

func (o *op) submit(m int, kind block.Op, buf []byte, off, n int64, fua bool) {
	s := &o.subs[m]
	s.Op, s.FUA, s.Off, s.Len, s.Buf, s.Err = kind, fua, off, n, buf, nil
	o.e.cfg.Members[m].Member.Submit(s)
}

// read asks one member: the local one, else the least busy of those that did not fail this read.
func (o *op) read(buf []byte, off int64) {
	e := o.e
	o.reading = true
	o.ok, o.failed, o.full = 0, 0, 0
	m := e.reader(o.tried)
	if m < 0 {
		err := o.err
		if err == nil {
			err = syscall.EIO
		}
		e.finish(o, err)
		return
	}
	o.from = m
	o.pending = 1
	e.reads[m]++
	o.submit(m, block.OpRead, buf, off, int64(len(buf)), false)
}

func (e *Engine) reader(not set) int {
	best := -1
	live := e.members &^ e.suspect &^ not
	for i := range e.cfg.Members {
		switch {
		case !live.has(i):
		case e.cfg.Members[i].Local:
			return i
		case best < 0 || e.reads[i] < e.reads[best]:
			best = i
		}
	}
	return best
}

// answer takes what member m said.
func (o *op) answer(m int, err error) {
	if o.reading {
		o.e.reads[m]--
	}
	switch {
	case err == nil:
		o.ok |= bit(m)
	case api.Is(err, api.Denied):
		o.failed |= bit(m)
		o.err = err
		o.e.fence(err)
	default:
		o.failed |= bit(m)
		// A flush that failed is not tried again: the kernel tells of a lost write only once.
		if errors.Is(errno(err), syscall.ENOSPC) && o.parent.Op != block.OpFlush {
			o.full |= bit(m)
		}
		o.err = err
	}
	o.arrived()
}

// arrived counts an answer; with the last one the step is settled.
func (o *op) arrived() {
	if o.pending--; o.pending == 0 {
		o.e.settle(o)
	}
}

// list of operations, linked through them.
type list struct{ head, tail *op }

func (l *list) push(o *op) {
	o.prev, o.next = l.tail, nil
	if l.tail == nil {
		l.head = o
	} else {
		l.tail.next = o
	}
	l.tail = o
}

func (l *list) remove(o *op) {
	if o.prev == nil {
		l.head = o.next
	} else {
		o.prev.next = o.next
	}
	if o.next == nil {
		l.tail = o.prev
	} else {
		o.next.prev = o.prev
	}
	o.next, o.prev = nil, nil
}
