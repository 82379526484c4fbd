package engine

import (
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// A write that failed, because no replica was reached for longer than the user allows, may be on some members and not
// on others. When the members serve again, the engine resyncs them there: a failed write may survive or not, but every
// reader sees the same.

// unequalPiece is the unit in which failed writes are counted, and mostUnequal the number of pieces that the engine
// remembers.
const (
	unequalPiece = 256 << 10
	mostUnequal  = 64 << 10
)

// unequal has the pieces with failed writes: members may differ there until the resync.
type unequal struct {
	e    *Engine
	wake chan struct{} // the cleaner's goroutine is to resync
	// Loop thread from here on.
	pieces map[int64]bool
	// unknown: a flush failed, or too many writes to count. Until the next attach members may differ anywhere.
	unknown bool
}

// noteFailed notes an operation that failed. Loop thread.
func (u *unequal) noteFailed(o *op) {
	if o.parent.Op == block.OpFlush || len(u.pieces) >= mostUnequal {
		u.unknown = true
		return
	}
	for k := o.lo / unequalPiece; k <= (o.hi-1)/unequalPiece; k++ {
		u.pieces[k] = true
	}
}

// membersEqual reports whether the members are equal except for writes in progress. Loop thread.
func (u *unequal) membersEqual() bool { return !u.unknown && len(u.pieces) == 0 }

// requestResync has the members resynced where writes failed. Loop thread.
func (u *unequal) requestResync() {
	if len(u.pieces) == 0 {
		return
	}
	select {
	case u.wake <- struct{}{}:
	default: // a wake-up is pending
	}
}

// resyncPieces resyncs the members in the pieces with failed writes. After an error the next change of the members, or
// the clock, starts the next try. Pieces that no member has fetched wait, while the engine resyncs the others.
func (u *unequal) resyncPieces(ctx context.Context) {
	e := u.e
	buf := block.AlignedBuffer(unequalPiece)
	unfetched := map[int64]bool{}
	for {
		piece := int64(-1)
		var size int64
		if e.runOnLoop(ctx, func() {
			size = e.size
			if e.suspect|e.lost|e.weak|e.joining != 0 || e.dropping || e.refusing || e.closing || e.fenced != nil {
				return
			}
			if (e.members | e.joiners).len() == 1 { // a returning replica has intents there
				clear(u.pieces)
				return
			}
			for k := range u.pieces {
				if !unfetched[k] {
					piece = k
					break
				}
			}
		}) != nil || piece < 0 {
			return
		}
		p := span{piece * unequalPiece, min(unequalPiece, size-piece*unequalPiece)}
		switch err := u.resyncPiece(ctx, p, buf); {
		case errors.Is(err, stack.ErrNotFetched):
			unfetched[piece] = true
		case err != nil:
			return
		}
	}
}

func (u *unequal) resyncPiece(ctx context.Context, p span, buf []byte) error {
	e := u.e
	release, err := e.lockRange(ctx, p.off, p.n)
	if err != nil {
		return err
	}
	defer release()
	var epoch int64
	var who set
	var sources []int
	var list []Named
	calm := func() bool { return e.suspect|e.lost|e.weak|e.joining == 0 && !e.dropping && !e.refusing }
	ok := false
	if err := e.runOnLoop(ctx, func() {
		// Joiners are members soon, and may have been compared there already.
		epoch, who, list, ok = e.epoch, e.members|e.joiners, e.cfg.Members, calm()
		asked := set(0)
		for _, not := range []set{e.hurt, 0} { // damaged members last
			for m := e.selectReader(not | asked); m >= 0; m = e.selectReader(not | asked) {
				sources, asked = append(sources, m), asked|bit(m)
			}
		}
	}); err != nil || !ok || len(sources) == 0 {
		return orChanged(err)
	}
	buf = buf[:p.n]
	var from int
	for _, from = range sources {
		r := &block.Request{Op: block.OpRead, Off: p.off, Len: p.n, Buf: buf}
		if err = submitAndWait(ctx, e.cfg.Loop, list[from].Member, r); !errors.Is(err, stack.ErrNotFetched) {
			break
		}
	}
	if err != nil {
		return err
	}
	for i, m := range list {
		if i == from || !who.has(i) {
			continue
		}
		w := &block.Request{Op: block.OpWrite, Off: p.off, Len: p.n, Buf: buf}
		if isZero(buf) {
			w = &block.Request{Op: block.OpZero, Off: p.off, Len: p.n}
		}
		if err := submitAndWait(ctx, e.cfg.Loop, m.Member, w); err != nil {
			e.Suspect(m.Name, err)
			_ = e.runOnLoop(ctx, func() {
				if e.joiners.has(i) && e.cfg.Members[i].Member == m.Member {
					e.removeJoiners(bit(i), err)
				}
			})
			return err
		}
	}
	if err := e.runOnLoop(ctx, func() {
		if ok = epoch == e.epoch && who == e.members|e.joiners && calm(); ok {
			delete(u.pieces, p.off/unequalPiece)
		}
	}); err != nil || !ok {
		return orChanged(err)
	}
	return nil
}

func orChanged(err error) error {
	if err == nil {
		err = api.Errorf(api.Unavailable, "the members change")
	}
	return err
}
