package archive

import (
	"encoding/binary"
	"math/bits"
)

// copySlack is how far copies may read and write beyond their end.
const copySlack = 64

// sequence is a run of literals, and a copy of what came so far before.
type sequence struct {
	run, length, distance uint32
}

// seqDecoder decodes the second part of blocks.
type seqDecoder struct {
	reps [3]uint32
	ll   table
	of   table
	ml   table
}

// table is the current table of an alphabet; states is nil at the start of a frame.
type table struct {
	*states
	own states
}

func (d *seqDecoder) reset() {
	d.reps = [3]uint32{1, 4, 8}
	d.ll.states, d.of.states, d.ml.states = nil, nil, nil
}

// pick makes the table that the mode asks for, and tells how much of p it took.
func (t *table) pick(s *symbols, mode byte, p []byte) (n int, ok bool) {
	switch mode {
	case 0:
		t.states = s.std
		return 0, true
	case 1:
		if len(p) < 1 || !t.own.one(s, p[0]) {
			return 0, false
		}
		t.states = &t.own
		return 1, true
	case 2:
		n, ok = t.own.read(s, p)
		t.states = &t.own
		return n, ok
	}
	return 0, t.states != nil
}

// decode appends the sequences of block, which start at byte at, to seqs. Together with the literals that are left they
// make size bytes, which is at most most. There is something, no matter what, in the 8 bytes before at.
func (d *seqDecoder) decode(seqs []sequence, block []byte, at, literals, most int) (_ []sequence, size int, ok bool) {
	p := block[at:]
	if len(p) < 1 {
		return seqs, 0, false
	}
	n := int(p[0])
	used := 1
	switch {
	case n == 255:
		if len(p) < 3 {
			return seqs, 0, false
		}
		n, used = int(binary.LittleEndian.Uint16(p[1:]))+0x7f00, 3
	case n >= 128:
		if len(p) < 2 {
			return seqs, 0, false
		}
		n, used = (n-128)<<8+int(p[1]), 2
	}
	p = p[used:]
	if n == 0 {
		return seqs, literals, len(p) == 0
	}
	if len(p) < 1 || p[0]&3 != 0 {
		return seqs, 0, false
	}
	modes := p[0]
	p = p[1:]
	for i, t := range []*table{&d.ll, &d.of, &d.ml} {
		k, ok := t.pick([]*symbols{litLengths, offsets, matchLengths}[i], modes>>(6-2*i)&3, p)
		if !ok {
			return seqs, 0, false
		}
		p = p[k:]
	}
	if len(p) == 0 || p[len(p)-1] == 0 {
		return seqs, 0, false
	}
	left := 8*len(p) - 9 + bits.Len8(p[len(p)-1])
	if cap(seqs)-len(seqs) < n {
		seqs = append(make([]sequence, 0, len(seqs)+n), seqs...)
	}
	out := seqs[len(seqs) : len(seqs)+n]
	runs, lengths, ok := d.sequences(out, block[len(block)-len(p)-8:], left)
	if !ok || runs > literals || literals+lengths > most {
		return seqs, 0, false
	}
	return seqs[:len(seqs)+n], literals + lengths, true
}

// sequences decodes into out, and gives the sums of the runs and of the lengths.
func (d *seqDecoder) sequences(out []sequence, src []byte, left int) (runs, lengths int, ok bool) {
	// What is left of src are the bits below left, behind its first 8 bytes; the next ones are at the top of c. Of the 57
	// bits that are there at least, the next states take 9, 9 and 8.
	const room = 57 - 9 - 9 - 8
	llT, ofT, mlT := &d.ll.t, &d.of.t, &d.ml.t
	c := peekBits(src, left)
	ll := c >> 1 >> (63 - d.ll.log)
	c <<= d.ll.log
	of := c >> 1 >> (63 - d.of.log)
	c <<= d.of.log
	ml := c >> 1 >> (63 - d.ml.log)
	left -= int(d.ll.log + d.of.log + d.ml.log)
	rep0, rep1, rep2 := d.reps[0], d.reps[1], d.reps[2]
	for i := range out {
		if left < 0 {
			return 0, 0, false
		}
		c = peekBits(src, left)
		llE, ofE, mlE := llT[ll&(maxStates-1)], ofT[of&(maxStates-1)], mlT[ml&(maxStates-1)]
		llBits, ofBits, mlBits := uint(llE>>8)&0xff, uint(ofE>>8)&0xff, uint(mlE>>8)&0xff
		value := uint32(ofE>>32) + uint32(c>>1>>((63-ofBits)&63))
		c <<= ofBits & 63
		left -= int(ofBits)
		if ofBits+mlBits+llBits > room {
			if left < 0 {
				return 0, 0, false
			}
			c = peekBits(src, left)
		}
		length := uint32(mlE>>32) + uint32(c>>1>>((63-mlBits)&63))
		c <<= mlBits & 63
		run := uint32(llE>>32) + uint32(c>>1>>((63-llBits)&63))
		c <<= llBits & 63
		left -= int(mlBits + llBits)
		if mlBits+llBits > room {
			if left < 0 {
				return 0, 0, false
			}
			c = peekBits(src, left)
		}
		if i < len(out)-1 {
			nb := uint(llE & 0xff)
			ll = llE>>16&0xffff + c>>1>>((63-nb)&63)
			c <<= nb & 63
			left -= int(nb)
			nb = uint(mlE & 0xff)
			ml = mlE>>16&0xffff + c>>1>>((63-nb)&63)
			c <<= nb & 63
			left -= int(nb)
			nb = uint(ofE & 0xff)
			of = ofE>>16&0xffff + c>>1>>((63-nb)&63)
			left -= int(nb)
		}
		if value > 3 {
			rep0, rep1, rep2 = value-3, rep0, rep1
		} else {
			if run == 0 {
				value++
			}
			switch value {
			case 1:
			case 2:
				rep0, rep1 = rep1, rep0
			case 3:
				rep0, rep1, rep2 = rep2, rep0, rep1
			default:
				rep0, rep1, rep2 = rep0-1, rep0, rep1
			}
		}
		out[i] = sequence{run, length, rep0}
		runs += int(run)
		lengths += int(length)
	}
	d.reps = [3]uint32{rep0, rep1, rep2}
	return runs, lengths, left == 0
}

// peekBits gives the 57 or more bits below left at the top of a word.
func peekBits(src []byte, left int) uint64 {
	return binary.LittleEndian.Uint64(src[(left+7)>>3:]) << (uint(-left) & 7)
}

var errDistance = corrupt("zstd: the packed data are damaged")

// execute does sequences, and appends what is left of the literals. A distance that reaches beyond what is there or the
// window is an error. Behind the literals there is copySlack; the runs are of at most that many literals.
func (g *ring) execute(seqs []sequence, lit []byte, window int) error {
	b, pos, size := g.b, g.pos, g.size
	have := int(g.have) - g.sent
	at := 0
	for i := range seqs {
		run, length, distance := int(seqs[i].run), int(seqs[i].length), int(seqs[i].distance)
		to := b[pos : pos+run+length+copySlack]
		from := lit[at : at+run+copySlack]
		*(*[32]byte)(to) = *(*[32]byte)(from)
		for k := 32; k < run; k += 32 {
			*(*[32]byte)(to[k:]) = *(*[32]byte)(from[k:])
		}
		at += run
		pos += run
		if distance > have+pos || distance > window || distance == 0 {
			return errDistance
		}
		back := pos - distance
		if back < 0 {
			if distance > g.near {
				g.pos = pos
				if err := g.fetch(distance, length); err != nil {
					return err
				}
				pos = g.pos
				continue
			}
			back += size
			if back+length > size {
				g.pos = pos
				g.repeat(distance, length)
				pos = g.pos
				continue
			}
		}
		to = to[run:]
		from = b[back : back+length+copySlack]
		switch {
		case distance >= 16:
			// Not 32 at once: the second 16 may be copies of the first.
			*(*[16]byte)(to) = *(*[16]byte)(from)
			*(*[16]byte)(to[16:]) = *(*[16]byte)(from[16:])
			for k := 32; k < length; k += 16 {
				*(*[16]byte)(to[k:]) = *(*[16]byte)(from[k:])
			}
			pos += length
		case distance >= 8:
			for k := 0; k < length; k += 8 {
				*(*[8]byte)(to[k:]) = *(*[8]byte)(from[k:])
			}
			pos += length
		default:
			g.pos = pos
			g.repeat(distance, length)
			pos = g.pos
		}
	}
	g.pos = pos + copy(b[pos:], lit[at:len(lit)-copySlack])
	return nil
}
