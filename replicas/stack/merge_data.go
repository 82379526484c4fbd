package stack

import (
	"errors"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// A merge moves blocks together with their checksums: the checksums of copied blocks are written to the target's file
// before the record of the window, and freed in the other layer's file afterwards. So at most a window of checksums
// exists twice, and below Done only the target's checksums count.

// emptiedAndTarget returns the emptied layer and the target.
func (w *merger) emptiedAndTarget() (from, to *layer.Layer) {
	if w.seen.Up {
		return w.lower, w.upper
	}
	return w.upper, w.lower
}

// syncTarget makes copied blocks and checksums durable.
func (w *merger) syncTarget() error {
	if w.crcs == nil {
		return w.to.Datasync()
	}
	return diskfs.AtOnce(w.to.Datasync, w.crcs.Datasync)
}

// emptyCopied frees the copied part of the other layer, from off to done.
func (w *merger) emptyCopied(off, done int64) error {
	if w.spent != nil {
		first, end := off>>blockBits>>format.CRCPageBits, done>>blockBits>>format.CRCPageBits
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

// loadKinds returns the kinds of a page in both layers.
func (w *merger) loadKinds(p int) (lower, upper *[pageBlocks]block.Kind, err error) {
	lower, upper = new([pageBlocks]block.Kind), new([pageBlocks]block.Kind)
	return lower, upper, errors.Join(w.lower.Map.Load(p, lower), w.upper.Map.Load(p, upper))
}

// copyWindow copies the blocks of a window to the target, at most mergeTwice bytes, and returns the end of the copied
// part. After a crash the merge copies the window again.
func (w *merger) copyWindow(off, most int64) (end, copied int64, err error) {
	sent, dirty := off, int64(0)
	b, last := off>>blockBits, most>>blockBits
	for b < last && copied < mergeTwice {
		p := int(b >> pageBits)
		base := int64(p) << pageBits
		lower, upper, err := w.loadKinds(p)
		if err != nil {
			return off, copied, err
		}
		for stop := min(last, base+pageBlocks); b < stop && copied < mergeTwice; {
			act := w.actionFor(lower[b-base], upper[b-base])
			e := b + 1
			for e < stop && e-b < mergeAhead>>blockBits && w.actionFor(lower[e-base], upper[e-base]) == act {
				e++
			}
			if act == copyBlock {
				e = min(e, b+(mergeTwice-copied)>>blockBits)
			}
			from, n := b<<blockBits, (e-b)<<blockBits
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
				err = w.to.Writeout(sent, e<<blockBits-sent)
				sent, dirty = e<<blockBits, 0
			}
			if err != nil {
				return off, copied, err
			}
			b = e
		}
	}
	return b << blockBits, copied, nil
}

type action uint8

const (
	leaveBlock action = iota
	copyBlock
	punchBlock
)

// actionFor returns what to do in the target for a block of these kinds.
func (w *merger) actionFor(lower, upper block.Kind) action {
	switch {
	case w.seen.Up && upper == block.Hole && lower == block.Data, !w.seen.Up && upper == block.Data:
		return copyBlock
	case !w.seen.Up && upper == block.Zero && lower == block.Data:
		return punchBlock
	}
	return leaveBlock
}

// kindInResult returns the kind of a block in the result.
func kindInResult(lower, upper block.Kind) block.Kind {
	if upper != block.Hole {
		return upper
	}
	return lower
}
