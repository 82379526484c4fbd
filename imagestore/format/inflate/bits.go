package inflate

import "encoding/binary"

// bitReader reads input as bits: the next n bits are in buf, from the low end; the bits behind them are in src, from
// pos on. align can return up to 7 bytes to src.
type bitReader struct {
	src []byte
	pos int
	buf uint64
	n   uint
}

// fillBits loads at least 56 bits, or all remaining bits.
func (b *bitReader) fillBits() {
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

// align advances to the next whole byte and returns whole bytes in buf to src.
func (b *bitReader) align() {
	b.pos -= int(b.n >> 3)
	b.buf, b.n = 0, 0
}

// takeBits consumes n bits, at most 32.
func (b *bitReader) takeBits(n uint) (uint32, bool) {
	if b.n < n {
		if b.fillBits(); b.n < n {
			return 0, false
		}
	}
	v := uint32(b.buf & (1<<n - 1))
	b.buf >>= n
	b.n -= n
	return v, true
}
