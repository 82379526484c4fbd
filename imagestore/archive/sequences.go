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
	t    tables
	have [3]bool // which of them were sent since the frame began
	how  [3]struct {
		mode byte
		b    []byte // how each was described
	}
}

// tables are the current ones of the three alphabets, by its number.
type tables [3]states

const (
	literalLength = iota
	offset
	matchLength
)

var alphabets = [3]*symbols{litLengths, offsets, matchLengths}

func (d *seqDecoder) reset() {
	d.reps = [3]uint32{1, 4, 8}
	d.have = [3]bool{}
}

// pick makes the table that the mode asks for, and tells how much of p it took.
func (d *seqDecoder) pick(which int, mode byte, p []byte) (n int, ok bool) {
	s, t := alphabets[which], &d.t[which]
	switch mode {
	case 0:
		*t = *s.std
		ok = true
	case 1:
		n, ok = 1, len(p) > 0 && t.one(s, p[0])
	case 2:
		n, ok = t.read(s, p)
	default:
		return 0, d.have[which]
	}
	d.have[which] = ok
	if ok {
		d.how[which].mode, d.how[which].b = mode, append(d.how[which].b[:0], p[:n]...)
	}
	return n, ok
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
	for which := range alphabets {
		k, ok := d.pick(which, modes>>(6-2*which)&3, p)
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
	if !d.t.sequences(out, block[len(block)-len(p)-8:], left) {
		return seqs, 0, false
	}
	runs, lengths := d.repeats(out)
	if runs > literals || literals+lengths > most {
		return seqs, 0, false
	}
	return seqs[:len(seqs)+n], literals + lengths, true
}

// sequences decodes into out, with distances as they are in the format: 1 to 3 are repeats. It does no more than it
// must, for what it works with is just about what the processor has registers for.
func (t *tables) sequences(out []sequence, src []byte, left int) bool {
	// What is left of src are the bits below left, behind its first 8 bytes; the next ones are at the top of c. Of the 57
	// bits that are there at least, the next states take 9, 9 and 8.
	const room = 57 - 9 - 9 - 8
	c := peekBits(src, left)
	ll := c >> 1 >> (63 - t[literalLength].log)
	c <<= t[literalLength].log
	of := c >> 1 >> (63 - t[offset].log)
	c <<= t[offset].log
	ml := c >> 1 >> (63 - t[matchLength].log)
	left -= int(t[literalLength].log + t[offset].log + t[matchLength].log)
	for i := range out {
		if left < 0 {
			return false
		}
		c = peekBits(src, left)
		llE, ofE, mlE := t[literalLength].t[ll%maxStates], t[offset].t[of%maxStates], t[matchLength].t[ml%maxStates]
		llBits, ofBits, mlBits := uint(uint8(llE>>8)), uint(uint8(ofE>>8)), uint(uint8(mlE>>8))
		out[i].distance = uint32(ofE>>32) + uint32(c>>1>>((63-ofBits)&63))
		c <<= ofBits & 63
		left -= int(ofBits)
		if ofBits+mlBits+llBits > room {
			if left < 0 {
				return false
			}
			c = peekBits(src, left)
		}
		out[i].length = uint32(mlE>>32) + uint32(c>>1>>((63-mlBits)&63))
		c <<= mlBits & 63
		out[i].run = uint32(llE>>32) + uint32(c>>1>>((63-llBits)&63))
		c <<= llBits & 63
		left -= int(mlBits + llBits)
		if mlBits+llBits > room {
			if left < 0 {
				return false
			}
			c = peekBits(src, left)
		}
		if i == len(out)-1 {
			break
		}
		nb := uint(uint8(llE))
		left -= int(nb)
		ll = uint64(uint16(llE>>16)) + c>>1>>((63-nb)&63)
		c <<= nb & 63
		nb = uint(uint8(mlE))
		left -= int(nb)
		ml = uint64(uint16(mlE>>16)) + c>>1>>((63-nb)&63)
		c <<= nb & 63
		nb = uint(uint8(ofE))
		left -= int(nb)
		of = uint64(uint16(ofE>>16)) + c>>1>>((63-nb)&63)
	}
	return left == 0
}

// repeats makes plain distances of repeats, and gives the sums of the runs and of the lengths.
func (d *seqDecoder) repeats(seqs []sequence) (runs, lengths int) {
	rep0, rep1, rep2 := d.reps[0], d.reps[1], d.reps[2]
	for i := range seqs {
		s := &seqs[i]
		runs += int(s.run)
		lengths += int(s.length)
		value := s.distance
		if value > 3 {
			rep0, rep1, rep2 = value-3, rep0, rep1
			s.distance = rep0
			continue
		}
		if s.run == 0 {
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
		s.distance = rep0
	}
	d.reps = [3]uint32{rep0, rep1, rep2}
	return runs, lengths
}

// peekBits gives the 57 or more bits below left at the top of a word.
func peekBits(src []byte, left int) uint64 {
	return binary.LittleEndian.Uint64(src[(left+7)>>3:]) << (uint(-left) & 7)
}

var errDistance = corrupt("zstd: the packed data are damaged")

// execute does sequences, and appends what is left of the literals. A distance that reaches beyond what is there or the
// window is an error. Behind the literals there is copySlack; the runs are of at most that many literals.
func (r *ring) execute(seqs []sequence, lit []byte, window int) error {
	b, pos, size := r.b, r.pos, r.size
	have := int(r.have) - r.sent
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
			if distance > r.near {
				r.pos = pos
				if err := r.fetch(distance, length); err != nil {
					return err
				}
				pos = r.pos
				continue
			}
			back += size
			if back+length > size {
				r.pos = pos
				r.repeat(distance, length)
				pos = r.pos
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
			r.pos = pos
			r.repeat(distance, length)
			pos = r.pos
		}
	}
	r.pos = pos + copy(b[pos:], lit[at:len(lit)-copySlack])
	return nil
}
