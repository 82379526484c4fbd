package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// proposeDrop begins to drop member m, unless m is the last serving one.
func (e *Engine) proposeDrop(m int, why error) {
	if e.suspect.has(m) || e.members&^e.suspect == bit(m) {
		return
	}
	e.suspect |= bit(m)
	e.updateLast()
	e.dropped[m] = fmt.Errorf("replica %s: %w", e.cfg.Members[m].Name, why)
	e.nextDrop()
}

// nextDrop starts to drop a suspect, or to find a serving member if all are lost; one at a time, because each drop
// increments the epoch. Without such work nextDrop starts the next join.
func (e *Engine) nextDrop() {
	if e.dropping || e.fenced != nil || e.closing {
		return
	}
	if e.lost &= e.members; e.lost != 0 && e.members&^e.suspect&^e.lost != 0 {
		// another replica joined since the loss: the lost member is dropped like a failed one
		for m := range e.cfg.Members {
			if e.lost.has(m) && e.dropped[m] == nil {
				e.dropped[m] = fmt.Errorf("replica %s: %w", e.cfg.Members[m].Name, errLost)
			}
		}
		e.suspect, e.lost = e.suspect|e.lost, 0
		e.updateLast()
	}
	if e.suspect|e.lost == 0 {
		e.nextJoin()
		return
	}
	e.dropping, e.vouched = true, false
	d := drop{m: -1, list: e.cfg.Members, epoch: e.epoch, before: e.memberNames(e.members),
		serving: e.members &^ e.suspect &^ e.lost, able: e.members &^ e.missing}
	if e.suspect != 0 {
		d.m = e.suspect.first()
		d.names, d.survivors = e.memberNames(e.members&^bit(d.m)), e.members&^e.suspect
	}
	e.drops.Add(1)
	go func() {
		defer e.drops.Done()
		err := e.dropMember(&d)
		e.cfg.Loop.Post(func() { e.dropEnded(&d, err) })
	}()
}

var errLost = api.Errorf(api.Unavailable, "the member does not answer")

// drop is the drop of one member in progress.
type drop struct {
	m         int // -1: no member
	list      []Named
	epoch     int64
	before    []string // members now
	names     []string // members of the new epoch
	able      set      // members now that may vouch: resynced by the engine
	serving   set      // able members that are no suspects
	survivors set      // members that must adopt the new epoch
	weak      set      // survivors without the adoption
	revived   set      // members that serve again: nothing is dropped
	why       error
}

// dropMember records the drop in the API and has the survivors adopt the new epoch. dropMember runs in a goroutine of
// its own.
//
// First some member must vouch: a member with an unbroken session, which has every acknowledged write. Two members
// whose sessions broke at once cannot tell which of the two lost writes; the engine waits for a member with an unbroken
// session.
func (e *Engine) dropMember(d *drop) error {
	if err := e.findVouchingMember(d); err != nil || d.revived != 0 {
		return err
	}
	e.cfg.Loop.Post(func() { e.vouched = true })
	name := d.list[d.m].Name
	if err := e.repeatUntilDecided(func(ctx context.Context) error { return e.cfg.Drop(ctx, d.epoch, name) }); err != nil {
		return err
	}
	return e.adoptAll(d, d.epoch+1)
}

// adoptAll has the survivors adopt an epoch; at least one does.
func (e *Engine) adoptAll(d *drop, epoch int64) error {
	for i, m := range d.list {
		if !d.survivors.has(i) {
			continue
		}
		adopt := func(ctx context.Context) error {
			return m.Member.Adopt(ctx, epoch, e.cfg.Incarnation, d.names)
		}
		var err error
		if d.survivors&^d.weak == bit(i) {
			err = e.repeatUntilDecided(adopt) // the last member: no other is left to ask
		} else {
			err = adopt(e.ctx)
		}
		switch {
		case err == nil:
		case e.ctx.Err() != nil || api.Is(err, api.Denied) && (e.cfg.Owns == nil || d.survivors&^d.weak == bit(i)):
			return err
		default:
			d.weak |= bit(i)
			d.why = err
		}
	}
	return nil
}

// repeatUntilDecided repeats fn until success, denial, or the engine's end.
func (e *Engine) repeatUntilDecided(fn func(context.Context) error) error {
	wait := 50 * time.Millisecond
	for {
		err := fn(e.ctx)
		if err == nil || api.Is(err, api.Denied) {
			return err
		}
		if errors.Is(err, stack.ErrRestarted) {
			return api.Errorf(api.Denied, "no member is left that has everything: %w", err)
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

// dropEnded takes the outcome of a drop. Loop thread.
func (e *Engine) dropEnded(d *drop, err error) {
	e.dropping = false
	if err != nil {
		if api.Is(err, api.Denied) {
			e.fence(err)
		}
		return // else the engine is closing
	}
	if e.closing {
		return // Close ends the waiting operations and closes the members
	}
	if d.revived != 0 {
		e.reviveMembers(d.revived)
		return
	}
	e.cleaner.whole.Store(false) // until the owner says so again
	e.members &^= bit(d.m)
	e.suspect &^= bit(d.m)
	// At the swap the API named this engine. Another member may have raised the doubt since.
	e.doubted = e.doubted && e.members&(e.suspect|e.lost) != 0
	e.missing &^= bit(d.m)
	e.weak = (e.weak&^d.survivors | d.weak) & e.members
	e.epoch = d.epoch + 1
	e.updateLast()
	for m := range e.cfg.Members {
		if d.weak.has(m) && e.members.has(m) {
			e.proposeDrop(m, d.why)
		}
	}
	if e.cfg.OnDrop != nil {
		e.cfg.OnDrop(e.cfg.Members[d.m].Name, e.dropped[d.m])
	}
	e.closeDropped(d.m)
	e.stalled.retryAll()
	e.nextDrop()
	e.decideWaiting()
	e.unequal.requestResync()
}

// closeDropped closes a dropped member, which waits for its requests. A Join of the same replica waits for the end.
func (e *Engine) closeDropped(m int) {
	gone, ended := e.cfg.Members[m], make(chan struct{})
	e.gone |= bit(m)
	e.leaving[gone.Name] = ended
	e.freePlaceLater(m)
	e.drops.Add(1)
	go func() {
		defer e.drops.Done()
		_ = gone.Member.Close() // nothing depends on a dropped member
		close(ended)
		e.cfg.Loop.Post(func() {
			if e.leaving[gone.Name] == ended {
				delete(e.leaving, gone.Name)
			}
		})
	}()
}

// fence stops the engine for good. Operations at members end with the answers.
func (e *Engine) fence(why error) {
	if e.fenced != nil {
		return
	}
	e.fenced = why
	e.removeJoiners(e.joiners, why)
	if e.cfg.OnFence != nil {
		e.cfg.OnFence(why)
	}
	e.failWaiting()
}
