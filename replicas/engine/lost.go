package engine

import (
	"context"
	"errors"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Laster is a Member with a stall timeout. The last member has none: no other member is left to continue with.
type Laster interface{ Last(is bool) }

// Abandonable is a Member that can be abandoned for a stall. Abandoned returns the reason; nil: not abandoned.
type Abandonable interface{ Abandoned() error }

// updateLast tells each member whether it is the last one.
func (e *Engine) updateLast() {
	live := e.members &^ e.suspect
	if e.hurry {
		live = 0
	}
	for i, m := range e.cfg.Members {
		if l, ok := m.Member.(Laster); ok && e.members.has(i) {
			l.Last(live == bit(i) && !e.impatient)
		}
	}
}

// Hurry announces Close: members that do not answer are abandoned, the last one too.
func (e *Engine) Hurry() {
	e.cfg.Loop.Post(func() {
		e.hurry = true
		e.updateLast()
	})
}

// findVouchingMember finds a member whose session is unbroken. If no serving member answers, findVouchingMember also
// asks failed members, as long as necessary. findVouchingMember never asks a member that was missing when the engine
// opened: the others were resynced without that member.
func (e *Engine) findVouchingMember(d *drop) error {
	wait := 50 * time.Millisecond
	for {
		var good set
		restarted := 0
		var denied set
		var refusal error
		ask := func(among set) error {
			for i, m := range d.list {
				if !among.has(i) {
					continue
				}
				err := m.Member.Adopt(e.ctx, d.epoch, e.cfg.Incarnation, d.before)
				switch {
				case err == nil:
					good |= bit(i)
					return nil
				case e.ctx.Err() != nil || api.Is(err, api.Denied) && e.cfg.Owns == nil:
					return err
				case api.Is(err, api.Denied):
					denied, refusal = denied|bit(i), err
				case errors.Is(err, stack.ErrRestarted):
					restarted++
				}
			}
			return nil
		}
		if err := ask(d.serving); err != nil || good != 0 {
			return err
		}
		if err := ask(d.able &^ d.serving); err != nil {
			return err
		}
		if good != 0 {
			d.revived = good
			return e.revival.pauseAfterAnother(e.ctx)
		}
		if denied != 0 {
			if err := e.cfg.confirmDenial(e.ctx, d.epoch, refusal); api.Is(err, api.Denied) {
				return err
			} else if err == nil && denied == d.able {
				return refusal // the API names this engine, and no member is left to continue with
			}
		}
		if restarted == d.able.len() {
			return api.Errorf(api.Denied, "the machines of all replicas restarted: unflushed writes may be lost; detach "+
				"the volume and attach it again: %w", stack.ErrRestarted)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-e.ctx.Done():
			t.Stop()
			return e.ctx.Err()
		}
		wait = min(2*wait, time.Second)
	}
}

// revival is the last time that failed members served again. It belongs to the drop in progress.
type revival struct {
	at   time.Time
	wait time.Duration
}

// pauseAfterAnother waits if failed members served again a moment ago: a member whose disk fails vouches each time, and
// fails at once again.
func (v *revival) pauseAfterAnother(ctx context.Context) error {
	if time.Since(v.at) > 2*time.Second {
		v.wait = 0
	} else {
		v.wait = min(max(2*v.wait, 20*time.Millisecond), time.Second)
	}
	err := pause(ctx, v.wait)
	v.at = time.Now()
	return err
}

// reviveMembers sends the waiting operations to members that serve again: failed operations, and operations since.
func (e *Engine) reviveMembers(who set) {
	e.bare, e.refusing, e.impatient = time.Time{}, false, false
	e.suspect &^= who
	e.weak &^= who // each adopted the epoch to vouch
	e.lost = 0
	e.doubted = e.doubted && e.members&e.suspect != 0
	e.updateLast()
	for m := range e.cfg.Members {
		if e.weak.has(m) { // the last serving member, which serves no more
			e.proposeDrop(m, errLost)
		}
	}
	for o := e.ranges.busy.head; o != nil; o = o.next {
		if !o.reading {
			o.failed &^= who
			o.full &^= who
			o.away &^= who
		}
	}
	e.stalled.retryAll()
	e.nextDrop()
	e.decideWaiting()
	e.unequal.requestResync()
}

// stalledReads are reads without a member that can answer now. Loop thread.
type stalledReads struct {
	e    *Engine
	list []*op
}

// retryAll asks again for the reads: the members have changed.
func (s *stalledReads) retryAll() {
	list := s.list
	s.list = nil
	for _, o := range list {
		o.waiting, o.tried, o.sore, o.err = false, 0, 0, nil
		o.readFromMember(o.stall, o.stallAt)
	}
}

// setAside sets a read aside if a member may answer later, and reports whether it did.
func (s *stalledReads) setAside(o *op, buf []byte, off int64) bool {
	e := s.e
	if e.doubted && !e.closing && e.fenced == nil {
		o.stall, o.stallAt = buf, off
		s.list = append(s.list, o)
		return true
	}
	if e.closing || e.fenced != nil || !api.Is(o.err, api.Unavailable) && e.members&^e.suspect&^o.tried == 0 &&
		e.suspect|e.lost == 0 {
		return false
	}
	if o.err != nil && !api.Is(o.err, api.Unavailable) {
		return false
	}
	if e.suspect == 0 && e.lost == 0 {
		e.lost = e.members & o.tried &^ o.sore // a member with damage there serves
	}
	if e.suspect|e.lost == 0 {
		return false // the members that may answer later were dropped
	}
	o.stall, o.stallAt = buf, off
	s.list = append(s.list, o)
	e.nextDrop()
	return true
}

// failAll fails the reads: the engine ends.
func (s *stalledReads) failAll() {
	list := s.list
	s.list = nil
	for _, o := range list {
		s.e.finishOp(o, syscall.EIO)
	}
}

// Suspect drops a member for a failure that no request shows.
func (e *Engine) Suspect(name string, why error) {
	e.cfg.Loop.Post(func() {
		for i, m := range e.cfg.Members {
			if m.Name == name && e.members.has(i) && !e.closing && e.fenced == nil {
				e.proposeDrop(i, why)
			}
		}
	})
}

// FailAfter bounds how long I/O waits without a replica; 0: without limit. The owner calls FailAfter now and then.
// Operations that wait for longer fail, and so do new operations until a replica is back. FailAfter reports whether I/O
// fails now.
func (e *Engine) FailAfter(ctx context.Context, most time.Duration) (fails bool, err error) {
	err = e.runOnLoop(ctx, func() {
		// A resumed engine does not know which writes failed earlier: intents stay until the next attach compares.
		e.unequal.unknown = e.unequal.unknown || most > 0 && !e.cfg.Resync
		e.abandonLast(most)
		waits := len(e.stalled.list) > 0 || len(e.ranges.listWaiting()) > 0
		switch {
		case most == 0 || e.servingMembers() != 0 || !waits && !e.refusing:
			e.bare, e.refusing = time.Time{}, false
		case e.bare.IsZero() && !e.impatient:
			e.bare = time.Now()
		case e.impatient || time.Since(e.bare) > most:
			e.refusing = true
			e.failLost()
		}
		fails = e.refusing
	})
	return fails, err
}

// servingMembers returns the members that answer, as far as is known. A member that failed a write together with the
// others is no suspect, because some member has to vouch; such a member serves again once a member vouched.
func (e *Engine) servingMembers() set {
	live := e.members &^ e.suspect &^ e.lost
	if e.suspect != 0 && !e.vouched {
		for _, o := range e.ranges.listWaiting() {
			if !o.reading {
				live &^= o.failed & o.away
			}
		}
	}
	return live
}

// Disconnectable is a Member with a connection: DisconnectedFor is the time without a connection; 0: connected.
type Disconnectable interface{ DisconnectedFor() time.Duration }

// abandonLast abandons the last member once the member was unreachable for long enough.
func (e *Engine) abandonLast(most time.Duration) {
	live := e.members &^ e.suspect
	if e.lost != 0 || live.len() != 1 {
		return
	}
	a, ok := e.cfg.Members[live.first()].Member.(Disconnectable)
	if is := ok && most > 0 && a.DisconnectedFor() > most; is != e.impatient {
		e.impatient = is
		e.updateLast()
	}
}

// failLost ends the operations that wait for a replica.
func (e *Engine) failLost() {
	for _, o := range e.ranges.listWaiting() {
		if o.waiting { // the operation before may have ended this one, too
			e.finishOp(o, syscall.EIO)
		}
	}
	e.stalled.failAll()
}
