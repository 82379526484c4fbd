// Package inflate unpacks deflate (RFC 1951) and zlib (RFC 1950) data from one buffer into one buffer. The streaming
// decoders that exist keep a window and stop at every byte of input; the clusters and grains of a disk image are wholly
// in memory on both sides, so none of that is needed here, and import speed is the speed of this loop.
//
// The input is hostile. Everything is bounds-checked by the language; there is no unsafe code, and no allocation.
package inflate

import (
	"encoding/binary"
	"errors"
	"hash/adler32"
)

// A table entry holds, from the low bit:
//
//	0..7    bits to consume: code length plus extra bits
//	8..11   code length; in a link, the index bits of its subtable
//	13      end of block
//	14      link to a subtable
//	15      set for end of block, link and invalid code: everything that is not plain
//	16..30  literal, base of the length or distance, or start of the subtable
//	31      literal
const (
	litBits  = 11
	distBits = 8
	preBits  = 7

	flagEnd     = 1 << 13
	flagLink    = 1 << 14
	flagSpecial = 1 << 15
	flagLiteral = 1 << 31
	badCode     = flagSpecial

	// The most entries that any valid code needs at those index bits (zlib's "enough" program).
	litTable  = 2342
	distTable = 402

	// The fast loop stays this far from the ends: two refills of 8 bytes; three literals, a match and its overshoot.
	inMargin  = 16
	outMargin = 3 + 258 + 16
)

var (
	errData  = errors.New("bad deflate data")
	errShort = errors.New("deflate data ends too early")
	errZlib  = errors.New("it has no zlib header")
	// ErrLong is for input that unpacks to more than it may.
	ErrLong     = errors.New("it unpacks to more than it may")
	errChecksum = errors.New("its checksum does not match its content")

	litEntries  = makeLitEntries()
	distEntries = makeDistEntries()
	preEntries  = makePreEntries()
	preOrder    = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}
)

// makeLitEntries gives each literal/length symbol its entry, without the code's length.
func makeLitEntries() (t [288]uint32) {
	for i := range uint32(256) {
		t[i] = flagLiteral | i<<16
	}
	t[256] = flagSpecial | flagEnd
	base := uint32(3)
	for i := uint32(257); i < 285; i++ {
		extra := uint32(0)
		if i >= 265 {
			extra = (i - 261) / 4
		}
		t[i] = base<<16 | extra
		base += 1 << extra
	}
	t[285] = 258 << 16
	t[286], t[287] = badCode, badCode
	return t
}

func makeDistEntries() (t [32]uint32) {
	base := uint32(1)
	for i := range uint32(30) {
		extra := uint32(0)
		if i >= 4 {
			extra = i/2 - 1
		}
		t[i] = base<<16 | extra
		base += 1 << extra
	}
	t[30], t[31] = badCode, badCode
	return t
}

func makePreEntries() (t [19]uint32) {
	for i := range t {
		t[i] = uint32(i) << 16
	}
	return t
}

// Decoder holds the tables of one decoder. It serves one call at a time.
type Decoder struct {
	lit   [litTable]uint32
	dist  [distTable]uint32
	pre   [1 << preBits]uint32
	lens  [288 + 32]uint8
	fixed bool // the tables hold the fixed codes
}

// bitReader is the state of the input: the next n bits of src, from pos on, are in buf.
type bitReader struct {
	src []byte
	pos int
	buf uint64
	n   uint
}

// fill makes at least 56 bits available, or all there are.
func (b *bitReader) fill() {
	if b.pos+8 <= len(b.src) {
		b.buf |= binary.LittleEndian.Uint64(b.src[b.pos:]) << (b.n & 63)
		b.pos += int((63 - b.n) >> 3)
		b.n |= 56
		return
	}
	for b.n < 56 && b.pos < len(b.src) {
		b.buf |= uint64(b.src[b.pos]) << b.n
		b.pos++
		b.n += 8
	}
}

// used is how many bytes of src are consumed, the one that is begun included.
func (b *bitReader) used() int { return b.pos - int(b.n>>3) }

// take consumes n bits, which must be at most 32.
func (b *bitReader) take(n uint) (uint32, bool) {
	if b.n < n {
		if b.fill(); b.n < n {
			return 0, false
		}
	}
	v := uint32(b.buf & (1<<n - 1))
	b.buf >>= n
	b.n -= n
	return v, true
}

// Fill fills dst from src, whatever follows. Used is the length of the deflate data, or 0 where that does not end with
// dst.
func (d *Decoder) Fill(dst, src []byte) (used int, err error) {
	b := bitReader{src: src}
	n, ended, err := d.run(&b, dst)
	switch {
	case err != nil:
		return 0, err
	case n < len(dst):
		return 0, errShort
	case !ended:
		return 0, nil
	}
	return b.used(), nil
}

// Zlib unpacks the zlib stream at the start of src into dst, which has to have room for all of it, and compares its
// checksum. It returns how many bytes of dst it made, and used of src.
func (d *Decoder) Zlib(dst, src []byte) (n, used int, err error) {
	// Deflate with a window of at most 32 KiB, and no dictionary.
	if len(src) < 2 || src[0]&15 != 8 || src[0]>>4 > 7 || src[1]&32 != 0 || binary.BigEndian.Uint16(src)%31 != 0 {
		return 0, 0, errZlib
	}
	b := bitReader{src: src[2:]}
	n, ended, err := d.run(&b, dst)
	if err != nil {
		return n, 0, err
	}
	if !ended {
		return n, 0, ErrLong
	}
	used = 2 + b.used()
	if len(src)-used < 4 {
		return n, 0, errShort
	}
	if binary.BigEndian.Uint32(src[used:]) != adler32.Checksum(dst[:n]) {
		return n, 0, errChecksum
	}
	return n, used + 4, nil
}

// run decodes blocks to the end of the data, or until dst is full and it does not end there.
func (d *Decoder) run(b *bitReader, dst []byte) (out int, ended bool, err error) {
	for {
		head, ok := b.take(3)
		if !ok {
			err = errShort
		} else {
			ended = true
			switch head >> 1 {
			case 0:
				out, ended, err = stored(b, dst, out)
			case 1:
				d.useFixed()
				out, ended, err = d.block(b, dst, out)
			case 2:
				if err = d.readCodes(b); err == nil {
					out, ended, err = d.block(b, dst, out)
				}
			default:
				err = errData
			}
		}
		switch {
		case err != nil && out == len(dst):
			return out, false, nil
		case err != nil || !ended:
			return out, false, err
		case head&1 != 0:
			return out, true, nil
		}
	}
}

// stored copies a block that is not compressed. It reports whether there was room for all of it.
func stored(b *bitReader, dst []byte, out int) (int, bool, error) {
	// Whole bytes that are in the bit buffer go back to the source.
	b.pos = b.used()
	b.buf, b.n = 0, 0
	if len(b.src)-b.pos < 4 {
		return out, false, errShort
	}
	n := int(binary.LittleEndian.Uint16(b.src[b.pos:]))
	if n != int(^binary.LittleEndian.Uint16(b.src[b.pos+2:])) {
		return out, false, errData
	}
	b.pos += 4
	all := n <= len(dst)-out
	n = min(n, len(dst)-out)
	if len(b.src)-b.pos < n {
		return out, false, errShort
	}
	copy(dst[out:out+n], b.src[b.pos:])
	b.pos += n
	return out + n, all, nil
}

func (d *Decoder) useFixed() {
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
func (d *Decoder) readCodes(b *bitReader) error {
	d.fixed = false
	head, ok := b.take(14)
	if !ok {
		return errShort
	}
	nlit, ndist, npre := int(head&31)+257, int(head>>5&31)+1, int(head>>10)+4
	if nlit > 286 || ndist > 30 {
		return errData
	}
	var pre [19]uint8
	for i := range npre {
		v, ok := b.take(3)
		if !ok {
			return errShort
		}
		pre[preOrder[i]] = uint8(v)
	}
	if !build(d.pre[:], pre[:], preEntries[:], preBits) {
		return errData
	}
	lens := d.lens[:nlit+ndist]
	for i := 0; i < len(lens); {
		b.fill()
		e := d.pre[b.buf&(1<<preBits-1)]
		n := uint(e & 0xff)
		if e&flagSpecial != 0 {
			return errData
		}
		if n > b.n {
			return errShort
		}
		b.buf >>= n
		b.n -= n
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
				return errData
			}
			last, extra, repeat = lens[i-1], 2, 3
		case 17:
			extra, repeat = 3, 3
		}
		v, ok := b.take(extra)
		if !ok {
			return errShort
		}
		repeat += int(v)
		if repeat > len(lens)-i {
			return errData
		}
		for range repeat {
			lens[i] = last
			i++
		}
	}
	// A block that cannot end is no block.
	if lens[256] == 0 || !build(d.lit[:], lens[:nlit], litEntries[:], litBits) ||
		!build(d.dist[:], lens[nlit:], distEntries[:], distBits) {
		return errData
	}
	return nil
}

// build makes the decoding table of the canonical code with these lengths. It reports whether the code is one: not
// over-subscribed, and complete unless it has at most one code, of one bit.
func build(table []uint32, lens []uint8, entries []uint32, tableBits uint) bool {
	var count, next [16]int
	for _, l := range lens {
		count[l]++
	}
	count[0] = 0
	most := uint(15)
	for most > 0 && count[most] == 0 {
		most--
	}
	code, left := 0, 1
	for l := 1; l <= 15; l++ {
		left = left<<1 - count[l]
		if left < 0 {
			return false
		}
		code = (code + count[l-1]) << 1
		next[l] = code
	}
	if left > 0 {
		if most > 1 || tableBits == preBits {
			return false
		}
		for i := range table[:1<<tableBits] {
			table[i] = badCode
		}
	}
	// Symbols in the order of their codes: by length, then by number.
	var sorted [288]uint16
	var at [16]int
	for l := 1; l < 15; l++ {
		at[l+1] = at[l] + count[l]
	}
	for sym, l := range lens {
		if l != 0 {
			sorted[at[l]] = uint16(sym)
			at[l]++
		}
	}
	i := 0
	for l := uint(1); l <= min(most, tableBits); l++ {
		for range count[l] {
			e := entries[sorted[i]] + uint32(l) + uint32(l)<<8
			for j := reverse(next[l], l); j < 1<<tableBits; j += 1 << l {
				table[j] = e
			}
			next[l]++
			i++
		}
	}
	// Longer codes go to subtables, one per prefix of tableBits; codes with one prefix follow each other.
	end, prefix, start, subBits := 1<<tableBits, -1, 0, uint(0)
	for l := tableBits + 1; l <= most; l++ {
		for k := count[l]; k > 0; k-- {
			rev := reverse(next[l], l)
			if p := rev & (1<<tableBits - 1); p != prefix {
				prefix, start = p, end
				// The subtable is as large as it must be to use up the code space of its prefix.
				subBits = l - tableBits
				for room := 1<<subBits - k; room > 0 && subBits+tableBits < most; {
					subBits++
					room = room<<1 - count[subBits+tableBits]
				}
				end += 1 << subBits
				if end > len(table) {
					return false
				}
				table[prefix] = flagSpecial | flagLink | uint32(start)<<16 | uint32(subBits)<<8 | uint32(tableBits)
			}
			rest := l - tableBits
			e := entries[sorted[i]] + uint32(rest) + uint32(rest)<<8
			for j := rev >> tableBits; j < 1<<subBits; j += 1 << rest {
				table[start+j] = e
			}
			next[l]++
			i++
		}
	}
	return true
}

func reverse(code int, n uint) int {
	r := 0
	for range n {
		r = r<<1 | code&1
		code >>= 1
	}
	return r
}

// block decodes one compressed block. It reports whether it came to the block's end, and not only to that of dst.
func (d *Decoder) block(b *bitReader, dst []byte, out int) (int, bool, error) {
	out, done, err := d.fast(b, dst, out)
	if done || err != nil {
		return out, done, err
	}
	for {
		b.fill()
		e := d.lit[b.buf&(1<<litBits-1)]
		if e&flagLink != 0 {
			if b.n < litBits {
				return out, false, errShort
			}
			b.buf >>= litBits
			b.n -= litBits
			e = d.lit[e>>16+uint32(b.buf)&(1<<(e>>8&15)-1)]
		}
		n := uint(e & 0xff)
		if n > b.n {
			return out, false, errShort
		}
		saved := b.buf
		b.buf >>= n & 63
		b.n -= n
		if e&flagLiteral != 0 {
			if out == len(dst) {
				return out, false, nil
			}
			dst[out] = byte(e >> 16)
			out++
			continue
		}
		if e&flagSpecial != 0 {
			if e&flagEnd != 0 {
				return out, true, nil
			}
			return out, false, errData
		}
		length := int(e>>16) + int(saved&(1<<(n&63)-1)>>(e>>8&15))
		b.fill()
		e = d.dist[b.buf&(1<<distBits-1)]
		if e&flagLink != 0 {
			if b.n < distBits {
				return out, false, errShort
			}
			b.buf >>= distBits
			b.n -= distBits
			e = d.dist[e>>16+uint32(b.buf)&(1<<(e>>8&15)-1)]
		}
		if e&flagSpecial != 0 {
			return out, false, errData
		}
		n = uint(e & 0xff)
		if n > b.n {
			return out, false, errShort
		}
		distance := int(e>>16) + int(b.buf&(1<<(n&63)-1)>>(e>>8&15))
		b.buf >>= n & 63
		b.n -= n
		if distance > out {
			return out, false, errData
		}
		all := length <= len(dst)-out
		for length = min(length, len(dst)-out); length > 0; length-- {
			dst[out] = dst[out-distance]
			out++
		}
		if !all {
			return out, false, nil
		}
	}
}

// fast decodes while it is far from both ends. It reports whether the block ended.
func (d *Decoder) fast(b *bitReader, dst []byte, out int) (int, bool, error) {
	src, pos, buf, n := b.src, b.pos, b.buf, b.n
	inEnd, outEnd := len(src)-inMargin, len(dst)-outMargin
	lit, dist := &d.lit, &d.dist
	done := false
	var err error
	for pos <= inEnd && out <= outEnd {
		buf |= binary.LittleEndian.Uint64(src[pos:]) << (n & 63)
		pos += int((63 - n) >> 3)
		n |= 56
		e := lit[buf&(1<<litBits-1)]
		if e&flagLiteral != 0 {
			buf >>= e & 63
			n -= uint(e & 63)
			dst[out] = byte(e >> 16)
			out++
			e = lit[buf&(1<<litBits-1)]
			if e&flagLiteral != 0 {
				buf >>= e & 63
				n -= uint(e & 63)
				dst[out] = byte(e >> 16)
				out++
				e = lit[buf&(1<<litBits-1)]
				if e&flagLiteral != 0 {
					buf >>= e & 63
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
				buf >>= litBits
				n -= litBits
				e = lit[e>>16+uint32(buf)&(1<<(e>>8&15)-1)]
				if e&flagLiteral != 0 {
					buf >>= e & 63
					n -= uint(e & 63)
					dst[out] = byte(e >> 16)
					out++
					continue
				}
			}
			if e&flagSpecial != 0 {
				if e&flagEnd != 0 {
					buf >>= e & 63
					n -= uint(e & 63)
					done = true
				} else {
					err = errData
				}
				break
			}
		}
		length := int(e>>16) + int(buf&(1<<(e&63)-1)>>(e>>8&15))
		buf >>= e & 63
		n -= uint(e & 63)

		buf |= binary.LittleEndian.Uint64(src[pos:]) << (n & 63)
		pos += int((63 - n) >> 3)
		n |= 56
		e = dist[buf&(1<<distBits-1)]
		if e&flagSpecial != 0 {
			if e&flagLink != 0 {
				buf >>= distBits
				n -= distBits
				e = dist[e>>16+uint32(buf)&(1<<(e>>8&15)-1)]
			}
			if e&flagSpecial != 0 {
				err = errData
				break
			}
		}
		distance := int(e>>16) + int(buf&(1<<(e&63)-1)>>(e>>8&15))
		buf >>= e & 63
		n -= uint(e & 63)
		if distance > out {
			err = errData
			break
		}
		from := out - distance
		switch {
		case distance >= 16 && length <= 16:
			*(*[16]byte)(dst[out:]) = *(*[16]byte)(dst[from:])
		case distance >= length:
			copy(dst[out:out+length], dst[from:from+length])
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
			// Double what is there until it is long enough to copy.
			to := dst[out : out+length]
			for done := copy(to, dst[from:out]); done < length; {
				done += copy(to[done:], dst[from:out+done])
			}
		}
		out += length
	}
	b.pos, b.buf, b.n = pos, buf, n
	return out, done, err
}
