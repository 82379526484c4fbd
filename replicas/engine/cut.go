package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A cut takes all members at one instant. Each member prepares; then the engine holds writes, and the writes in
// progress end: all members hold the same. Then each member seals. After the last seal the snapshot exists, and writes
// continue. The engine drops a member that does not seal in time, like a member that fails a write. If no member seals,
// the engine gives the cut up: every member undoes the cut and answers, or is dropped, before writes continue.

// Cutter is a member that supports cuts.
type Cutter interface {
	Mirror
	// State returns the member's record: its snapshots, among other things.
	State(ctx context.Context) (stack.Meta, error)
	// PrepareCut does all of a cut but the commit. An earlier prepared cut is given up.
	PrepareCut(ctx context.Context, s stack.Snapshot) error
	// DoCut commits the prepared cut of a layer.
	DoCut(ctx context.Context, layer string) error
	AbortCut(ctx context.Context) error
	// Forget removes a snapshot; a missing snapshot is no error.
	Forget(ctx context.Context, uid string) error
	// Seal cuts this member alone: for a snapshot, or for several snapshots of the same content, which share the layer
	// of the first.
	Seal(ctx context.Context, list ...stack.Snapshot) error
	// Changed lists the pieces that may differ between two snapshots, or between a snapshot or some layers and the
	// member's present content.
	Changed(ctx context.Context, from, to string, base []string, piece int64) ([]int64, error)
	// SnapDigests and SnapRead are for the content of a snapshot, until SnapEnd.
	SnapDigests(ctx context.Context, uid string, off, n int64) ([]byte, error)
	SnapRead(ctx context.Context, uid string, off int64, buf []byte) error
	SnapEnd(ctx context.Context) error
	// Sizes returns the sizes of the snapshots' layers, by the uid of the snapshot.
	Sizes(ctx context.Context) (map[string]stack.LayerSize, error)
}

const (
	prepareTime = 10 * time.Second // for the whole preparation
	drainTime   = 10 * time.Second // for writes in progress to end
	sealTime    = 6 * time.Second  // for a member to seal: its process may restart meanwhile
	suspectTime = 4 * time.Second  // after a longer wait for a member the cut suspects the member
	// aloneTime is for each step of a single member, which is cut beside its writes: a slow disk delays no write, and
	// the volume has no other member to continue with.
	aloneTime = time.Minute
)

// Cut is a cut in progress.
type Cut struct {
	e      *Engine
	s      stack.Snapshot
	list   []Named
	who    set
	layers []string // by member
	held   bool
	single bool // the member is cut beside its writes
	begun  bool // some member may have sealed
	ended  bool
	out    bool // released; loop thread
}

// errCutting ends a rebuild for the moment.
var errCutting = api.Errorf(api.Busy, "the engine took a snapshot: the rebuild starts again and keeps copied data")

var errNoRoom = api.Errorf(api.Full, "writes wait for room on the disks: make room, the snapshot follows")

// PrepareCut begins a cut. No other cut begins before the end of Commit or Abort.
func (e *Engine) PrepareCut(ctx context.Context, s stack.Snapshot) (*Cut, error) {
	return prepareCut(ctx, e, s, prepareTime)
}

func prepareCut(ctx context.Context, e *Engine, s stack.Snapshot, within time.Duration) (*Cut, error) {
	c := &Cut{e: e, s: s}
	for {
		var refused error
		wait := false
		if err := e.runOnLoop(ctx, func() {
			switch {
			case e.closing || e.fenced != nil:
				refused = api.Errorf(api.Unavailable, "the engine is ending")
			case e.cutting:
				refused = api.Errorf(api.Busy, "the engine is taking another snapshot; try again")
			case e.joining != 0:
				wait = true
			default:
				e.cutting = true
				e.removeJoiners(e.joiners, errCutting)
				c.list, c.who = e.cfg.Members, e.members&^e.suspect
			}
		}); err != nil {
			return nil, err
		}
		if refused != nil {
			return nil, refused
		}
		if !wait {
			break
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return nil, api.Errorf(api.Busy, "the join of a replica has not ended: %w", err)
		}
	}
	c.layers = make([]string, len(c.list))
	began := time.Now()
	pctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	errs := c.forEachMember(c.who, func(m int, x Cutter) error { return c.prepareMember(pctx, m, x) })
	var all []error
	for m, err := range errs {
		if err == nil {
			continue
		}
		all = append(all, fmt.Errorf("replica %s: %w", c.list[m].Name, err))
		if errors.Is(err, stack.ErrFailed) || api.Is(err, api.Unavailable) && time.Since(began) > suspectTime {
			e.Suspect(c.list[m].Name, err)
		}
	}
	if len(all) > 0 {
		c.Abort()
		return nil, errors.Join(all...)
	}
	return c, nil
}

func (c *Cut) prepareMember(ctx context.Context, m int, x Cutter) error {
	s := c.s
	s.Layer = string(api.NewUID()) // each replica has a layer of its own: a uid names the same content for ever
	c.layers[m] = s.Layer
	return x.PrepareCut(ctx, s)
}

// forEachMember calls fn for members, all at once.
func (c *Cut) forEachMember(who set, fn func(m int, x Cutter) error) []error {
	errs := make([]error, len(c.list))
	done := make(chan struct{})
	n := 0
	for m := range c.list {
		if !who.has(m) {
			continue
		}
		x, ok := c.list[m].Member.(Cutter)
		if !ok {
			errs[m] = api.Errorf(api.Unsupported, "the member does not support cuts")
			continue
		}
		n++
		go func() { // answers in bounded time; waited for below
			errs[m] = fn(m, x)
			done <- struct{}{}
		}()
	}
	for range n {
		<-done
	}
	return errs
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// underWay marks the error of a wait for I/O in progress that exceeded its time.
func underWay(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return api.Errorf(api.Busy, "%w: %w", stack.ErrUnderWay, err)
}

// AwaitOperations returns when all operations now in progress have ended. A cut calls AwaitOperations first, so that a
// slow disk ends its I/O before the cut holds writes. Cut holds no writes of a single member, so AwaitOperations
// returns at once.
func (e *Engine) AwaitOperations(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	settled, alone := make(chan struct{}), false
	if err := e.runOnLoop(ctx, func() {
		if alone = hasSingleMember(e); !alone {
			e.gens.callAfterOperations(func() { close(settled) })
		}
	}); err != nil || alone {
		return err
	}
	for {
		full := false
		if err := e.runOnLoop(ctx, func() { full = len(e.room.held) > 0 }); err != nil {
			return underWay(ctx, err)
		}
		select {
		case <-settled:
			return nil
		default:
		}
		if full {
			return errNoRoom
		}
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return underWay(ctx, err)
		}
	}
}

// hasSingleMember reports whether the volume has one member and no other replica gets writes. Loop thread.
func hasSingleMember(e *Engine) bool {
	return e.members.len() == 1 && e.suspect|e.lost|e.weak|e.joiners|e.joining == 0 && !e.dropping
}

// Hold holds new writes, and returns when no write is in progress: every member holds the same.
func (c *Cut) Hold(ctx context.Context) error {
	e := c.e
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	settled := make(chan struct{})
	var refused error
	if err := e.runOnLoop(ctx, func() {
		if e.closing || e.fenced != nil {
			refused = api.Errorf(api.Unavailable, "the engine is ending")
			return
		}
		e.gate.closed = true
		e.gens.callAfterOperations(func() { close(settled) })
	}); err != nil || refused != nil {
		return errors.Join(err, refused)
	}
	c.held = true
	for {
		var full, steady bool
		var now set
		if err := e.runOnLoop(ctx, func() {
			full = len(e.room.held) > 0
			steady = e.suspect|e.lost|e.weak|e.joiners|e.joining == 0 && !e.dropping
			now = e.members
			refused = e.fenced
		}); err != nil {
			return underWay(ctx, err)
		}
		select {
		case <-settled:
			if refused == nil && steady {
				if now&^c.who != 0 {
					return api.Errorf(api.Busy, "another replica joined during the cut; try again")
				}
				c.who = now
				return nil
			}
		default:
		}
		switch {
		case refused != nil:
			return refused
		case full:
			return errNoRoom
		}
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return underWay(ctx, err)
		}
	}
}

// Commit has every member seal, and drops members that do not. Commit returns when the snapshot exists, or surely does
// not. Writes stay held until Release.
func (c *Cut) Commit(ctx context.Context) error {
	e := c.e
	if !c.held && !c.single || c.ended {
		return api.Errorf(api.Invalid, "the cut is not at its instant")
	}
	c.begun = true
	began := time.Now()
	within := sealTime
	if c.single {
		within = aloneTime
	}
	errs := c.forEachMember(c.who, func(m int, x Cutter) error { return c.sealMember(ctx, m, x, began, within) })
	var done set
	var all []error
	for m := range c.list {
		switch {
		case !c.who.has(m):
		case errs[m] == nil:
			done |= bit(m)
		default:
			all = append(all, fmt.Errorf("replica %s: %w", c.list[m].Name, errs[m]))
		}
	}
	if done == 0 {
		c.Abort()
		return errors.Join(all...)
	}
	var fenced error
	left := c.who
	for c.who != done {
		if err := e.runOnLoop(e.ctx, func() {
			for m := range c.list {
				if (c.who &^ done).has(m) && e.members.has(m) {
					e.proposeDrop(m, errs[m])
				}
			}
			if fenced = e.fenced; e.suspect|e.weak|e.lost == 0 && !e.dropping {
				left = e.members
			}
		}); err != nil {
			return err
		}
		switch c.who = left; {
		case fenced != nil:
			return fenced
		case c.who&done == 0: // the members with the snapshot are gone, too
			c.Abort()
			return errors.Join(all...)
		}
		if c.who&^done == 0 {
			break
		}
		if err := pause(e.ctx, 5*time.Millisecond); err != nil {
			return api.Errorf(api.Unavailable, "the engine is ending: %w", err)
		}
	}
	c.ended = true
	return nil
}

// sealMember has one member commit. If the member's session broke, the prepared cut is gone: the engine wrote nothing
// since, so sealMember prepares again, until sealTime has passed.
func (c *Cut) sealMember(ctx context.Context, m int, x Cutter, began time.Time, within time.Duration) error {
	ctx, cancel := context.WithDeadline(ctx, began.Add(within))
	defer cancel()
	for {
		err := x.DoCut(ctx, c.layers[m])
		if err == nil || api.Is(err, api.Denied) || errors.Is(err, stack.ErrRestarted) || errors.Is(err, stack.ErrFailed) {
			return err
		}
		if has, serr := c.hasCut(ctx, x); serr == nil && has {
			return nil // and the answer was lost
		}
		if time.Since(began) > sealTime || pause(ctx, 20*time.Millisecond) != nil {
			return err
		}
		if perr := c.prepareMember(ctx, m, x); perr != nil && ctx.Err() != nil {
			return err
		}
	}
}

// hasCut reports whether a member has exactly this cut.
func (c *Cut) hasCut(ctx context.Context, x Cutter) (bool, error) {
	m, err := x.State(ctx)
	return slices.ContainsFunc(m.Snapshots, c.s.Same), err
}

// Abort undoes an uncommitted cut on every member, and lets writes continue.
func (c *Cut) Abort() {
	e := c.e
	if c.ended {
		c.Release()
		return
	}
	c.ended = true
	if c.begun {
		c.undo()
	} else {
		c.LetGo()
		ctx, cancel := context.WithTimeout(e.ctx, prepareTime)
		c.forEachMember(c.who, func(_ int, x Cutter) error { return x.AbortCut(ctx) }) // else the next session does so
		cancel()
	}
	c.Release()
}

// undo has every member answer that the member has nothing of the cut, and drops the others if a member did answer. If
// no member left takes writes any more, undo ends: no write can follow.
func (c *Cut) undo() {
	e := c.e
	var clean, failed set
	for {
		var now set
		over := false
		if e.runOnLoop(e.ctx, func() {
			now, over = e.members, e.fenced != nil || e.closing
			settled := now&^clean == 0 || now&^failed == 0
			over = over || settled && e.suspect|e.weak|e.lost == 0 && !e.dropping
		}) != nil || over {
			return
		}
		ctx, cancel := context.WithTimeout(e.ctx, sealTime)
		errs := c.forEachMember(now&^clean, func(_ int, x Cutter) error {
			if err := x.AbortCut(ctx); err != nil {
				return err
			}
			has, err := c.hasCut(ctx, x)
			if err == nil && has {
				err = x.Forget(ctx, c.s.UID)
			}
			return err
		})
		cancel()
		for m, err := range errs {
			switch {
			case err == nil && now.has(m):
				clean |= bit(m)
			case errors.Is(err, stack.ErrFailed):
				failed |= bit(m)
			}
		}
		for m, err := range errs {
			if err != nil && clean != 0 {
				e.Suspect(c.list[m].Name, err)
			}
		}
		if pause(e.ctx, 20*time.Millisecond) != nil {
			return
		}
	}
}

// LetGo lets writes continue before the abort of a cut that no member was asked to seal.
func (c *Cut) LetGo() {
	e := c.e
	e.cfg.Loop.Post(func() {
		if !c.out {
			e.gate.openGate(nil)
		}
	})
}

// Release lets writes continue, and other cuts and swaps begin. A repeated call does nothing.
func (c *Cut) Release() {
	e := c.e
	e.cfg.Loop.Post(func() {
		if c.out {
			return
		}
		c.out = true
		e.cutting = false
		e.gate.openGate(nil)
		e.nextDrop() // the swap of a joiner may wait
	})
}

// Cut takes a snapshot of all members. A single member is cut beside its writes: no other member has to hold the same.
func (e *Engine) Cut(ctx context.Context, s stack.Snapshot) error {
	if err := e.AwaitOperations(ctx); err != nil {
		return err
	}
	within := prepareTime
	if err := e.runOnLoop(ctx, func() {
		if hasSingleMember(e) {
			within = aloneTime
		}
	}); err != nil {
		return err
	}
	c, err := prepareCut(ctx, e, s, within)
	if err != nil {
		return err
	}
	// no other replica becomes a member meanwhile: PrepareCut prevents that
	if err = e.runOnLoop(ctx, func() { c.single = hasSingleMember(e) && c.who == e.members }); err == nil && !c.single {
		err = c.Hold(ctx)
	}
	if err != nil {
		c.Abort()
		return err
	}
	err = c.Commit(ctx)
	c.Release()
	return err
}
