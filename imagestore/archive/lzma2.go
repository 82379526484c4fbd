package archive

import "encoding/binary"

// source gives the next bytes of an archive in one piece, which is valid until the next call.
type source interface {
	next(n int) ([]byte, error)
}

// needs are what the next chunk must bring along.
type needs struct {
	Dict  bool `json:"dict,omitempty"`
	Props bool `json:"props,omitempty"`
	State bool `json:"state,omitempty"`
}

// lzma2 decodes the chunks of one LZMA2 stream, up to its end mark, and gives everything to the consumer.
func (d *lzma) lzma2(w *ring, src source, window int) error {
	d.need = needs{true, true, true}
	return d.chunks(w, src, window)
}

// chunks is the rest of one.
func (d *lzma) chunks(w *ring, src source, window int) error {
	need := &d.need
	for {
		if w.mark != nil {
			if err := w.mark(); err != nil {
				return err
			}
		}
		head, err := src.next(1)
		if err != nil {
			return err
		}
		control := head[0]
		if control == 0 {
			return w.commit()
		}
		if control >= 0xe0 || control == 1 {
			w.have = int64(w.sent - w.pos) // counts from pos once that is committed
			need.Dict, need.Props = false, true
		} else if need.Dict {
			return corrupt("xz: the first chunk of a block needs what was before it")
		}
		if control < 0x80 {
			if control > 2 {
				return corrupt("xz: there is no chunk of kind %#x", control)
			}
			if head, err = src.next(2); err != nil {
				return err
			}
			plain, err := src.next(int(binary.BigEndian.Uint16(head)) + 1)
			if err != nil {
				return err
			}
			if err := w.reserve(); err != nil {
				return err
			}
			copy(w.b[w.pos:], plain)
			w.pos += len(plain)
			if err := w.commitPiece(); err != nil {
				return err
			}
			continue
		}
		if head, err = src.next(4); err != nil {
			return err
		}
		plain := int(control&0x1f)<<16 + int(binary.BigEndian.Uint16(head)) + 1
		packed := int(binary.BigEndian.Uint16(head[2:])) + 1
		switch {
		case control >= 0xc0:
			if head, err = src.next(1); err != nil {
				return err
			}
			if !d.props(head[0]) {
				return corrupt("xz: properties of LZMA2 that cannot be (%d)", head[0])
			}
			need.Props, need.State = false, false
			d.reset()
		case need.Props:
			return corrupt("xz: a chunk without the properties that it needs")
		case control >= 0xa0:
			need.State = false
			d.reset()
		case need.State:
			return corrupt("xz: a chunk without the state that it needs")
		}
		body, err := src.next(packed)
		if err != nil {
			return err
		}
		if err := d.chunk(w, body, plain, window); err != nil {
			return err
		}
	}
}

// props sets what the numbers of the encoder mean.
func (d *lzma) props(p byte) bool {
	lc, lp, pb := p%9, p/9%5, p/45
	if pb > 4 || lc+lp > 4 {
		return false
	}
	d.lc, d.lpMask, d.pbMask = uint32(lc), 1<<lp-1, 1<<pb-1
	return true
}

// reset forgets what was learned.
func (d *lzma) reset() {
	d.state, d.reps = 0, [4]uint32{}
	d.model = even
}

// chunk decodes one packed chunk of LZMA2 to exactly so many plain bytes.
func (d *lzma) chunk(w *ring, body []byte, plain, window int) error {
	if len(body) < 5 || body[0] != 0 {
		return corrupt("xz: a chunk has no start")
	}
	copy(d.in[:], body)
	d.rng, d.code, d.at = 1<<32-1, binary.BigEndian.Uint32(body[1:]), 5
	for plain > 0 {
		if err := w.reserve(); err != nil {
			return err
		}
		start := w.pos
		hard := start + plain
		soft := min(hard, w.sent+pieceSize, w.size)
		if !d.run(w, soft, hard, window, w.have+int64(start-w.sent)) || d.at > len(body) {
			return corrupt("xz: the packed data are damaged")
		}
		plain -= w.pos - start
		if err := w.commitPiece(); err != nil {
			return err
		}
	}
	d.rng, d.code, d.at = norm(d.rng, d.code, d.at, &d.in)
	if d.at != len(body) || d.code != 0 {
		return corrupt("xz: the packed data are damaged")
	}
	return nil
}
