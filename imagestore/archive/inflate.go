package archive

import (
	"errors"

	"drover.io/drover/imagestore/inflate"
)

// inflater decodes deflate from an input into a ring. What it took ahead of the next symbol is in bits; the input's
// pos is behind those.
type inflater struct {
	in   *input
	g    *ring
	bits uint64
	n    uint // of them, from the low end

	mark func(*inflater) error // called between blocks

	inflate.Decoder
}

// view is the input as bits. What was taken of it is to be told with took.
func (d *inflater) view() inflate.Bits {
	in := d.in
	return inflate.Bits{Src: in.buf[:in.end], Pos: in.pos, Buf: d.bits, N: d.n, More: in.err == nil}
}

func (d *inflater) took(b *inflate.Bits) {
	d.in.skip(b.Pos - d.in.pos)
	d.bits, d.n = b.Buf, b.N
}

// take consumes n bits, which must be at most 32.
func (d *inflater) take(n uint) error {
	d.in.need(8)
	b := d.view()
	_, ok := b.Take(n)
	d.took(&b)
	if !ok {
		return d.in.failed()
	}
	return nil
}

// inflate decodes blocks up to the last one, and leaves the input at the byte after it.
func (d *inflater) inflate() error {
	in, g := d.in, d.g
	d.Reset()
	stop := inflate.Block
	for stop != inflate.End {
		if stop == inflate.Block {
			if err := d.mark(d); err != nil {
				return err
			}
		}
		if err := g.reserve(); err != nil {
			return err
		}
		in.need(d.Wants())
		b := d.view()
		// The overshoot of the last symbols goes to the ring's slack.
		w := inflate.Window{B: g.b, Pos: g.pos, Stop: min(g.sent+pieceSize, g.size), Have: int(g.have) - g.sent,
			Ring: g.size}
		var err error
		stop, err = d.Next(&b, &w)
		d.took(&b)
		g.pos = w.Pos
		switch {
		case errors.Is(err, inflate.ErrShort):
			return in.failed()
		case err != nil:
			return in.damaged("the packed data are damaged")
		}
		if err := g.commitPiece(); err != nil {
			return err
		}
	}
	return nil
}
