package archive

import (
	"encoding/binary"
	"errors"
)

// A second decoder of LZMA2, to compare with: bit by bit as the format's description has it, slow and plain.

var errReference = errors.New("bad LZMA2")

type refLengths struct {
	choice, choice2 uint16
	low, mid        [16][8]uint16
	high            [256]uint16
}

type refLZMA struct {
	in        []byte
	at        int
	rng, code uint32
	bad       bool

	lc, lp, pb uint32
	state      int
	reps       [4]uint32

	match, rep0Long         [12][16]uint16
	rep, rep0, rep1, rep2   [12]uint16
	literal                 [16][0x300]uint16
	matchLength, repLength  refLengths
	slot                    [4][64]uint16
	special                 [10][64]uint16
	align                   [16]uint16
	out                     []byte
	epoch, window           int
	needDict, needP, needSt bool
}

func (d *refLZMA) byte() byte {
	if d.at >= len(d.in) {
		d.bad = true
		return 0
	}
	d.at++
	return d.in[d.at-1]
}

func (d *refLZMA) norm() {
	if d.rng < 1<<24 {
		d.rng <<= 8
		d.code = d.code<<8 | uint32(d.byte())
	}
}

func (d *refLZMA) bit(p *uint16) uint32 {
	d.norm()
	bound := (d.rng >> 11) * uint32(*p)
	if d.code < bound {
		d.rng = bound
		*p += (2048 - *p) >> 5
		return 0
	}
	d.rng -= bound
	d.code -= bound
	*p -= *p >> 5
	return 1
}

func (d *refLZMA) tree(p []uint16) uint32 {
	m := uint32(1)
	for m < uint32(len(p)) {
		m = m<<1 | d.bit(&p[m])
	}
	return m - uint32(len(p))
}

func (d *refLZMA) reverse(p []uint16, n int) uint32 {
	m, v := uint32(1), uint32(0)
	for i := range n {
		b := d.bit(&p[m])
		m = m<<1 | b
		v |= b << i
	}
	return v
}

func (l *refLengths) length(d *refLZMA, pos int) int {
	switch {
	case d.bit(&l.choice) == 0:
		return 2 + int(d.tree(l.low[pos][:]))
	case d.bit(&l.choice2) == 0:
		return 10 + int(d.tree(l.mid[pos][:]))
	}
	return 18 + int(d.tree(l.high[:]))
}

func (d *refLZMA) reset() {
	half := func(ps ...[]uint16) {
		for _, p := range ps {
			for i := range p {
				p[i] = 1024
			}
		}
	}
	d.state, d.reps = 0, [4]uint32{}
	for i := range d.match {
		half(d.match[i][:], d.rep0Long[i][:])
	}
	half(d.rep[:], d.rep0[:], d.rep1[:], d.rep2[:], d.align[:])
	for i := range d.literal {
		half(d.literal[i][:])
	}
	for _, l := range []*refLengths{&d.matchLength, &d.repLength} {
		l.choice, l.choice2 = 1024, 1024
		for i := range l.low {
			half(l.low[i][:], l.mid[i][:])
		}
		half(l.high[:])
	}
	for i := range d.slot {
		half(d.slot[i][:])
	}
	for i := range d.special {
		half(d.special[i][:])
	}
}

func (d *refLZMA) have() int { return len(d.out) - d.epoch }

func (d *refLZMA) back(n uint32) (byte, bool) {
	if int64(n) >= int64(d.have()) || int64(n) >= int64(d.window) {
		return 0, false
	}
	return d.out[len(d.out)-1-int(n)], true
}

func (d *refLZMA) symbol(end int) bool {
	pos := d.have() & (1<<d.pb - 1)
	if d.bit(&d.match[d.state][pos]) == 0 {
		prev := uint32(0)
		if d.have() > 0 {
			prev = uint32(d.out[len(d.out)-1])
		}
		p := &d.literal[(uint32(d.have())&(1<<d.lp-1))<<d.lc+prev>>(8-d.lc)]
		m := uint32(1)
		if d.state >= 7 {
			like, ok := d.back(d.reps[0])
			if !ok {
				return false
			}
			for i := 7; m < 0x100; i-- {
				lb := uint32(like) >> i & 1
				b := d.bit(&p[(1+lb)<<8+m])
				m = m<<1 | b
				if b != lb {
					break
				}
			}
		}
		for m < 0x100 {
			m = m<<1 | d.bit(&p[m])
		}
		d.out = append(d.out, byte(m))
		d.state = [12]int{0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 4, 5}[d.state]
		return true
	}
	next := func(a, b int) {
		if d.state < 7 {
			d.state = a
		} else {
			d.state = b
		}
	}
	var n int
	if d.bit(&d.rep[d.state]) == 0 {
		d.reps[3], d.reps[2], d.reps[1] = d.reps[2], d.reps[1], d.reps[0]
		n = d.matchLength.length(d, pos)
		slot := d.tree(d.slot[min(n-2, 3)][:])
		dist := slot
		if slot >= 4 {
			bits := int(slot>>1 - 1)
			dist = (2 | slot&1) << bits
			if bits < 6 {
				dist += d.reverse(d.special[slot-4][:], bits)
			} else {
				direct := uint32(0)
				for range bits - 4 {
					d.norm()
					d.rng >>= 1
					b := uint32(0)
					if d.code >= d.rng {
						d.code -= d.rng
						b = 1
					}
					direct = direct<<1 | b
				}
				dist += direct<<4 + d.reverse(d.align[:], 4)
			}
		}
		d.reps[0] = dist
		next(7, 10)
	} else {
		if d.bit(&d.rep0[d.state]) == 0 {
			if d.bit(&d.rep0Long[d.state][pos]) == 0 {
				b, ok := d.back(d.reps[0])
				d.out = append(d.out, b)
				next(9, 11)
				return ok
			}
		} else {
			i := 1
			if d.bit(&d.rep1[d.state]) == 1 {
				i = 2 + int(d.bit(&d.rep2[d.state]))
			}
			dist := d.reps[i]
			copy(d.reps[1:i+1], d.reps[:i])
			d.reps[0] = dist
		}
		n = d.repLength.length(d, pos)
		next(8, 11)
	}
	if n > end-len(d.out) {
		return false
	}
	for range n {
		b, ok := d.back(d.reps[0])
		if !ok {
			return false
		}
		d.out = append(d.out, b)
	}
	return true
}

// reference decodes a whole LZMA2 stream, which must end with in, to at most so many bytes.
func reference(in []byte, window, most int) ([]byte, error) {
	d := &refLZMA{window: window, needDict: true, needP: true, needSt: true}
	for {
		if len(in) == 0 {
			return d.out, errReference
		}
		control := in[0]
		in = in[1:]
		if control == 0 {
			if len(in) > 0 {
				return d.out, errReference
			}
			return d.out, nil
		}
		if control == 1 || control >= 0xe0 {
			d.needDict, d.needP, d.epoch = false, true, len(d.out)
		}
		if d.needDict || control > 2 && control < 0x80 || len(in) < 2 {
			return d.out, errReference
		}
		n := int(binary.BigEndian.Uint16(in)) + 1
		in = in[2:]
		if control < 3 {
			if len(in) < n || len(d.out)+n > most {
				return d.out, errReference
			}
			d.out = append(d.out, in[:n]...)
			in = in[n:]
			continue
		}
		n += int(control&31) << 16
		if len(in) < 3 {
			return d.out, errReference
		}
		packed := int(binary.BigEndian.Uint16(in)) + 1
		in = in[2:]
		switch {
		case control >= 0xc0:
			p := uint32(in[0])
			in = in[1:]
			d.lc, d.lp, d.pb = p%9, p/9%5, p/45
			if d.pb > 4 || d.lc+d.lp > 4 {
				return d.out, errReference
			}
			d.needP, d.needSt = false, false
			d.reset()
		case d.needP:
			return d.out, errReference
		case control >= 0xa0:
			d.needSt = false
			d.reset()
		case d.needSt:
			return d.out, errReference
		}
		if len(in) < packed || packed < 5 || in[0] != 0 || len(d.out)+n > most {
			return d.out, errReference
		}
		d.in, d.at, d.rng, d.code, d.bad = in[:packed], 5, 1<<32-1, binary.BigEndian.Uint32(in[1:]), false
		in = in[packed:]
		for end := len(d.out) + n; len(d.out) < end; {
			if !d.symbol(end) || d.bad {
				return d.out, errReference
			}
		}
		d.norm()
		if d.bad || d.at != packed || d.code != 0 {
			return d.out, errReference
		}
	}
}
