package archive

import "encoding/binary"

// inflater decodes deflate (RFC 1951) from an input into a ring. What it takes ahead of the next symbol is in bits; the
// input's pos is behind those.
type inflater struct {
	in   *input
	g    *ring
	bits uint64
	n    uint // of them, from the low end

	lit   [litTable]uint32
	dist  [distTable]uint32
	pre   [1 << preBits]uint32
	lens  [288 + 32]uint8
	fixed bool // the tables hold the fixed codes
}

// refill makes at least 56 bits available, or all there are.
func (d *inflater) refill() {
	in := d.in
	if in.need(8) {
		d.bits |= binary.LittleEndian.Uint64(in.buf[in.pos:]) << (d.n & 63)
		in.skip(int((63 - d.n) >> 3))
		d.n |= 56
		return
	}
	for d.n < 56 && in.pos < in.end {
		d.bits |= uint64(in.buf[in.pos]) << d.n
		in.skip(1)
		d.n += 8
	}
}

// take consumes n bits, which must be at most 32.
func (d *inflater) take(n uint) (uint32, error) {
	if d.n < n {
		if d.refill(); d.n < n {
			return 0, d.in.failed()
		}
	}
	v := uint32(d.bits & (1<<n - 1))
	d.drop(n)
	return v, nil
}

func (d *inflater) drop(n uint) {
	d.bits >>= n & 63
	d.n -= n
}

// align gives whole bytes that were taken ahead back to the input.
func (d *inflater) align() {
	d.in.skip(-int(d.n >> 3))
	d.bits, d.n = 0, 0
}

func (d *inflater) damaged() error { return d.in.damaged("the packed data are damaged") }

// inflate decodes blocks up to the last one, and leaves the input at the byte after it.
func (d *inflater) inflate() error {
	d.bits, d.n = 0, 0
	for {
		head, err := d.take(3)
		if err != nil {
			return err
		}
		switch head >> 1 {
		case 0:
			err = d.stored()
		case 1:
			d.useFixed()
			err = d.block()
		case 2:
			if err = d.readCodes(); err == nil {
				err = d.block()
			}
		default:
			err = d.damaged()
		}
		if err != nil {
			return err
		}
		if head&1 != 0 {
			d.align()
			return nil
		}
	}
}

func (d *inflater) stored() error {
	d.align()
	head, err := d.in.next(4)
	if err != nil {
		return err
	}
	n := binary.LittleEndian.Uint16(head)
	if n != ^binary.LittleEndian.Uint16(head[2:]) {
		return d.damaged()
	}
	b, err := d.in.next(int(n))
	if err != nil {
		return err
	}
	if err := d.g.reserve(); err != nil {
		return err
	}
	copy(d.g.b[d.g.pos:], b)
	d.g.pos += len(b)
	return d.g.commitPiece()
}

func (d *inflater) useFixed() {
	if d.fixed {
		return
	}
	l := &d.lens
	for i := range 288 {
		switch {
		case i < 144:
			l[i] = 8
		case i < 256:
			l[i] = 9
		case i < 280:
			l[i] = 7
		default:
			l[i] = 8
		}
	}
	build(d.lit[:], l[:288], litEntries[:], litBits)
	for i := range 32 {
		l[i] = 5
	}
	build(d.dist[:], l[:32], distEntries[:], distBits)
	d.fixed = true
}

// readCodes reads the head of a dynamic block and builds its tables.
func (d *inflater) readCodes() error {
	d.fixed = false
	head, err := d.take(14)
	if err != nil {
		return err
	}
	nlit, ndist, npre := int(head&31)+257, int(head>>5&31)+1, int(head>>10)+4
	if nlit > 286 || ndist > 30 {
		return d.damaged()
	}
	var pre [19]uint8
	for i := range npre {
		v, err := d.take(3)
		if err != nil {
			return err
		}
		pre[preOrder[i]] = uint8(v)
	}
	if !build(d.pre[:], pre[:], preEntries[:], preBits) {
		return d.damaged()
	}
	lens := d.lens[:nlit+ndist]
	for i := 0; i < len(lens); {
		d.refill()
		e := d.pre[d.bits&(1<<preBits-1)]
		if e&flagSpecial != 0 {
			return d.damaged()
		}
		n := uint(e & 0xff)
		if n > d.n {
			return d.in.failed()
		}
		d.drop(n)
		sym := uint8(e >> 16)
		if sym < 16 {
			lens[i] = sym
			i++
			continue
		}
		last, extra, repeat := uint8(0), uint(7), 11
		switch sym {
		case 16:
			if i == 0 {
				return d.damaged()
			}
			last, extra, repeat = lens[i-1], 2, 3
		case 17:
			extra, repeat = 3, 3
		}
		v, err := d.take(extra)
		if err != nil {
			return err
		}
		repeat += int(v)
		if repeat > len(lens)-i {
			return d.damaged()
		}
		for range repeat {
			lens[i] = last
			i++
		}
	}
	// A block that cannot end is no block.
	if lens[256] == 0 || !build(d.lit[:], lens[:nlit], litEntries[:], litBits) ||
		!build(d.dist[:], lens[nlit:], distEntries[:], distBits) {
		return d.damaged()
	}
	return nil
}

// block decodes one block up to its end.
func (d *inflater) block() error {
	for {
		if err := d.g.reserve(); err != nil {
			return err
		}
		d.in.need(inMargin)
		done, ok := d.fast()
		if !ok {
			return d.damaged()
		}
		if !done && d.in.end-d.in.pos < inMargin {
			var err error
			if done, err = d.symbol(); err != nil {
				return err
			}
		}
		if err := d.g.commitPiece(); err != nil {
			return err
		}
		if done {
			return nil
		}
	}
}

// symbol decodes one symbol, near the end of the input. It reports whether it is the end of the block.
func (d *inflater) symbol() (bool, error) {
	lookup := func(t []uint32, bits uint) (uint32, error) {
		d.refill()
		e := t[d.bits&(1<<bits-1)]
		if e&flagLink != 0 {
			if d.n < bits {
				return 0, d.in.failed()
			}
			d.drop(bits)
			e = t[e>>16&0x7fff+uint32(d.bits)&(1<<(e>>8&15)-1)]
		}
		if e&0xff > uint32(d.n) {
			return 0, d.in.failed()
		}
		return e, nil
	}
	e, err := lookup(d.lit[:], litBits)
	if err != nil {
		return false, err
	}
	g := d.g
	saved := d.bits
	d.drop(uint(e & 0xff))
	if e&flagLiteral != 0 {
		g.b[g.pos] = byte(e >> 16)
		g.pos++
		return false, nil
	}
	if e&flagEnd != 0 {
		return true, nil
	}
	if e&flagSpecial != 0 {
		return false, d.damaged()
	}
	length := int(e>>16) + int(saved&(1<<(e&63)-1)>>(e>>8&15))
	if e, err = lookup(d.dist[:], distBits); err != nil {
		return false, err
	}
	if e&flagSpecial != 0 {
		return false, d.damaged()
	}
	distance := int(e>>16) + int(d.bits&(1<<(e&63)-1)>>(e>>8&15))
	d.drop(uint(e & 0xff))
	if int64(distance) > g.have+int64(g.pos-g.sent) {
		return false, d.damaged()
	}
	g.repeat(distance, length)
	return false, nil
}

// fast decodes while it is far from the end of the input, and the piece is not full. It reports whether the block
// ended, and ok is false if it cannot be.
func (d *inflater) fast() (done, ok bool) {
	in, g := d.in, d.g
	src, pos, bits, n := in.buf[:in.end], in.pos, d.bits, d.n
	dst, out := g.b, g.pos
	// The overshoot of the last symbols goes to the ring's slack.
	inEnd, outEnd := len(src)-inMargin, min(g.sent+pieceSize, g.size)
	have := int(g.have) - g.sent
	size := g.size
	lit, dist := &d.lit, &d.dist
	ok = true
loop:
	for pos <= inEnd && out < outEnd {
		bits |= binary.LittleEndian.Uint64(src[pos:]) << (n & 63)
		pos += int((63 - n) >> 3)
		n |= 56
		e := lit[bits&(1<<litBits-1)]
		if e&flagLiteral != 0 {
			bits >>= e & 63
			n -= uint(e & 63)
			dst[out] = byte(e >> 16)
			out++
			e = lit[bits&(1<<litBits-1)]
			if e&flagLiteral != 0 {
				bits >>= e & 63
				n -= uint(e & 63)
				dst[out] = byte(e >> 16)
				out++
				e = lit[bits&(1<<litBits-1)]
				if e&flagLiteral != 0 {
					bits >>= e & 63
					n -= uint(e & 63)
					dst[out] = byte(e >> 16)
					out++
					continue
				}
			}
		}
		// At least 34 bits are left: a length with a link takes 20 of them.
		if e&flagSpecial != 0 {
			if e&flagLink != 0 {
				bits >>= litBits
				n -= litBits
				e = lit[e>>16+uint32(bits)&(1<<(e>>8&15)-1)]
				if e&flagLiteral != 0 {
					bits >>= e & 63
					n -= uint(e & 63)
					dst[out] = byte(e >> 16)
					out++
					continue
				}
			}
			if e&flagSpecial != 0 {
				if e&flagEnd != 0 {
					bits >>= e & 63
					n -= uint(e & 63)
					done = true
				} else {
					ok = false
				}
				break
			}
		}
		length := int(e>>16) + int(bits&(1<<(e&63)-1)>>(e>>8&15))
		bits >>= e & 63
		n -= uint(e & 63)

		bits |= binary.LittleEndian.Uint64(src[pos:]) << (n & 63)
		pos += int((63 - n) >> 3)
		n |= 56
		e = dist[bits&(1<<distBits-1)]
		if e&flagSpecial != 0 {
			if e&flagLink != 0 {
				bits >>= distBits
				n -= distBits
				e = dist[e>>16+uint32(bits)&(1<<(e>>8&15)-1)]
			}
			if e&flagSpecial != 0 {
				ok = false
				break
			}
		}
		distance := int(e>>16) + int(bits&(1<<(e&63)-1)>>(e>>8&15))
		bits >>= e & 63
		n -= uint(e & 63)
		if distance > have+out {
			ok = false
			break
		}
		from := out - distance
		if from < 0 {
			from += size
			if from+length > size {
				g.pos = out
				g.repeat(distance, length)
				out = g.pos
				continue
			}
		}
		switch {
		case distance >= 16:
			*(*[16]byte)(dst[out:]) = *(*[16]byte)(dst[from:])
			for i := 16; i < length; i += 16 {
				*(*[16]byte)(dst[out+i:]) = *(*[16]byte)(dst[from+i:])
			}
		case distance >= 8:
			for i := 0; i < length; i += 8 {
				*(*[8]byte)(dst[out+i:]) = *(*[8]byte)(dst[from+i:])
			}
		case distance == 1:
			v := uint64(dst[from]) * 0x0101010101010101
			for i := 0; i < length; i += 8 {
				binary.LittleEndian.PutUint64(dst[out+i:], v)
			}
		default:
			g.pos = out
			g.repeat(distance, length)
			out = g.pos
			continue loop
		}
		out += length
	}
	in.off += int64(pos - in.pos)
	in.pos, d.bits, d.n = pos, bits, n
	g.pos = out
	return done, ok
}
