package inflate

import "encoding/binary"

// Bits is input as bits: the next N of them are in Buf, from the low end, and what follows is in Src, from Pos on. Up
// to 7 bytes before Pos may be gone back to.
type Bits struct {
	Src  []byte
	Pos  int
	Buf  uint64
	N    uint
	More bool // something may follow Src
}

// has reports whether Src has n more bytes, or nothing follows it.
func (b *Bits) has(n int) bool { return !b.More || len(b.Src)-b.Pos >= n }

// fill makes at least 56 bits available, or all there are.
func (b *Bits) fill() {
	if b.Pos+8 <= len(b.Src) {
		b.Buf |= binary.LittleEndian.Uint64(b.Src[b.Pos:]) << (b.N & 63)
		b.Pos += int((63 - b.N) >> 3)
		b.N |= 56
		return
	}
	for b.N < 56 && b.Pos < len(b.Src) {
		b.Buf |= uint64(b.Src[b.Pos]) << b.N
		b.Pos++
		b.N += 8
	}
}

// align goes to the next whole byte, and gives those that are in Buf back to Src.
func (b *Bits) align() {
	b.Pos = b.used()
	b.Buf, b.N = 0, 0
}

// used is how many bytes of src are consumed, the one that is begun included.
func (b *Bits) used() int { return b.Pos - int(b.N>>3) }

// Take consumes n bits, which must be at most 32.
func (b *Bits) Take(n uint) (uint32, bool) {
	if b.N < n {
		if b.fill(); b.N < n {
			return 0, false
		}
	}
	v := uint32(b.Buf & (1<<n - 1))
	b.Buf >>= n
	b.N -= n
	return v, true
}
