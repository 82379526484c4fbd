package engine

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// A write that failed, because no replica was reached for longer than the user wants to wait, may be on some members
// and not on others. Once they serve again they are made equal there: what the guest was told has failed may be there
// or not, but it is the same whoever is read.

// alikePiece is what failed writes are counted in, and mostAlike how many pieces are remembered.
const (
	alikePiece = 256 << 10
	mostAlike  = 64 << 10
)

// spoil takes note of an operation that failed. Loop thread.
func (e *Engine) spoil(o *op) {
	if o.parent.Op == block.OpFlush || len(e.spoilt) >= mostAlike {
		e.spoiled = true
		return
	}
	for k := o.lo / alikePiece; k <= (o.hi-1)/alikePiece; k++ {
		e.spoilt[k] = true
	}
}

// alikeSoon has the members made equal where writes failed. Loop thread.
func (e *Engine) alikeSoon() {
	if len(e.spoilt) == 0 {
		return
	}
	select {
	case e.alike <- struct{}{}:
	default: // it is going to be done anyway
	}
}

// makeAlike makes the members equal where writes failed. What fails is tried again with the next change of the members,
// or by the clock.
func (e *Engine) makeAlike(ctx context.Context) {
	buf := aligned(alikePiece)
	for {
		piece := int64(-1)
		var size int64
		if e.on(ctx, func() {
			size = e.size
			if e.suspect|e.lost|e.weak|e.joining != 0 || e.dropping || e.refusing || e.closing || e.fenced != nil {
				return
			}
			if (e.members | e.joiners).len() == 1 { // who comes back is told by the intents
				clear(e.spoilt)
				return
			}
			for k := range e.spoilt {
				piece = k
				break
			}
		}) != nil || piece < 0 {
			return
		}
		p := span{piece * alikePiece, min(alikePiece, size-piece*alikePiece)}
		if err := e.alikeOne(ctx, p, buf); err != nil {
			return
		}
	}
}

func (e *Engine) alikeOne(ctx context.Context, p span, buf []byte) error {
	release, err := e.lock(ctx, p.off, p.n)
	if err != nil {
		return err
	}
	defer release()
	var epoch int64
	var who set
	var from int
	var list []Named
	calm := func() bool { return e.suspect|e.lost|e.weak|e.joining == 0 && !e.dropping && !e.refusing }
	ok := false
	if err := e.on(ctx, func() {
		// Replicas on their way are members soon, and may have been compared there already.
		epoch, who, from, list, ok = e.epoch, e.members|e.joiners, e.reader(e.hurt), e.cfg.Members, calm()
		if from < 0 {
			from = e.reader(0)
		}
	}); err != nil || !ok || from < 0 {
		return orChanged(err)
	}
	buf = buf[:p.n]
	src := list[from].Member
	if err := do(ctx, e.cfg.Loop, src, &block.Request{Op: block.OpRead, Off: p.off, Len: p.n, Buf: buf}); err != nil {
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
		if err := do(ctx, e.cfg.Loop, m.Member, w); err != nil {
			e.Suspect(m.Name, err)
			_ = e.on(ctx, func() {
				if e.joiners.has(i) && e.cfg.Members[i].Member == m.Member {
					e.unjoin(bit(i), err)
				}
			})
			return err
		}
	}
	if err := e.on(ctx, func() {
		if ok = epoch == e.epoch && who == e.members|e.joiners && calm(); ok {
			delete(e.spoilt, p.off/alikePiece)
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
