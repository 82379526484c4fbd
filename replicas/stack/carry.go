package stack

import (
	"errors"
	"os"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// What a merge carries are blocks, and their checksums with them: those that the target gets are written into its own
// before the window is recorded as done, and taken out of the other layer's after that. So they are no more than a
// window's there twice, and from then on the target's alone say what is right of what it holds there.

// ends are the layer that is emptied and the target.
func (w *merger) ends() (from, to *layer.Layer) {
	if w.seen.Up {
		return w.lower, w.upper
	}
	return w.upper, w.lower
}

// bothHaveCRCs reports whether two layers have checksums that can move. Where the target has some for a part of the
// result only, they are made anew in the end.
func (d *Disk) bothHaveCRCs(g *Merge) (bool, error) {
	lower, lerr := d.Record(g.Lower)
	upper, uerr := d.Record(g.Upper)
	to, from := lower, upper
	if g.Up {
		to, from = from, to
	}
	return to.Size >= from.Size && d.HasCRCs(g.Lower, format.CRCsLength(lower.Size)) &&
		d.HasCRCs(g.Upper, format.CRCsLength(upper.Size)), errors.Join(lerr, uerr)
}

// openCRCs opens the checksums that move. Should the target have lost its own, none do.
func (w *merger) openCRCs() (err error) {
	from, to := w.ends()
	if !w.seen.Crcs || to.CRCs == nil {
		return nil
	}
	open := func(l *layer.Layer) (file.Handle, error) {
		return w.r.disk.FS.Open(w.r.disk.Join(layer.Dir, l.Rec.UID, layer.CRCsFile), os.O_RDWR, 0)
	}
	if w.crcs, err = open(to); err == nil && from.CRCs != nil {
		w.spent, err = open(from)
	}
	return err
}

// giveCRCs gives the target the checksums of blocks that were copied to it.
func (w *merger) giveCRCs(off, n int64) error {
	if w.crcs == nil {
		return nil
	}
	from, _ := w.ends()
	crcs, err := from.CRCsAt(off, n)
	if err == nil && crcs == nil { // it has lost them
		buf := diskfs.AlignedBuffer(int(n))
		if _, err = w.from.ReadAt(buf, off); err == nil {
			crcs = format.AppendCRCs(nil, buf)
		}
	}
	if err != nil {
		return err
	}
	_, err = w.crcs.WriteAt(crcs, off>>BlockBits*CRCSize)
	return err
}

// sync makes what was carried durable.
func (w *merger) sync() error {
	if w.crcs == nil {
		return w.to.Datasync()
	}
	return diskfs.AtOnce(w.to.Datasync, w.crcs.Datasync)
}

// empty takes out of the other layer what the target has by now, up to where the merge is; off is where it was.
func (w *merger) empty(off, done int64) error {
	if w.spent != nil {
		first, end := off>>BlockBits>>format.CRCPageBits, done>>BlockBits>>format.CRCPageBits
		if done >= w.size {
			end = format.CRCsLength(w.size) / format.CRCPageSize
		}
		if first < end {
			if err := w.spent.Punch(first*format.CRCPageSize, (end-first)*format.CRCPageSize); err != nil {
				return err
			}
		}
	}
	return w.freed.Punch(w.from, off, done-off)
}

// kinds are those of both layers in a page.
func (w *merger) kinds(p int) (lower, upper *[PageBlocks]block.Kind, err error) {
	lower, upper = new([PageBlocks]block.Kind), new([PageBlocks]block.Kind)
	return lower, upper, errors.Join(w.lower.Map.Load(p, lower), w.upper.Map.Load(p, upper))
}

// carry copies into the target what the other layer has to give in a window, and returns how far that is: no more than
// mergeTwice is copied. It may do so again after a crash.
func (w *merger) carry(off, most int64) (end, copied int64, err error) {
	sent, dirty := off, int64(0)
	b, last := off>>BlockBits, most>>BlockBits
	for b < last && copied < mergeTwice {
		p := int(b >> PageBits)
		base := int64(p) << PageBits
		lower, upper, err := w.kinds(p)
		if err != nil {
			return off, copied, err
		}
		for stop := min(last, base+PageBlocks); b < stop && copied < mergeTwice; {
			act := w.act(lower[b-base], upper[b-base])
			e := b + 1
			for e < stop && e-b < mergeAhead>>BlockBits && w.act(lower[e-base], upper[e-base]) == act {
				e++
			}
			if act == copyBlock {
				e = min(e, b+(mergeTwice-copied)>>BlockBits)
			}
			from, n := b<<BlockBits, (e-b)<<BlockBits
			switch act {
			case copyBlock:
				if err = w.to.CopyFrom(w.from, from, n); err == nil {
					err = w.giveCRCs(from, n)
				}
				copied, dirty = copied+n, dirty+n
			case punchBlock:
				err = w.to.Punch(from, n)
			}
			if err == nil && dirty >= mergeAhead {
				err = w.to.Writeout(sent, e<<BlockBits-sent)
				sent, dirty = e<<BlockBits, 0
			}
			if err != nil {
				return off, copied, err
			}
			b = e
		}
	}
	return b << BlockBits, copied, nil
}

type action uint8

const (
	leaveBlock action = iota
	copyBlock
	punchBlock
)

// act is what the target needs of a block, given what the two layers hold.
func (w *merger) act(lower, upper block.Kind) action {
	switch {
	case w.seen.Up && upper == block.Hole && lower == block.Data, !w.seen.Up && upper == block.Data:
		return copyBlock
	case !w.seen.Up && upper == block.Zero && lower == block.Data:
		return punchBlock
	}
	return leaveBlock
}

// union is what the result holds of a block.
func union(lower, upper block.Kind) block.Kind {
	if upper != block.Hole {
		return upper
	}
	return lower
}
