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

// A member with damaged layers stays a member: another member answers reads of the damaged data. The engine repairs the
// member under the guest, chunk by chunk, with the content of the other members, and compares each chunk with its
// digest before the write.

// Repairer is a member that supports repair.
type Repairer interface {
	Cutter
	// Broken lists the damaged chunks of the member's layers that other members may show.
	Broken(ctx context.Context) ([]stack.Broken, error)
	// Repair repairs a chunk with the content of another member. An error of kind corrupt: the content does not match
	// the digest. Nil instead of content: no member shows the content.
	Repair(ctx context.Context, layer string, off int64, right []byte) error
}

// Repaired is the outcome of a Repair.
type Repaired struct {
	Chunks int   // repaired chunks
	Bytes  int64 // in repaired chunks
	Lost   int   // chunks whose content no other member shows
	Why    error // cause of the last lost chunk
}

// Repair repairs a member from the others. After an error the caller may repeat Repair, which keeps repaired chunks.
func (e *Engine) Repair(ctx context.Context, member string, bytesPerSecond int64) (did Repaired, err error) {
	return (&repairRun{e: e, member: member}).repairMember(ctx, bytesPerSecond)
}

// RepairFrom repairs the members from a replica that cannot join because the members are damaged, and has a session of
// the engine. Other data of the replica may be old, but a digest decides about each layer.
func (e *Engine) RepairFrom(ctx context.Context, n Named, bytesPerSecond int64) (did Repaired, err error) {
	_, names, err := e.Epoch(ctx)
	for _, name := range names {
		if name == n.Name || err != nil {
			continue
		}
		var one Repaired
		one, err = (&repairRun{e: e, member: name, beside: &n}).repairMember(ctx, bytesPerSecond)
		did = Repaired{did.Chunks + one.Chunks, did.Bytes + one.Bytes, did.Lost + one.Lost, cmp.Or(one.Why, did.Why)}
	}
	return did, err
}

// repairRun is one repair of a member.
type repairRun struct {
	e      *Engine
	member string
	beside *Named // a replica that is no member, and shows its content; nil: none
	used   map[Cutter]bool
}

// repairMember repairs the member. With a replica beside the members repairMember gives no chunk up: other replicas may
// return later.
func (r *repairRun) repairMember(ctx context.Context, bytesPerSecond int64) (did Repaired, err error) {
	e, beside := r.e, r.beside
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	c := copier{e: e, polite: true, o: JoinOptions{BytesPerSecond: bytesPerSecond}, began: time.Now()}
	r.used = map[Cutter]bool{}
	defer func() {
		for x := range r.used {
			_ = endSnapshot(ctx, x) // else with the session
		}
	}()
	for {
		hurt, _, err := r.findRepairers(ctx)
		if err != nil {
			return did, err
		}
		list, err := hurt.Broken(ctx)
		if beside != nil && did.Lost > 0 {
			return did, err // the same chunks would come again
		}
		if err == nil && len(list) == 0 && did.Lost == 0 {
			err = e.runOnLoop(ctx, r.noteUndamaged)
		}
		if err != nil || len(list) == 0 {
			return did, err
		}
		for _, b := range list {
			began := time.Now()
			// Asked again for each chunk: other members may have been dropped, and hold old content.
			hurt, others, err := r.findRepairers(ctx)
			if err != nil {
				return did, err
			}
			why, err := r.repairChunk(ctx, hurt, others, b)
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
			if err := c.yieldToGuest(ctx, time.Since(began)); err != nil {
				return did, err
			}
		}
	}
}

// noteUndamaged notes that the member has no damage. Loop thread.
func (r *repairRun) noteUndamaged() {
	for i, m := range r.e.cfg.Members {
		if m.Name == r.member {
			r.e.hurt &^= bit(i)
		}
	}
}

// findRepairers returns the member to repair, and the other serving members.
func (r *repairRun) findRepairers(ctx context.Context) (hurt Repairer, others []Named, err error) {
	e, member := r.e, r.member
	if r.beside != nil {
		others = append(others, *r.beside)
	}
	err = e.runOnLoop(ctx, func() {
		for i, m := range e.cfg.Members {
			if !(e.members &^ e.suspect &^ e.weak &^ e.lost).has(i) {
				continue
			}
			if m.Name == member {
				hurt, _ = m.Member.(Repairer)
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
		err = api.Errorf(api.Unavailable, "replica %s cannot be repaired: the volume has no other member", member)
	}
	return hurt, others, err
}

// repairChunk asks one member after another; why: no member shows the chunk's content.
func (r *repairRun) repairChunk(ctx context.Context, hurt Repairer, others []Named, b stack.Broken) (why, err error) {
	away := error(nil)
	for _, m := range others {
		x, ok := m.Member.(Cutter)
		if !ok {
			continue
		}
		r.used[x] = true
		right := block.AlignedBuffer(int(b.Len)) // not shared: a hanging disk may still read into the buffer
		if err := readChunk(ctx, r.e.cfg.Loop, x, b, right); err != nil {
			if api.Is(err, api.Corrupt) || api.Is(err, api.Invalid) {
				why = fmt.Errorf("replica %s: %w", m.Name, err)
			} else { // unreachable, or the snapshot was deleted: the caller tries again
				away = fmt.Errorf("replica %s: %w", m.Name, err)
			}
			continue
		}
		switch err := hurt.Repair(ctx, b.Layer, b.Off, right); {
		case err == nil || api.Is(err, api.NotFound): // or the layer was merged, or deleted
			return nil, nil
		case !api.Is(err, api.Corrupt):
			return nil, err
		default:
			why = fmt.Errorf("beside replica %s: %w", m.Name, err)
		}
	}
	switch {
	case away != nil: // the unreachable member may have the content
		return nil, away
	case why == nil:
		return nil, api.Errorf(api.Unsupported, "the volume has no other member to ask")
	}
	return why, nil
}

// readChunk reads a member's content of a chunk: in a snapshot, or now.
func readChunk(ctx context.Context, loop Loop, x Cutter, b stack.Broken, to []byte) error {
	for at := int64(0); at < b.Len; at += comparePiece {
		part := to[at:min(b.Len, at+comparePiece)]
		var err error
		if b.Snap != "" {
			err = x.SnapRead(ctx, b.Snap, b.Off+at, part)
		} else {
			err = submitAndWait(ctx, loop, x,
				&block.Request{Op: block.OpRead, Off: b.Off + at, Len: int64(len(part)), Buf: part})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// isDamage reports whether a member could not read data of its own disk, without any other failure.
func isDamage(err error) bool { return api.Is(err, api.Corrupt) }
