package archive

// inSize is room for the largest packed chunk (64 KiB) and for what the decoder reads beyond it before it notices.
const inSize = 1 << 17

// literals is how many sets of probabilities for literals there can be: lc+lp is at most 4.
const literals = 16

// lengths are the probabilities (of a zero, of 2048) that the length of a match is decoded with.
type lengths struct {
	choice [2]uint16
	low    [16][8]uint16
	mid    [16][8]uint16
	high   [0x100]uint16
}

// model is what the decoder has learned, by what it decides.
type model struct {
	isMatch    [256]uint16 // by state and position
	isRep0Long [256]uint16
	isRep      [16]uint16
	isRep0     [16]uint16
	isRep1     [16]uint16
	isRep2     [16]uint16
	match      lengths
	rep        lengths
	slot       [4][64]uint16
	special    [16][32]uint16 // by slot
	align      [32]uint16
	literal    [literals][0x300]uint16
}

// each gives all probabilities, always in the same order.
func (m *model) each(do func([]uint16)) {
	do(m.isMatch[:])
	do(m.isRep0Long[:])
	do(m.isRep[:])
	do(m.isRep0[:])
	do(m.isRep1[:])
	do(m.isRep2[:])
	for _, l := range []*lengths{&m.match, &m.rep} {
		do(l.choice[:])
		for i := range l.low {
			do(l.low[i][:])
			do(l.mid[i][:])
		}
		do(l.high[:])
	}
	for i := range m.slot {
		do(m.slot[i][:])
	}
	for i := range m.special {
		do(m.special[i][:])
	}
	do(m.align[:])
	for i := range m.literal {
		do(m.literal[i][:])
	}
}

// even is a model that has learned nothing.
var even = func() (m model) {
	m.each(func(p []uint16) {
		for i := range p {
			p[i] = 1 << 10
		}
	})
	return m
}()

// lzma decodes the chunks of LZMA2 into a ring.
type lzma struct {
	model

	reps      [4]uint32
	state     uint32
	rng, code uint32
	lc        uint32
	lpMask    uint32
	pbMask    uint32
	need      needs // of the next chunk

	at int // in in
	in [inSize]byte
}

// literalState is the state after a literal.
var literalState = [16]uint8{0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 4, 5}

// run decodes until the ring is at soft, or beyond it because of a match, but never beyond hard. It reports false for
// data that cannot be.
func (d *lzma) run(w *ring, soft, hard, window int, have int64) bool {
	var (
		p     *uint16
		v     uint32
		bound uint32
		sym   uint32
	)
	in, b, size := &d.in, w.b, w.size
	rng, code, at := d.rng, d.code, d.at
	state, rep0 := d.state, d.reps[0]
	pos := w.pos
	// Distances are below both: what the window holds, and what there was since the last reset.
	epoch := int(have) - pos
	base := uint32(have) - uint32(pos)
	lc, lpMask, pbMask := d.lc, d.lpMask, d.pbMask
	prev := uint32(0)
	if have > 0 {
		prev = uint32(b[w.before(pos)])
	}
	for pos < soft {
		now := base + uint32(pos)
		i := state<<4 | now&pbMask
		p = &d.isMatch[i&0xff]
		rng, code, at = norm(rng, code, at, in)
		v = uint32(*p)
		bound = rng >> 11 * v
		if code < bound {
			rng = bound
			*p = uint16(v + (2048-v)>>5)
			lit := &d.literal[((now&lpMask)<<(lc&31)+prev>>((8-lc)&31))&(literals-1)]
			if state < 7 {
				rng, code, at, sym = tree8((*[0x100]uint16)(lit[:]), in, rng, code, at)
			} else {
				from := pos - int(rep0) - 1
				if from < 0 {
					from += size
				}
				if uint(from) >= uint(len(b)) {
					return false
				}
				rng, code, at, sym = matched(lit, in, rng, code, at, uint32(b[from]))
			}
			prev = sym & 0xff
			b[pos] = byte(sym)
			pos++
			state = uint32(literalState[state&15])
			continue
		}
		rng -= bound
		code -= bound
		*p = uint16(v - v>>5)
		var l *lengths
		p = &d.isRep[state&15]
		rng, code, at = norm(rng, code, at, in)
		v = uint32(*p)
		bound = rng >> 11 * v
		fresh := code < bound
		if fresh {
			rng = bound
			*p = uint16(v + (2048-v)>>5)
			d.reps[3], d.reps[2], d.reps[1] = d.reps[2], d.reps[1], rep0
			l = &d.match
			if state < 7 {
				state = 7
			} else {
				state = 10
			}
		} else {
			rng -= bound
			code -= bound
			*p = uint16(v - v>>5)
			l = &d.rep
			p = &d.isRep0[state&15]
			rng, code, at = norm(rng, code, at, in)
			v = uint32(*p)
			bound = rng >> 11 * v
			if code < bound {
				rng = bound
				*p = uint16(v + (2048-v)>>5)
				p = &d.isRep0Long[i&0xff]
				rng, code, at = norm(rng, code, at, in)
				v = uint32(*p)
				bound = rng >> 11 * v
				if code < bound {
					rng = bound
					*p = uint16(v + (2048-v)>>5)
					if int(rep0) >= epoch+pos || int(rep0) >= window {
						return false
					}
					from := pos - int(rep0) - 1
					if from < 0 {
						from += size
					}
					prev = uint32(b[from])
					b[pos] = byte(prev)
					pos++
					if state < 7 {
						state = 9
					} else {
						state = 11
					}
					continue
				}
				rng -= bound
				code -= bound
				*p = uint16(v - v>>5)
			} else {
				rng -= bound
				code -= bound
				*p = uint16(v - v>>5)
				p = &d.isRep1[state&15]
				rng, code, at = norm(rng, code, at, in)
				v = uint32(*p)
				bound = rng >> 11 * v
				if code < bound {
					rng = bound
					*p = uint16(v + (2048-v)>>5)
					rep0, d.reps[1] = d.reps[1], rep0
				} else {
					rng -= bound
					code -= bound
					*p = uint16(v - v>>5)
					p = &d.isRep2[state&15]
					rng, code, at = norm(rng, code, at, in)
					v = uint32(*p)
					bound = rng >> 11 * v
					if code < bound {
						rng = bound
						*p = uint16(v + (2048-v)>>5)
						rep0, d.reps[1], d.reps[2] = d.reps[2], rep0, d.reps[1]
					} else {
						rng -= bound
						code -= bound
						*p = uint16(v - v>>5)
						rep0, d.reps[1], d.reps[2], d.reps[3] = d.reps[3], rep0, d.reps[1], d.reps[2]
					}
				}
			}
			if state < 7 {
				state = 8
			} else {
				state = 11
			}
		}

		// The length.
		var n int
		p = &l.choice[0]
		rng, code, at = norm(rng, code, at, in)
		v = uint32(*p)
		bound = rng >> 11 * v
		if code < bound {
			rng = bound
			*p = uint16(v + (2048-v)>>5)
			t := &l.low[now&pbMask&15]
			rng, code, at, sym = tree3(t, in, rng, code, at)
			n = int(sym) + 2
		} else {
			rng -= bound
			code -= bound
			*p = uint16(v - v>>5)
			p = &l.choice[1]
			rng, code, at = norm(rng, code, at, in)
			v = uint32(*p)
			bound = rng >> 11 * v
			if code < bound {
				rng = bound
				*p = uint16(v + (2048-v)>>5)
				t := &l.mid[now&pbMask&15]
				rng, code, at, sym = tree3(t, in, rng, code, at)
				n = int(sym) + 10
			} else {
				rng -= bound
				code -= bound
				*p = uint16(v - v>>5)
				rng, code, at, sym = tree8(&l.high, in, rng, code, at)
				n = int(sym) - 256 + 18
			}
		}

		if fresh {
			rng, code, at, rep0 = d.distance(rng, code, at, n)
		}

		if int(rep0) >= epoch+pos || int(rep0) >= window || n > hard-pos {
			return false
		}
		dist := int(rep0) + 1
		from := pos - dist
		if from < 0 {
			from += size
			if from+n > size {
				w.pos = pos
				w.repeat(dist, n)
				pos = w.pos
				prev = uint32(b[pos-1])
				continue
			}
			dist = 16 // it overlaps nothing
		}
		to := b[pos : pos+n+32]
		src := b[from : from+n+32]
		switch {
		case dist >= 16:
			*(*[16]byte)(to) = *(*[16]byte)(src)
			for k := 16; k < n; k += 16 {
				*(*[16]byte)(to[k:]) = *(*[16]byte)(src[k:])
			}
		case dist >= 8:
			for k := 0; k < n; k += 8 {
				*(*[8]byte)(to[k:]) = *(*[8]byte)(src[k:])
			}
		case n >= 32:
			// Byte by byte, each would wait for the one before it.
			w.pos = pos
			w.repeat(dist, n)
		default:
			for k := 0; k < n; k++ {
				to[k] = src[k]
			}
		}
		pos += n
		prev = uint32(to[n-1])
	}
	d.rng, d.code, d.at = rng, code, at
	d.state, d.reps[0] = state, rep0
	w.pos = pos
	return true
}
