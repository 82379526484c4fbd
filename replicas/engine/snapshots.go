package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Snapshots returns the snapshots that every member has, as one member tells them. The error is of kind busy during a
// cut, and while the engine has not dropped a member that was missing when the engine opened: the engine did not
// compare the missing member's snapshots with the others'.
func (e *Engine) Snapshots(ctx context.Context) (stack.Meta, error) {
	m, cutting, err := e.selectMember(ctx)
	if err != nil {
		return stack.Meta{}, err
	}
	if cutting {
		return stack.Meta{}, api.Errorf(api.Busy, "the engine is taking a snapshot; try again")
	}
	var missing []string
	if err := e.runOnLoop(ctx, func() { missing = e.memberNames(e.missing) }); err != nil {
		return stack.Meta{}, err
	}
	if len(missing) > 0 {
		return stack.Meta{}, api.Errorf(api.Busy, "the engine did not reach replica %s, and must drop the replica first",
			missing[0])
	}
	st, err := m.State(ctx)
	if err != nil {
		return st, err
	}
	if _, cutting, err = e.selectMember(ctx); err == nil && cutting {
		err = api.Errorf(api.Busy, "the engine is taking a snapshot; try again")
	}
	return st, err
}

// selectMember returns a member that can tell for all members.
func (e *Engine) selectMember(ctx context.Context) (x Cutter, cutting bool, err error) {
	err = e.runOnLoop(ctx, func() {
		cutting = e.cutting
		m := e.selectReader(e.hurt)
		if m < 0 {
			m = e.selectReader(0)
		}
		if m >= 0 {
			x, _ = e.cfg.Members[m].Member.(Cutter)
		}
	})
	if err == nil && x == nil {
		err = api.Errorf(api.Unavailable, "the engine has no member to ask now")
	}
	return x, cutting, err
}

// Sizes returns the sizes of the snapshots' layers on one of the members.
func (e *Engine) Sizes(ctx context.Context) (map[string]stack.LayerSize, error) {
	m, _, err := e.selectMember(ctx)
	if err != nil {
		return nil, err
	}
	return m.Sizes(ctx)
}

// DropSnapshot removes a snapshot from every member. After an error some members may have the snapshot; the next engine
// removes it, or a repeated call. The error is of kind busy while the drop of a member is not decided.
func (e *Engine) DropSnapshot(ctx context.Context, uid string) error {
	return e.onEachMember(ctx, true, func(ctx context.Context, x Cutter) error { return x.Forget(ctx, uid) })
}

// SealAll cuts the heads of the members, each at its own time: for layers without a name.
func (e *Engine) SealAll(ctx context.Context) error {
	return e.onEachMember(ctx, false, func(ctx context.Context, x Cutter) error {
		return x.Seal(ctx, stack.Snapshot{Layer: string(api.NewUID()), Created: time.Now().UTC()})
	})
}

// onEachMember calls fn for all members, and for joiners, too. No cut and no swap of a joiner begins meanwhile: the
// engine gives the join up if fn fails for the joiner.
func (e *Engine) onEachMember(ctx context.Context, joiners bool, fn func(context.Context, Cutter) error) error {
	var refused error
	c := &Cut{e: e}
	var coming set
	if err := e.runOnLoop(ctx, func() {
		switch {
		case e.closing || e.fenced != nil:
			refused = api.Errorf(api.Unavailable, "the engine is ending")
		case e.cutting:
			refused = api.Errorf(api.Busy, "the engine is taking a snapshot; try again")
		case joiners && e.members&e.suspect != 0: // a suspect may serve again: to vouch when the others have failed
			refused = api.Errorf(api.Busy, "replica %s does not answer, and is a member until it was dropped: try again",
				e.cfg.Members[(e.members&e.suspect).first()].Name)
		default:
			e.cutting = true
			c.list, c.who = e.cfg.Members, (e.members|e.joining)&^e.suspect
			if joiners {
				coming = e.joiners
			}
		}
	}); err != nil || refused != nil {
		return errors.Join(err, refused)
	}
	defer c.Release()
	ctx, cancel := context.WithTimeout(ctx, prepareTime)
	defer cancel()
	errs := c.forEachMember(c.who|coming, func(_ int, x Cutter) error { return fn(ctx, x) })
	var all []error
	for m, err := range errs {
		if why := err; why != nil && coming.has(m) {
			// Not with ctx, whose time may be over: a joiner that is not removed becomes a member.
			err = e.runOnLoop(e.ctx, func() { e.removeJoiners(bit(m), why) })
		}
		if err != nil {
			all = append(all, fmt.Errorf("replica %s: %w", c.list[m].Name, err))
		}
	}
	return errors.Join(all...)
}
