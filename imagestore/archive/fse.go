package archive

import "math/bits"

// The tables that sequences are decoded with (RFC 8878, 4.1). An entry holds, from the low bit:
//
//	0..7    bits that choose the next state
//	8..15   extra bits of the value
//	16..31  the next state, before those bits
//	32..63  the value, before its extra bits
const (
	maxStates = 512
)

// symbols is one of the three alphabets of sequences.
type symbols struct {
	log      uint // of the most states
	value    []uint64
	standard []int16 // the counts of the predefined table
	stdLog   uint
	std      *states
}

type states struct {
	t   [maxStates]uint64
	log uint
}

var (
	litLengths = &symbols{log: 9, stdLog: 6,
		value: values(0, 16, []uint8{1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}),
		standard: []int16{4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1,
			-1, -1, -1, -1}}
	matchLengths = &symbols{log: 9, stdLog: 6,
		value: values(3, 32, []uint8{1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}),
		standard: []int16{1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
			1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1}}
	offsets = &symbols{log: 8, stdLog: 5,
		value:    offsetValues(),
		standard: []int16{1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1}}
)

func init() {
	for _, s := range []*symbols{litLengths, matchLengths, offsets} {
		s.std = new(states)
		s.std.build(s, s.standard, s.stdLog)
	}
}

// values are those of an alphabet: plain ones from first on, then ranges of so many bits.
func values(first uint64, plain int, extra []uint8) []uint64 {
	var v []uint64
	next := first
	for range plain {
		v = append(v, next<<32)
		next++
	}
	for _, e := range extra {
		v = append(v, next<<32|uint64(e)<<8)
		next += 1 << e
	}
	return v
}

func offsetValues() []uint64 {
	var v []uint64
	for n := range uint64(32) {
		v = append(v, 1<<n<<32|n<<8)
	}
	return v
}

// build makes the table of a distribution; counts add up to 1<<log, where -1 is less than one.
func (st *states) build(s *symbols, counts []int16, log uint) {
	st.log = log
	size := 1 << log
	high := size - 1
	var next [64]uint16
	var sym [maxStates]uint8
	for i, c := range counts {
		next[i] = uint16(c)
		if c == -1 {
			sym[high] = uint8(i)
			high--
			next[i] = 1
		}
	}
	pos, step := 0, size>>1+size>>3+3
	for i, c := range counts {
		for range c {
			sym[pos] = uint8(i)
			for {
				if pos = (pos + step) & (size - 1); pos <= high {
					break
				}
			}
		}
	}
	for i := range size {
		y := sym[i]
		n := next[y]
		next[y]++
		nb := log + 1 - uint(bits.Len16(n))
		st.t[i] = s.value[y] | uint64(n<<nb-uint16(size))<<16 | uint64(nb)
	}
}

// one makes the table of a single value, which takes no bits.
func (st *states) one(s *symbols, sym byte) bool {
	if int(sym) >= len(s.value) {
		return false
	}
	st.log, st.t[0] = 0, s.value[sym]
	return true
}

// read makes the table that p starts with, and tells how long its description is.
func (st *states) read(s *symbols, p []byte) (n int, ok bool) {
	at := uint(0) // in bits; what is beyond the end is zero
	peek := func() uint32 {
		v := uint32(0)
		for i := range uint(4) {
			if k := at/8 + i; k < uint(len(p)) {
				v |= uint32(p[k]) << (8 * i)
			}
		}
		return v >> (at & 7)
	}
	log := uint(peek()&15) + 5
	at += 4
	if log > s.log {
		return 0, false
	}
	var counts [64]int16
	left, i := 1<<log, 0
	for left > 0 && i < len(s.value) {
		// A count of up to left, plus one for "less than one": small ones take a bit less.
		n := uint(bits.Len(uint(left + 1)))
		v := int(peek() & (1<<n - 1))
		spare := 1<<n - 1 - (left + 1)
		if low := v & (1<<(n-1) - 1); low < spare {
			v, n = low, n-1
		} else if v >= 1<<(n-1) {
			v -= spare
		}
		at += n
		c := v - 1
		counts[i] = int16(c)
		i++
		left -= max(c, -c)
		if left < 0 {
			return 0, false
		}
		for c == 0 {
			zeros := int(peek() & 3)
			at += 2
			if i += zeros; i > len(s.value) {
				return 0, false
			}
			if zeros < 3 {
				break
			}
		}
	}
	n = int(at+7) / 8
	if left != 0 || n > len(p) {
		return 0, false
	}
	st.build(s, counts[:i], log)
	return n, true
}
