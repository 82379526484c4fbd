package engine

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"drover.io/drover/api"
)

// settle decides about a step that every member asked has answered, or that waited for a drop.
func (e *Engine) settle(o *op) {
	o.waiting = false
	if e.fenced != nil {
		e.finish(o, syscall.EIO)
		return
	}
	if o.reading {
		e.settleRead(o)
		return
	}
	if e.acked(o) {
		if o.probe {
			o.probe = false
			e.retryAll()
		}
		o.stepped()
		return
	}
	live := e.members &^ e.suspect
	bad := e.members &^ o.ok & o.failed
	switch {
	case live != 0 && o.full&live == live:
		bad &^= live // all of them are full: nobody is better than the others, the write waits for room
	case o.ok&live == 0 && o.full != 0:
		bad &^= o.full // nobody has it and some have just no room: these stay
	}
	for m := range e.cfg.Members {
		if bad.has(m) {
			e.propose(m, o.err)
		}
	}
	switch live = e.members &^ e.suspect; {
	case e.closing:
		e.finish(o, o.failure())
	case e.suspect != 0:
		o.waiting = true
	case o.full&live == live:
		e.hold(o)
	default:
		e.finish(o, o.failure()) // the last member failed: the guest's to know
	}
}

func (o *op) failure() error {
	if o.err != nil {
		return o.err
	}
	return syscall.EIO
}

// settleRead goes on with what was read, or asks the next member.
func (e *Engine) settleRead(o *op) {
	if !e.acked(o) && o.failed != 0 {
		o.tried |= o.failed
		s := &o.subs[o.from]
		o.read(s.Buf, s.Off)
		return
	}
	if o.tried != 0 {
		for m := range e.cfg.Members {
			if o.tried.has(m) && e.members.has(m) {
				e.propose(m, o.err)
			}
		}
		o.tried, o.err = 0, nil
	}
	o.stepped()
}

// propose begins to drop member m, unless it is the last one that serves.
func (e *Engine) propose(m int, why error) {
	if e.suspect.has(m) || e.members&^e.suspect == bit(m) {
		return
	}
	e.suspect |= bit(m)
	e.dropped[m] = fmt.Errorf("replica %s: %w", e.cfg.Members[m].Name, why)
	e.nextDrop()
}

// nextDrop starts to drop a suspect; one at a time, because each moves the epoch on.
func (e *Engine) nextDrop() {
	if e.dropping || e.suspect == 0 || e.fenced != nil || e.closing {
		return
	}
	e.dropping = true
	m := e.suspect.first()
	d := drop{m: m, epoch: e.epoch, names: e.names(e.members &^ bit(m)), survivors: e.members &^ e.suspect}
	e.drops.Add(1)
	go func() {
		defer e.drops.Done()
		err := e.drop(&d)
		e.cfg.Loop.Post(func() { e.settled(&d, err) })
	}()
}

// drop is one member on its way out.
type drop struct {
	m         int
	epoch     int64
	names     []string // members of the new epoch
	survivors set      // those that serve: they must adopt it
	weak      set      // survivors that could not adopt it
	why       error
}

// drop records it and has the survivors adopt the new epoch. It runs in its own goroutine.
func (e *Engine) drop(d *drop) error {
	name := e.cfg.Members[d.m].Name
	if err := e.insist(func(ctx context.Context) error { return e.cfg.Drop(ctx, d.epoch, name) }); err != nil {
		return err
	}
	for i, m := range e.cfg.Members {
		if !d.survivors.has(i) {
			continue
		}
		adopt := func(ctx context.Context) error {
			return m.Member.Adopt(ctx, d.epoch+1, e.cfg.Incarnation, d.names)
		}
		var err error
		if d.survivors&^d.weak == bit(i) {
			err = e.insist(adopt) // the last one: there is nothing else to turn to
		} else {
			err = adopt(e.ctx)
		}
		switch {
		case err == nil:
		case api.Is(err, api.Denied) || e.ctx.Err() != nil:
			return err
		default:
			d.weak |= bit(i)
			d.why = err
		}
	}
	return nil
}

// insist repeats fn until it succeeds, is denied, or the engine closes.
func (e *Engine) insist(fn func(context.Context) error) error {
	wait := 50 * time.Millisecond
	for {
		err := fn(e.ctx)
		if err == nil || api.Is(err, api.Denied) {
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-e.ctx.Done():
			t.Stop()
			return e.ctx.Err()
		}
		wait = min(2*wait, 5*time.Second)
	}
}

// settled takes the outcome of a drop. Loop thread.
func (e *Engine) settled(d *drop, err error) {
	e.dropping = false
	if err != nil {
		if api.Is(err, api.Denied) {
			e.fence(err)
		}
		return // else the engine is closing
	}
	if e.closing {
		return // Close ends what waits and closes the members
	}
	e.members &^= bit(d.m)
	e.suspect &^= bit(d.m)
	e.weak = e.weak&^bit(d.m) | d.weak&e.members
	e.epoch = d.epoch + 1
	for m := range e.cfg.Members {
		if d.weak.has(m) && e.members.has(m) {
			e.propose(m, d.why)
		}
	}
	if e.cfg.OnDrop != nil {
		e.cfg.OnDrop(e.cfg.Members[d.m].Name, e.dropped[d.m])
	}
	gone := e.cfg.Members[d.m].Member
	e.gone |= bit(d.m)
	e.drops.Add(1)
	go func() { // it waits for what the member still has
		defer e.drops.Done()
		_ = gone.Close() // nothing depends on a member that was dropped
	}()
	e.nextDrop()
	for _, o := range e.waiting() {
		if o.waiting { // not ended by the one before it
			e.settle(o)
		}
	}
}

// waiting lists the operations that wait for a drop.
func (e *Engine) waiting() []*op {
	var ops []*op
	for o := e.busy.head; o != nil; o = o.next {
		if o.waiting {
			ops = append(ops, o)
		}
	}
	return ops
}

// fence stops the engine for good. What members still have ends with their answers.
func (e *Engine) fence(why error) {
	if e.fenced != nil {
		return
	}
	e.fenced = why
	if e.cfg.OnFence != nil {
		e.cfg.OnFence(why)
	}
	e.failWaiting()
}
