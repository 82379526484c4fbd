package engine

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// A member whose layers are damaged stays one: reads of what is damaged are answered by another. It is repaired under
// the guest, chunk by chunk, with what the others show, and each chunk is compared with its digest before it is
// written.

// Mender is a member that can be repaired.
type Mender interface {
	Cutter
	// Broken are the damaged chunks of its layers that others may be asked for.
	Broken(ctx context.Context) ([]stack.Broken, error)
	// Repair puts one right with what another member shows there. Of kind corrupt: that one does not show what it held.
	// Nil instead of bytes: nobody does.
	Repair(ctx context.Context, layer string, off int64, right []byte) error
}

// Repaired is what came of a Repair.
type Repaired struct {
	Chunks int   // that are right now
	Bytes  int64 // of them
	Lost   int   // chunks of which no other member shows what they held
	Why    error // of the last of those
}

// Repair repairs a member from the others. After an error it can be called again: what is right stays so.
func (e *Engine) Repair(ctx context.Context, member string, bytesPerSecond int64) (did Repaired, err error) {
	return (&repairRun{e: e, member: member}).run(ctx, bytesPerSecond)
}

// RepairFrom repairs the members from a replica that cannot be made a member because they are damaged: it is in the
// engine's session. What else it holds may be old, but a digest tells what a layer held.
func (e *Engine) RepairFrom(ctx context.Context, n Named, bytesPerSecond int64) (did Repaired, err error) {
	_, names, err := e.Epoch(ctx)
	for _, name := range names {
		if name == n.Name || err != nil {
			continue
		}
		var one Repaired
		one, err = (&repairRun{e: e, member: name, beside: &n}).run(ctx, bytesPerSecond)
		did = Repaired{did.Chunks + one.Chunks, did.Bytes + one.Bytes, did.Lost + one.Lost, cmp.Or(one.Why, did.Why)}
	}
	return did, err
}

// repairRun repairs one member.
type repairRun struct {
	e      *Engine
	member string
	beside *Named // a replica that is no member, and shows what it holds; nil: there is none
	used   map[Cutter]bool
}

// run repairs the member. A replica beside the members may not be the last one to ask: nothing is given up then.
func (r *repairRun) run(ctx context.Context, bytesPerSecond int64) (did Repaired, err error) {
	e, beside := r.e, r.beside
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	c := copier{e: e, polite: true, o: JoinOptions{BytesPerSecond: bytesPerSecond}, began: time.Now()}
	r.used = map[Cutter]bool{}
	defer func() {
		for x := range r.used {
			_ = x.SnapEnd(ctx) // else with the session
		}
	}()
	for {
		hurt, _, err := r.menders(ctx)
		if err != nil {
			return did, err
		}
		list, err := hurt.Broken(ctx)
		if beside != nil && did.Lost > 0 {
			return did, err // they would be told of again
		}
		if err == nil && len(list) == 0 && did.Lost == 0 {
			err = e.on(ctx, r.unhurt)
		}
		if err != nil || len(list) == 0 {
			return did, err
		}
		for _, b := range list {
			began := time.Now()
			// Asked anew for each: others may have been dropped, and their content is old then.
			hurt, others, err := r.menders(ctx)
			if err != nil {
				return did, err
			}
			why, err := r.one(ctx, hurt, others, b)
			if why != nil && err == nil && beside == nil {
				err = hurt.Repair(ctx, b.Layer, b.Off, nil)
			}
			switch {
			case err != nil:
				return did, err
			case why != nil:
				did.Lost, did.Why = did.Lost+1, why
			default:
				did.Chunks, did.Bytes = did.Chunks+1, did.Bytes+b.Len
			}
			c.did += b.Len
			if err := c.rest(ctx, time.Since(began)); err != nil {
				return did, err
			}
		}
	}
}

// unhurt forgets that the member was damaged. Loop thread.
func (r *repairRun) unhurt() {
	for i, m := range r.e.cfg.Members {
		if m.Name == r.member {
			r.e.hurt &^= bit(i)
		}
	}
}

// menders are a member that is to be repaired, and those that serve beside it.
func (r *repairRun) menders(ctx context.Context) (hurt Mender, others []Named, err error) {
	e, member := r.e, r.member
	if r.beside != nil {
		others = append(others, *r.beside)
	}
	err = e.on(ctx, func() {
		for i, m := range e.cfg.Members {
			if !(e.members &^ e.suspect &^ e.weak &^ e.lost).has(i) {
				continue
			}
			if m.Name == member {
				hurt, _ = m.Member.(Mender)
			} else {
				others = append(others, m)
			}
		}
	})
	switch {
	case err != nil:
	case hurt == nil:
		err = api.Errorf(api.Unavailable, "replica %s is no member that can be repaired now", member)
	case len(others) == 0:
		err = api.Errorf(api.Unavailable, "there is no other member to repair replica %s from", member)
	}
	return hurt, others, err
}

// one asks one member after another; why: none of them shows what the chunk held.
func (r *repairRun) one(ctx context.Context, hurt Mender, others []Named, b stack.Broken) (why, err error) {
	away := error(nil)
	for _, m := range others {
		x, ok := m.Member.(Cutter)
		if !ok {
			continue
		}
		r.used[x] = true
		right := aligned(int(b.Len)) // its own: a disk that hangs may still read into it
		if err := showing(ctx, r.e.cfg.Loop, x, b, right); err != nil {
			if api.Is(err, api.Corrupt) || api.Is(err, api.Invalid) {
				why = fmt.Errorf("replica %s: %w", m.Name, err)
			} else { // not reached, or the snapshot was deleted meanwhile: it is looked at again
				away = fmt.Errorf("replica %s: %w", m.Name, err)
			}
			continue
		}
		switch err := hurt.Repair(ctx, b.Layer, b.Off, right); {
		case err == nil || api.Is(err, api.NotFound): // or its layer was merged, or dropped
			return nil, nil
		case !api.Is(err, api.Corrupt):
			return nil, err
		default:
			why = fmt.Errorf("beside replica %s: %w", m.Name, err)
		}
	}
	switch {
	case away != nil: // it may have it
		return nil, away
	case why == nil:
		return nil, api.Errorf(api.Unsupported, "no other member can be asked")
	}
	return why, nil
}

// showing reads what a member shows of a chunk: in a snapshot, or now.
func showing(ctx context.Context, loop Loop, x Cutter, b stack.Broken, to []byte) error {
	for at := int64(0); at < b.Len; at += comparePiece {
		part := to[at:min(b.Len, at+comparePiece)]
		var err error
		if b.Snap != "" {
			err = x.SnapRead(ctx, b.Snap, b.Off+at, part)
		} else {
			err = do(ctx, loop, x, &block.Request{Op: block.OpRead, Off: b.Off + at, Len: int64(len(part)), Buf: part})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// isDamage reports whether a member could not read what its own disk has, and nothing else is wrong with it.
func isDamage(err error) bool { return api.Is(err, api.Corrupt) }
