package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// A replica may name layers that are not on its disk yet, while another disk of the machine has them: a uid means one
// content, so reads go there, and come home (Replica.Home) once the layer is finished here. Nothing of that is
// recorded: who opens the replica looks anew. Should the other disk fail meanwhile, reads of the borrowed layer wait
// for the own copy; whole-block writes, which need nothing of it, go on.

// Borrow lets layers that are not on the disk be read from the machine's other disks. Before anybody uses the disk.
func (d *Disk) Borrow(others func() []*Disk) { d.others = others }

// findLayer opens a layer here, else where it is finished.
func (d *Disk) findLayer(uid string, flag int, owner bool) (*layer, error) {
	l, err := d.openLayerAs(uid, flag, owner)
	if !api.Is(err, api.NotFound) {
		return l, err
	}
	for _, o := range d.rest() {
		l, oerr := o.openLayer(uid, flag&o.direct)
		if oerr != nil {
			continue
		}
		// Which blocks the layer holds must be known when that disk fails.
		switch m := l.m.(type) {
		case *layerMap:
			oerr = m.keep()
		case *frozenMap:
			var x *index
			if x, oerr = indexOf(m); oerr == nil {
				l.m = &knownMap{m.size, x}
			}
		}
		if oerr != nil {
			_ = l.close()
			continue
		}
		l.lender = o
		return l, nil
	}
	if l, herr := d.openHydrating(uid, flag); !api.Is(herr, api.NotFound) {
		return l, herr
	}
	return nil, err
}

func (d *Disk) rest() []*Disk {
	if d.others == nil {
		return nil
	}
	return d.others()
}

// findRecord is layer.json of a layer that is here, or where it can be borrowed.
func (d *Disk) findRecord(uid string) (layerRecord, error) {
	rec, err := d.layerRecord(uid)
	if !api.Is(err, api.NotFound) {
		return rec, err
	}
	for _, o := range d.rest() {
		if rec, oerr := o.layerRecord(uid); oerr == nil {
			return rec, nil
		}
		// A frozen one counts where something names it, as on its own disk.
		if frozen, oerr := o.frozenRecord(uid); oerr == nil {
			if names, oerr := o.named(); oerr == nil && names[uid] {
				return layerRecord{UID: uid, Size: frozen.Size}, nil
			}
		}
	}
	if rec, herr := d.hydratingRecord(uid); herr == nil {
		return rec, nil
	}
	return layerRecord{}, err
}

// knownMap is the map of a frozen layer, kept in memory.
type knownMap struct {
	size int64
	x    *index
}

func (m *knownMap) length() int64 { return m.size }

func (m *knownMap) uniform(p int) (block.Kind, bool) {
	if p >= len(m.x.uniform) {
		return block.Hole, true
	}
	return block.Kind(m.x.uniform[p]), m.x.packed[p] == nil
}

func (m *knownMap) load(p int, kinds *[pageBlocks]block.Kind) error {
	clear(kinds[:])
	if p >= len(m.x.uniform) {
		return nil
	}
	for lo, n := 0, m.x.pageLen(p); lo < n; {
		v, k := m.x.runInPage(p, lo, n)
		for i := range k {
			kinds[lo+i] = block.Kind(v)
		}
		lo += k
	}
	return nil
}

// Lenders are the disks that the replica borrows layers from, and whether reads wait because such a disk failed.
func (r *Replica) Lenders() (disks []*Disk, lost bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.layers {
		if l.lender != nil && !slices.Contains(disks, l.lender) {
			disks = append(disks, l.lender)
		}
	}
	return disks, r.lost.Load()
}

// Borrows reports whether layers of other disks or machines are open: while they are read there, and until they were
// given back.
func (r *Replica) Borrows() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.lenders) > 0 || slices.ContainsFunc(r.layers, (*layer).away)
}

// OnLost has fn called, from the loop's thread, when reads begin or cease to wait for a borrowed layer. Before any I/O.
func (r *Replica) OnLost(fn func(lost bool)) { r.onLost = fn }

// away reports whether a layer is read from another disk or machine.
func (l *layer) away() bool { return l.lender != nil || l.hy != nil }

// readAway are the layers that are read from another disk or machine. They may be on the own disk, too, by now.
func (r *Replica) readAway() (map[string]bool, error) {
	away := map[string]bool{}
	err := r.onLoop(func() {
		for _, l := range r.layers {
			if l.away() {
				away[l.rec.UID] = true
			}
		}
	})
	return away, err
}

// Home makes the replica read from its own disk what is finished there by now. I/O goes on; that from the other disk is
// waited for in the end.
func (r *Replica) Home(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metaMu.Lock()
	closed := r.closed
	r.metaMu.Unlock()
	if closed {
		return r.name(errClosed)
	}
	old := r.lenders // that could not be given back before
	r.lenders = nil
	for i, l := range r.layers {
		if !l.away() {
			continue
		}
		own, err := r.disk.openLayerAs(l.rec.UID, r.disk.direct, true)
		if api.Is(err, api.NotFound) {
			continue
		}
		// One that was frozen when it was borrowed has no digest; who copied it has compared that of later.
		if err == nil && (l.rec.Root != "" && own.rec.Root != l.rec.Root || own.rec.Size != l.rec.Size) {
			err = errors.Join(api.Errorf(api.Corrupt, "layer %s differs from the one on its other disk", l.rec.UID), own.close())
		}
		if err != nil {
			return r.name(errors.Join(err, r.giveBack(ctx, old)))
		}
		// Neither the worker nor the loop uses the list meanwhile.
		r.work.do(func() {
			err = r.onLoop(func() {
				r.layers[i], r.fds[i+1] = own, int(own.data.Fd())
				r.hydrates = slices.ContainsFunc(r.layers, func(l *layer) bool { return l.hy != nil })
				r.retryLost()
			})
		})
		if err != nil {
			return r.name(errors.Join(err, own.close(), r.giveBack(ctx, old)))
		}
		old = append(old, l)
		slog.Info("layer is on the replica's own disk now", "replica", r.meta.UID, "volume", r.meta.Volume, "layer",
			l.rec.UID)
	}
	return r.name(r.giveBack(ctx, old))
}

// giveBack closes borrowed layers once no I/O on them is under way.
func (r *Replica) giveBack(ctx context.Context, old []*layer) error {
	if len(old) == 0 {
		return nil
	}
	release, err := r.holdSoon(ctx)
	if err != nil {
		r.lenders = append(r.lenders, old...)
		return fmt.Errorf("layers of another disk or machine stay open for now: %w", err)
	}
	defer release()
	var errs []error
	for _, l := range old {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// strand ends a failed read of a borrowed layer with ErrNotFetched, and reports whether it did.
func (r *Replica) strand(p *part) bool {
	switch {
	case p.src == 0:
		return false
	case r.fds[p.src] != p.fd: // it came home meanwhile
		p.fd = r.fds[p.src]
		r.ring.Read(&p.op, p.fd, p.buf, p.off)
		return true
	case r.layers[p.src-1].lender == nil:
		return false
	}
	if !r.lost.Swap(true) {
		slog.Error("the disk that a layer is borrowed from fails: reads of the layer wait for the own copy",
			"replica", r.meta.UID, "volume", r.meta.Volume, "layer", r.layers[p.src-1].rec.UID)
		if r.onLost != nil {
			r.onLost(true)
		}
	}
	r.ended(p, ErrNotFetched)
	return true
}

// retryLost lets callers repeat the reads that a failed disk did not answer.
func (r *Replica) retryLost() {
	if r.lost.Swap(false) && r.onLost != nil {
		r.onLost(false)
	}
	r.tellSource()
	r.tellFetched()
}
