package engine

import (
	"context"
	"errors"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Laster is a Member with a stall timeout, which the last member does not have: there is none to go on with.
type Laster interface{ Last(is bool) }

// Abandonable is a Member that can be abandoned for a stall. Abandoned is the reason; nil: the member is not.
type Abandonable interface{ Abandoned() error }

// tellLast tells the members which of them is the last one.
func (e *Engine) tellLast() {
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

// Hurry says that the engine is about to be closed: members that do not answer are given up, the last one too.
func (e *Engine) Hurry() {
	e.cfg.Loop.Post(func() {
		e.hurry = true
		e.tellLast()
	})
}

// vouch finds a member that is in its session still. If none serves, vouch also asks those that failed, as long as it
// takes. It never asks a member that was absent when the engine opened: that one may lack what the others were given.
func (e *Engine) vouch(d *drop) error {
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
			return nil
		}
		if denied != 0 {
			if err := e.cfg.confirm(e.ctx, d.epoch, refusal); api.Is(err, api.Denied) {
				return err
			} else if err == nil && denied == d.able {
				return refusal // the API names this engine, and no member is left that it could go on with
			}
		}
		if restarted == d.able.len() {
			return api.Errorf(api.Denied, "the machines of all replicas restarted: writes that were not flushed may be gone, "+
				"the volume has to be attached anew: %w", stack.ErrRestarted)
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

// revive sends what waits to members that serve again: what failed there, and what came while they did not.
func (e *Engine) revive(who set) {
	e.bare, e.refusing, e.impatient = time.Time{}, false, false
	e.suspect &^= who
	e.weak &^= who // to vouch they adopted the epoch
	e.lost = 0
	e.doubted = e.doubted && e.members&e.suspect != 0
	e.tellLast()
	for m := range e.cfg.Members {
		if e.weak.has(m) { // it was the last one that served, and is not any more
			e.propose(m, errLost)
		}
	}
	for o := e.ranges.busy.head; o != nil; o = o.next {
		if !o.reading {
			o.failed &^= who
			o.full &^= who
			o.away &^= who
		}
	}
	e.stalled.retry()
	e.nextDrop()
	e.settleWaiting()
	e.unequal.soon()
}

// stalledReads are reads that no member can answer now. Loop thread.
type stalledReads struct {
	e    *Engine
	list []*op
}

// retry asks again for the reads: the members have changed.
func (s *stalledReads) retry() {
	list := s.list
	s.list = nil
	for _, o := range list {
		o.waiting, o.tried, o.sore, o.err = false, 0, 0, nil
		o.read(o.stall, o.stallAt)
	}
}

// add lets a read wait that no member can answer now, and reports whether it does.
func (s *stalledReads) add(o *op, buf []byte, off int64) bool {
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
		e.lost = e.members & o.tried &^ o.sore // one that is only damaged there serves
	}
	if e.suspect|e.lost == 0 {
		return false // those that may come to answer are members no more
	}
	o.stall, o.stallAt = buf, off
	s.list = append(s.list, o)
	e.nextDrop()
	return true
}

// end fails the reads that wait: the engine ends.
func (s *stalledReads) end() {
	list := s.list
	s.list = nil
	for _, o := range list {
		s.e.finish(o, syscall.EIO)
	}
}

// Suspect has a member dropped that fails in a way that no request tells of.
func (e *Engine) Suspect(name string, why error) {
	e.cfg.Loop.Post(func() {
		for i, m := range e.cfg.Members {
			if m.Name == name && e.members.has(i) && !e.closing && e.fenced == nil {
				e.propose(i, why)
			}
		}
	})
}

// FailAfter bounds how long I/O waits where all replicas are gone; 0: it waits as long as it takes. It is to be called
// every now and then. What waits for longer fails, and so does what comes, until a replica is back. It reports whether
// I/O fails now.
func (e *Engine) FailAfter(ctx context.Context, most time.Duration) (fails bool, err error) {
	err = e.on(ctx, func() {
		// One that goes on does not know which writes failed before it: intents stay until the next attach compares.
		e.unequal.unknown = e.unequal.unknown || most > 0 && !e.cfg.Equalise
		e.tire(most)
		waits := len(e.stalled.list) > 0 || len(e.ranges.waiting()) > 0
		switch {
		case most == 0 || e.serving() != 0 || !waits && !e.refusing:
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

// serving are the members that answer, as far as is known. One of those that failed a write at the same time is
// nobody's suspect, since somebody has to vouch for what is there; it serves once one of them did.
func (e *Engine) serving() set {
	live := e.members &^ e.suspect &^ e.lost
	if e.suspect != 0 && !e.vouched {
		for _, o := range e.ranges.waiting() {
			if !o.reading {
				live &^= o.failed & o.away
			}
		}
	}
	return live
}

// Absentee is a Member that knows how long there has been no connection to it; 0: there is one.
type Absentee interface{ AbsentFor() time.Duration }

// tire has the last member given up that is waited for otherwise, once it was not reached for long enough.
func (e *Engine) tire(most time.Duration) {
	live := e.members &^ e.suspect
	if e.lost != 0 || live.len() != 1 {
		return
	}
	a, ok := e.cfg.Members[live.first()].Member.(Absentee)
	if is := ok && most > 0 && a.AbsentFor() > most; is != e.impatient {
		e.impatient = is
		e.tellLast()
	}
}

// failLost ends what waits for a replica.
func (e *Engine) failLost() {
	for _, o := range e.ranges.waiting() {
		if o.waiting { // not ended by the one before it
			e.finish(o, syscall.EIO)
		}
	}
	e.stalled.end()
}
