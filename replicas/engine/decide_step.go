package engine

import "syscall"

// decideStep decides about a step after the answers of all asked members, or after a drop.
func (e *Engine) decideStep(o *op) {
	o.waiting = false
	if e.fenced != nil {
		e.finishOp(o, syscall.EIO)
		return
	}
	if o.reading {
		e.decideRead(o)
		return
	}
	if e.mayAcknowledge(o) {
		if o.probe {
			o.probe = false
			e.room.retryAll()
		}
		o.stepDone()
		return
	}
	if late := (e.members | e.joining) &^ e.suspect &^ o.ok &^ o.failed; late != 0 && !e.closing {
		o.askMembers(late) // members that serve since the begin
		return
	}
	live := e.members &^ e.suspect
	bad := e.members &^ o.ok & o.failed
	switch {
	case live != 0 && o.full&live == live:
		bad &^= live // all members are full: the write waits for room
	case o.ok&live == 0 && o.full != 0:
		bad &^= o.full // no member has the write and some are full: these stay
	}
	for m := range e.cfg.Members {
		if bad.has(m) {
			e.proposeDrop(m, o.err)
		}
	}
	switch live = e.members &^ e.suspect; {
	case e.closing:
		e.finishOp(o, o.failure())
	case e.suspect != 0 || e.joining&^o.ok != 0 || e.weak != 0 && e.dropping:
		o.waiting = true
	case o.full&live == live:
		e.room.holdWrite(o)
	case o.away&live != 0:
		e.lost |= o.away & live
		o.waiting = true
		e.nextDrop()
	default:
		e.finishOp(o, o.failure()) // the last member failed: the guest's to know
	}
}

func (o *op) failure() error {
	if o.err != nil {
		return o.err
	}
	return syscall.EIO
}

// decideRead continues after a read, or asks the next member.
func (e *Engine) decideRead(o *op) {
	if !e.mayAcknowledge(o) && o.failed|o.unfetched != 0 {
		o.tried |= o.failed
		o.readFromMember(o.out.Buf, o.out.Off)
		return
	}
	if o.tried != 0 {
		for m := range e.cfg.Members {
			if (o.tried &^ o.sore).has(m) && e.members.has(m) { // a member with damage there is repaired
				e.proposeDrop(m, o.err)
			}
		}
		o.tried, o.sore, o.err = 0, 0, nil
	}
	o.unfetched, o.pause, o.due = 0, 0, 0
	o.stepDone()
}

// decideWaiting settles the waiting operations after a change of the members.
func (e *Engine) decideWaiting() {
	for _, o := range e.ranges.listWaiting() {
		if o.waiting { // the operation before may have ended this one, too
			e.decideStep(o)
		}
	}
}
