package inflate

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
	// How many bits of input index the tables.
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
	litEntries  = makeLitEntries()
	distEntries = makeDistEntries()
	preEntries  = makePreEntries()
	preOrder    = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}
)

// makeLitEntries returns the entry of each literal/length symbol, without the length of its code.
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

// codes are the prefix codes of a block, as tables.
type codes struct {
	lit   [litTable]uint32
	dist  [distTable]uint32
	pre   [1 << preBits]uint32
	lens  [288 + 32]uint8
	isFix bool // the tables hold the fixed codes
}

// loadFixed loads the codes of a block without codes of its own.
func (c *codes) loadFixed() {
	if c.isFix {
		return
	}
	l := &c.lens
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
	buildTable(c.lit[:], l[:288], litEntries[:], litBits)
	for i := range 32 {
		l[i] = 5
	}
	buildTable(c.dist[:], l[:32], distEntries[:], distBits)
	c.isFix = true
}

// readDynamic reads the head of a dynamic block and builds its tables.
func (c *codes) readDynamic(b *bitReader) error {
	c.isFix = false
	head, ok := b.takeBits(14)
	if !ok {
		return ErrShort
	}
	nlit, ndist, npre := int(head&31)+257, int(head>>5&31)+1, int(head>>10)+4
	if nlit > 286 || ndist > 30 {
		return errData
	}
	var pre [19]uint8
	for i := range npre {
		v, ok := b.takeBits(3)
		if !ok {
			return ErrShort
		}
		pre[preOrder[i]] = uint8(v)
	}
	if !buildTable(c.pre[:], pre[:], preEntries[:], preBits) {
		return errData
	}
	lens := c.lens[:nlit+ndist]
	for i := 0; i < len(lens); {
		b.fillBits()
		e := c.pre[b.buf&(1<<preBits-1)]
		n := uint(e & 0xff)
		if e&flagSpecial != 0 {
			return errData
		}
		if n > b.n {
			return ErrShort
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
		v, ok := b.takeBits(extra)
		if !ok {
			return ErrShort
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
	if lens[256] == 0 {
		return errEndless
	}
	if !buildTable(c.lit[:], lens[:nlit], litEntries[:], litBits) ||
		!buildTable(c.dist[:], lens[nlit:], distEntries[:], distBits) {
		return errData
	}
	return nil
}

// buildTable makes the decoding table of the canonical code with these lengths. buildTable reports whether the code is
// valid: not over-subscribed, and complete unless it has at most one code, of one bit.
func buildTable(table []uint32, lens []uint8, entries []uint32, tableBits uint) bool {
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
			for j := reverseBits(next[l], l); j < 1<<tableBits; j += 1 << l {
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
			rev := reverseBits(next[l], l)
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

func reverseBits(code int, n uint) int {
	r := 0
	for range n {
		r = r<<1 | code&1
		code >>= 1
	}
	return r
}
