// Package inflate unpacks deflate (RFC 1951) and zlib (RFC 1950) data. There is one decoder, for clusters and grains of
// a disk image, which are wholly in memory on both sides (Fill, Zlib), and for streams (Next): it is given the next
// bytes of the input and a window to write to, and stops where either is used up. The streaming decoders that exist
// stop at every byte of input; import speed is the speed of this loop.
//
// The input is hostile. Everything is bounds-checked by the language; there is no unsafe code, and no allocation.
package inflate

import (
	"encoding/binary"
	"errors"
)

var (
	errData    = errors.New("bad deflate data")
	errEndless = errors.New("bad deflate data: a block has no code for its end")
	// ErrShort is for input that ends too early.
	ErrShort = errors.New("deflate data ends too early")
	errZlib  = errors.New("it has no zlib header")
	// ErrLong is for input that unpacks to more than it may.
	ErrLong     = errors.New("it unpacks to more than it may")
	errChecksum = errors.New("its checksum does not match its content")
)

// Decoder holds the tables of one decoder, and where it is. It serves one call at a time.
type Decoder struct {
	codes

	in   part
	left int  // of a stored block
	last bool // no block follows this one
}

// part is where a decoder is.
type part uint8

const (
	between part = iota // of two blocks, or before the first one
	stored              // in a block that is not compressed
	packed              // in one that is
)

// Stop is why Next came back.
type Stop uint8

// The reasons.
const (
	Full  Stop = iota // there is no more room
	Short             // there is too little input: Wants says how much it takes to go on
	Block             // a block ends here
	End               // and it was the last one; the input is at the byte behind it
)

// headSize is more than the head of any block takes, in bytes.
const headSize = 640

// Reset makes it ready for other data.
func (d *Decoder) Reset() { d.in, d.left, d.last = between, 0, false }

// Wants is how many bytes of input it takes to go on, unless there are no more.
func (d *Decoder) Wants() int {
	switch d.in {
	case between:
		return headSize
	case stored:
		return 1
	default:
		return inMargin
	}
}

// Next goes on with the data, to the end of a block, or until w is full or too little is in b.
func (d *Decoder) Next(b *Bits, w *Window) (Stop, error) {
	if !b.has(d.Wants()) {
		return Short, nil
	}
	if d.in == between {
		if err := d.head(b); err != nil {
			return Short, err
		}
	}
	var stop Stop
	var err error
	if d.in == stored {
		stop, err = d.stored(b, w)
	} else {
		stop, err = d.packed(b, w)
	}
	if stop == Block && err == nil {
		if d.in = between; d.last {
			b.align()
			return End, nil
		}
	}
	return stop, err
}

// head reads the head of a block.
func (d *Decoder) head(b *Bits) error {
	head, ok := b.Take(3)
	if !ok {
		return ErrShort
	}
	d.last = head&1 != 0
	switch head >> 1 {
	case 0:
		b.align()
		if len(b.Src)-b.Pos < 4 {
			return ErrShort
		}
		d.left = int(binary.LittleEndian.Uint16(b.Src[b.Pos:]))
		if d.left != int(^binary.LittleEndian.Uint16(b.Src[b.Pos+2:])) {
			return errData
		}
		b.Pos += 4
		d.in = stored
		return nil
	case 1:
		d.fixed()
	case 2:
		if err := d.read(b); err != nil {
			return err
		}
	default:
		return errData
	}
	d.in = packed
	return nil
}

// stored copies from a block that is not compressed.
func (d *Decoder) stored(b *Bits, w *Window) (Stop, error) {
	n := min(d.left, len(b.Src)-b.Pos, max(w.end()-w.Pos, 0))
	w.Pos += copy(w.B[w.Pos:w.Pos+n], b.Src[b.Pos:])
	b.Pos += n
	d.left -= n
	switch {
	case d.left == 0:
		return Block, nil
	case w.Pos >= w.end():
		return Full, nil
	case b.More:
		return Short, nil
	}
	return Short, ErrShort
}

// packed decodes from a block that is compressed.
func (d *Decoder) packed(b *Bits, w *Window) (Stop, error) {
	if done, err := d.fast(b, w); err != nil {
		return Short, err
	} else if done {
		return Block, nil
	}
	// Near an end of either, symbol by symbol.
	for {
		if w.Pos >= w.Stop {
			return Full, nil
		}
		if !b.has(inMargin) {
			return Short, nil
		}
		if stop, err := d.symbol(b, w); err != nil || stop != Short {
			return stop, err
		}
	}
}

// symbol decodes one symbol, all of which is in b. It returns Short, or Block where that is the end of one, or Full
// where w has no room for all of it.
func (d *Decoder) symbol(b *Bits, w *Window) (Stop, error) {
	b.fill()
	e := d.lit[b.Buf&(1<<litBits-1)]
	if e&flagLink != 0 {
		if b.N < litBits {
			return Short, ErrShort
		}
		b.Buf >>= litBits
		b.N -= litBits
		e = d.lit[e>>16+uint32(b.Buf)&(1<<(e>>8&15)-1)]
	}
	n := uint(e & 0xff)
	if n > b.N {
		return Short, ErrShort
	}
	saved := b.Buf
	b.Buf >>= n & 63
	b.N -= n
	if e&flagLiteral != 0 {
		if w.Pos == len(w.B) {
			return Full, nil
		}
		w.B[w.Pos] = byte(e >> 16)
		w.Pos++
		return Short, nil
	}
	if e&flagSpecial != 0 {
		if e&flagEnd != 0 {
			return Block, nil
		}
		return Short, errData
	}
	length := int(e>>16) + int(saved&(1<<(n&63)-1)>>(e>>8&15))
	b.fill()
	e = d.dist[b.Buf&(1<<distBits-1)]
	if e&flagLink != 0 {
		if b.N < distBits {
			return Short, ErrShort
		}
		b.Buf >>= distBits
		b.N -= distBits
		e = d.dist[e>>16+uint32(b.Buf)&(1<<(e>>8&15)-1)]
	}
	if e&flagSpecial != 0 {
		return Short, errData
	}
	if n = uint(e & 0xff); n > b.N {
		return Short, ErrShort
	}
	distance := int(e>>16) + int(b.Buf&(1<<(n&63)-1)>>(e>>8&15))
	b.Buf >>= n & 63
	b.N -= n
	if distance > w.Have+w.Pos {
		return Short, errData
	}
	room := len(w.B) - w.Pos
	w.repeat(distance, min(length, room))
	if length > room {
		return Full, nil
	}
	return Short, nil
}

// fast decodes while it is far from the ends of both. It reports whether the block ended.
func (d *Decoder) fast(b *Bits, w *Window) (done bool, err error) {
	src, pos, buf, n := b.Src, b.Pos, b.Buf, b.N
	dst, out, have := w.B, w.Pos, w.Have
	inEnd, outEnd := len(src)-inMargin, min(w.Stop-1, len(dst)-outMargin)
	lit, dist := &d.lit, &d.dist
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
		if distance > have+out {
			err = errData
			break
		}
		from := out - distance
		if from < 0 {
			// It begins at the end of the ring.
			if from += w.Ring; from+length > w.Ring {
				w.Pos = out
				w.repeat(distance, length)
				out = w.Pos
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
			w.Pos = out
			w.repeat(distance, length)
			out = w.Pos
			continue
		}
		out += length
	}
	b.Pos, b.Buf, b.N, w.Pos = pos, buf, n, out
	return done, err
}
