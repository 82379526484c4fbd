package engine

import (
	"errors"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// op is one request of the guest in progress. Operations come from a free list, and so do their requests to members:
// the engine allocates nothing for an I/O once as many were in progress at a time.
//
//	firstStep -> nextStep -> sendToMembers / readFromMember -> countAnswer -> decideStep, and then one of
//	    nextStep again (partial blocks, long ranges)
//	    held (no room) -> nextStep again
//	    waiting (a member is being dropped) -> decideStep
//	    finishOp
type op struct {
	e      *Engine
	parent *block.Request
	start  int64
	lo, hi int64 // the range in whole blocks

	slow    bool // overlapping operations wait for each other, in order
	reading bool // the step in progress is a read
	waiting bool // for a drop
	again   bool // a second try after a hold
	probe   bool // the outcome decides about the other held operations

	// The step in progress.
	out     block.Request // the request to members
	pending int
	tried   set // members that failed this read
	sore    set // tried members with damage there
	// Members that fetch the blocks of this read, and the time of the next question.
	unfetched  set
	pause, due time.Duration
	ok         set
	failed     set
	full       set   // failed for want of room
	away       set   // failed, not reached
	err        error // of a member

	// For an operation in steps.
	cur    int64 // first byte not done yet
	end    int64
	stage  stage
	bounce []byte
	pa, pb int64 // the part in progress, in whole blocks

	leases []*block.BufferLease // memory that hanging disks may use
	renew  bool                 // the next read needs other memory

	gen  int64  // generation of the begin
	lock func() // for an operation that only holds its range: called with the range held
	// For a read without a member to answer.
	stall   []byte
	stallAt int64

	from       int // the member of the read in progress
	subs       []block.Request
	next, prev *op
}

type stage uint8

const (
	stageHead  stage = iota // read the first block of the piece, if partial
	stageTail               // read the last block
	stageWrite              // write the piece
)

func (o *op) isRead() bool    { return o.parent.Op == block.OpRead }
func (o *op) isAligned() bool { return (o.parent.Off|o.parent.Len)&(block.Size-1) == 0 }

func roundDown(n int64) int64 { return n &^ (block.Size - 1) }
func roundUp(n int64) int64   { return (n + block.Size - 1) &^ (block.Size - 1) }

// startOp starts an operation for r.
func (e *Engine) startOp(r *block.Request) *op {
	o := e.free
	if o == nil {
		o = e.newOp()
	} else {
		e.free = o.next
	}
	o.next, o.prev = nil, nil
	o.parent = r
	o.start = int64(time.Since(e.base))
	o.cur, o.end = r.Off, r.Off+r.Len
	o.lo, o.hi = roundDown(o.cur), roundUp(o.end)
	o.slow, o.reading, o.waiting, o.again, o.probe = false, false, false, false, false
	o.tried, o.sore, o.err, o.stage, o.lock = 0, 0, nil, stageHead, nil
	o.unfetched, o.pause, o.due = 0, 0, 0
	o.leases, o.renew = nil, false
	for len(o.subs) < len(e.cfg.Members) { // replicas have joined since the operation was made
		e.addRequest(o)
	}
	o.countInProgress()
	return o
}

// ahead is how many operations an engine has from the start: as many as the kernel gives a loop device at a time.
const ahead = 128

func (e *Engine) newOp() *op {
	return &op{e: e, subs: make([]block.Request, 0, len(e.cfg.Members))}
}

// addRequest makes a request for one more member. The operation is not in progress.
func (e *Engine) addRequest(o *op) {
	o.subs = append(o.subs, block.Request{})
	for k := range o.subs { // the slice may have moved
		o.subs[k].Done = func(r *block.Request) { o.noteLease(r); o.takeAnswer(k, r.Err) }
	}
}

func (e *Engine) freeOp(o *op) {
	e.inflight--
	e.gens.endOperation(o.gen)
	o.parent = nil
	for i := range o.subs {
		o.subs[i].Buf = nil
	}
	o.next = e.free
	e.free = o
}

// firstStep takes the first step of an operation with its range held.
func (o *op) firstStep() {
	e := o.e
	if e.fenced != nil || e.closing || e.refusing {
		e.finishOp(o, syscall.EIO)
		return
	}
	r := o.parent
	if o.lock != nil {
		o.lock()
		return
	}
	if o.isAligned() {
		o.sendToMembers(r.Op, r.Buf, r.Off, r.Len, r.FUA)
		return
	}
	if o.bounce == nil && !o.takeBounce() {
		return // firstStep is called again when there is a buffer
	}
	o.nextStep()
}

// nextStep sends the next request of an operation with partial blocks.
func (o *op) nextStep() {
	r := o.parent
	switch r.Op {
	case block.OpRead:
		o.pa, o.pb = roundDown(o.cur), min(roundUp(o.end), roundDown(o.cur)+bounceSize)
		o.readFromMember(o.bounce[:o.pb-o.pa], o.pa)
	case block.OpWrite:
		o.pa, o.pb = roundDown(o.cur), min(roundUp(o.end), roundDown(o.cur)+bounceSize)
		o.mergeBlocks()
	default:
		if o.cur&(block.Size-1) == 0 && o.end-o.cur >= block.Size {
			o.pa, o.pb = o.cur, roundDown(o.end)
			o.stage = stageWrite
			o.sendToMembers(r.Op, nil, o.pa, o.pb-o.pa, false)
			return
		}
		o.pa = roundDown(o.cur)
		o.pb = o.pa + block.Size
		o.mergeBlocks()
	}
}

// mergeBlocks reads the partial blocks at the ends of the piece, lays the new bytes over the blocks, and writes the
// piece.
func (o *op) mergeBlocks() {
	buf, last := o.bounce[:o.pb-o.pa], o.pb-block.Size
	stop := min(o.pb, o.end)
	if o.stage == stageHead {
		if o.cur > o.pa {
			o.readFromMember(buf[:block.Size], o.pa)
			return
		}
		o.stage = stageTail
	}
	if o.stage == stageTail {
		if stop < o.pb && !(o.cur > o.pa && last == o.pa) { // not the first block again
			o.readFromMember(buf[last-o.pa:], last)
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
	o.sendToMembers(block.OpWrite, buf, o.pa, o.pb-o.pa, o.parent.FUA)
}

// stepDone continues after a successful step.
func (o *op) stepDone() {
	e := o.e
	switch {
	case o.slow && o.reading && !o.isRead():
		o.stage++
		o.mergeBlocks()
		return
	case o.bounce != nil:
		stop := min(o.pb, o.end)
		if o.isRead() {
			copy(o.parent.Buf[o.cur-o.parent.Off:], o.bounce[o.cur-o.pa:stop-o.pa])
		}
		o.cur, o.stage = stop, stageHead
		if o.cur < o.end {
			if e.fenced != nil || e.closing {
				e.finishOp(o, syscall.EIO)
				return
			}
			o.nextStep()
			return
		}
	}
	e.finishOp(o, nil)
}

// sendToMembers gives one request to every member, except suspects.
func (o *op) sendToMembers(kind block.Op, buf []byte, off, n int64, fua bool) {
	o.reading = false
	o.ok, o.failed, o.full, o.away, o.err = 0, 0, 0, 0, nil
	if kind != block.OpFlush && o.e.cleaner.notesIntents() {
		o.e.cleaner.touchRegions(off, n, o.gen)
	}
	o.out = block.Request{Op: kind, FUA: fua, Off: off, Len: n, Buf: buf}
	o.askMembers((o.e.members | o.e.joiners | o.e.joining) &^ o.e.suspect)
}

// askMembers gives the step's request to some.
func (o *op) askMembers(who set) {
	for len(o.subs) < len(o.e.cfg.Members) { // replicas have joined since the begin
		o.e.addRequest(o)
	}
	o.pending = who.len() + 1 // one more keeps the step open: a member may answer at once
	for i := range o.subs {
		if who.has(i) {
			s := &o.subs[i]
			s.Op, s.FUA, s.Off, s.Len, s.Buf, s.Err = o.out.Op, o.out.FUA, o.out.Off, o.out.Len, o.out.Buf, nil
			s.Lease = nil
			o.e.cfg.Members[i].Member.Submit(s)
		}
	}
	o.countAnswer()
}

// readFromMember asks one member: the local one, else the least busy one, except members that failed this read or fetch
// its blocks.
func (o *op) readFromMember(buf []byte, off int64) {
	e := o.e
	o.reading = true
	o.ok, o.failed, o.full, o.away = 0, 0, 0, 0
	m := e.selectReader(o.tried | o.unfetched)
	if e.doubted {
		m = -1
	} else if m < 0 && o.unfetched != 0 {
		e.fetches.setAside(o)
		return
	}
	if m < 0 {
		if e.stalled.setAside(o, buf, off) {
			return
		}
		err := o.err
		if err == nil {
			err = syscall.EIO
		}
		e.finishOp(o, err)
		return
	}
	if o.renew {
		buf = o.otherMemory(buf)
	}
	o.from = m
	e.reads[m]++
	o.out = block.Request{Op: block.OpRead, Off: off, Len: int64(len(buf)), Buf: buf}
	o.askMembers(bit(m))
}

func (e *Engine) selectReader(not set) int {
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

// takeAnswer takes the answer of member m.
func (o *op) takeAnswer(m int, err error) {
	if o.reading {
		o.e.reads[m]--
	}
	if err == nil {
		o.ok |= bit(m)
		o.countAnswer()
		return
	}
	if o.reading && errors.Is(err, stack.ErrNotFetched) {
		o.unfetched |= bit(m)
		o.countAnswer()
		return
	}
	o.failed |= bit(m)
	switch {
	case api.Is(err, api.Denied) && !o.e.doubtOwnership(m, err):
		o.e.fence(err)
	case api.Is(err, api.Denied):
		err = api.Errorf(api.Unavailable, "the member serves another engine: %v", err)
		o.away |= bit(m)
	case api.Is(err, api.Unavailable):
		o.away |= bit(m)
	case o.reading && isDamage(err):
		o.sore |= bit(m)
		o.e.hurt |= bit(m)
	case errors.Is(errnoOf(err), syscall.ENOSPC) && o.parent.Op != block.OpFlush:
		// A failed flush is not tried again: the kernel reports a lost write only once.
		o.full |= bit(m)
	}
	switch {
	case o.e.joiners.has(m): // the joiner lacks this write, and must not begin a swap
		o.e.removeJoiners(bit(m), err)
	case !o.reading && !(o.e.members | o.e.joining).has(m): // a former joiner: the members fail the write, or nothing does
	case o.sore.has(m) && api.Is(o.err, api.Unavailable): // an unreachable member may have the damaged data
	default:
		o.err = err
	}
	o.countAnswer()
}

// countAnswer counts an answer; the last answer settles the step.
func (o *op) countAnswer() {
	if o.pending--; o.pending == 0 {
		o.e.decideStep(o)
	}
}
