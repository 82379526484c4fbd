package archive

// norm refills the range coder.
func norm(rng, code uint32, at int, in *[inSize]byte) (uint32, uint32, int) {
	if rng < 1<<24 {
		rng <<= 8
		code = code<<8 | uint32(in[at&(inSize-1)])
		at++
	}
	return rng, code, at
}

// decide decides one bit without a branch, for which way it goes can hardly be predicted: low is a zero. v is the
// probability, and what becomes of it.
func decide(rng, code, v uint32) (_, _, _ uint32, low bool) {
	bound := rng >> 11 * v
	rest := code - bound
	rng -= bound
	toward := int32(0)
	if code < bound {
		rng = bound
		toward = 2048 - 31
	}
	low = code < bound
	if low {
		rest = code
	}
	return rng, rest, v - uint32((int32(v)-toward)>>5), low
}

// The functions that follow decode several bits, each with the probability that those before it lead to. What takes
// time is the chain from bit to bit; so both probabilities that may come next are loaded before it is known which will.

// tree8 decodes a byte; the one that is set above it stays.
func tree8(p *[0x100]uint16, in *[inSize]byte, rng, code uint32, at int) (uint32, uint32, int, uint32) {
	var low bool
	sym, v := uint32(1), uint32(p[1])
	for sym < 128 {
		rng, code, at = norm(rng, code, at, in)
		a, b := uint32(p[2*sym]), uint32(p[2*sym+1])
		rng, code, v, low = decide(rng, code, v)
		p[sym] = uint16(v)
		bit := uint32(1)
		if low {
			bit = 0
		}
		v = b
		if low {
			v = a
		}
		sym = 2*sym + bit
	}
	rng, code, at = norm(rng, code, at, in)
	rng, code, v, low = decide(rng, code, v)
	p[sym&255] = uint16(v)
	bit := uint32(1)
	if low {
		bit = 0
	}
	return rng, code, at, 2*sym + bit
}

// tree3 decodes three bits.
func tree3(p *[8]uint16, in *[inSize]byte, rng, code uint32, at int) (uint32, uint32, int, uint32) {
	var low bool
	sym, v := uint32(1), uint32(p[1])
	for sym < 4 {
		rng, code, at = norm(rng, code, at, in)
		a, b := uint32(p[2*sym]), uint32(p[2*sym+1])
		rng, code, v, low = decide(rng, code, v)
		p[sym] = uint16(v)
		bit := uint32(1)
		if low {
			bit = 0
		}
		v = b
		if low {
			v = a
		}
		sym = 2*sym + bit
	}
	rng, code, at = norm(rng, code, at, in)
	rng, code, v, low = decide(rng, code, v)
	p[sym&7] = uint16(v)
	bit := uint32(1)
	if low {
		bit = 0
	}
	return rng, code, at, 2*sym + bit - 8
}

// tree6 decodes six bits.
func tree6(p *[64]uint16, in *[inSize]byte, rng, code uint32, at int) (uint32, uint32, int, uint32) {
	var low bool
	sym, v := uint32(1), uint32(p[1])
	for sym < 32 {
		rng, code, at = norm(rng, code, at, in)
		a, b := uint32(p[2*sym]), uint32(p[2*sym+1])
		rng, code, v, low = decide(rng, code, v)
		p[sym] = uint16(v)
		bit := uint32(1)
		if low {
			bit = 0
		}
		v = b
		if low {
			v = a
		}
		sym = 2*sym + bit
	}
	rng, code, at = norm(rng, code, at, in)
	rng, code, v, low = decide(rng, code, v)
	p[sym&63] = uint16(v)
	bit := uint32(1)
	if low {
		bit = 0
	}
	return rng, code, at, 2*sym + bit - 64
}

// matched decodes the byte after a match, as tree8 does: it most likely differs from like, which would have continued
// the match.
func matched(p *[0x300]uint16, in *[inSize]byte, rng, code uint32, at int, like uint32) (uint32, uint32, int, uint32) {
	var low bool
	like <<= 1
	off := uint32(0x100) // or 0, once it differs
	now := off + like&off + 1
	sym, v := uint32(1), uint32(p[now])
	for sym < 0x80 {
		off1 := like & off
		off0 := off &^ off1
		like <<= 1
		next0 := off0 + like&off0 + 2*sym
		next1 := off1 + like&off1 + 2*sym + 1
		rng, code, at = norm(rng, code, at, in)
		a, b := uint32(p[next0]), uint32(p[next1])
		rng, code, v, low = decide(rng, code, v)
		p[now] = uint16(v)
		bit := uint32(1)
		if low {
			bit = 0
		}
		v = b
		if low {
			v = a
		}
		off = off1 ^ (off0^off1)&(bit-1)
		now = next1 ^ (next0^next1)&(bit-1)
		sym = 2*sym + bit
	}
	rng, code, at = norm(rng, code, at, in)
	rng, code, v, low = decide(rng, code, v)
	p[now] = uint16(v)
	bit := uint32(1)
	if low {
		bit = 0
	}
	return rng, code, at, 2*sym + bit
}

// distance decodes the distance, less one, of a match of length n.
func (d *lzma) distance(rng, code uint32, at, n int) (uint32, uint32, int, uint32) {
	in := &d.in
	rng, code, at, slot := tree6(&d.slot[min(n-2, 3)&3], in, rng, code, at)
	if slot < 4 {
		return rng, code, at, slot
	}
	more := slot>>1 - 1
	dist := 2 | slot&1
	p := &d.align
	if more < 6 {
		p = &d.special[slot&15]
		dist <<= more
	} else {
		for ; more > 4; more-- {
			rng, code, at = norm(rng, code, at, in)
			rng >>= 1
			t := code - rng
			m := uint32(int32(t) >> 31)
			code = t + rng&m
			dist = dist<<1 + m + 1
		}
		dist <<= 4
	}
	// Lowest bit first.
	sym := uint32(1)
	for k := range more {
		var v uint32
		var low bool
		rng, code, at = norm(rng, code, at, in)
		rng, code, v, low = decide(rng, code, uint32(p[sym&31]))
		p[sym&31] = uint16(v)
		bit := uint32(1)
		if low {
			bit = 0
		}
		sym = 2*sym + bit
		dist += bit << (k & 31)
	}
	return rng, code, at, dist
}
