// Package inflate unpacks deflate (RFC 1951) and zlib (RFC 1950) data of clusters and grains, which are wholly in
// memory on both sides (Fill, Zlib). Streaming decoders keep a window and stop at every byte of input; the speed of a
// compressed import is the speed of this loop (docs/decisions/0009-qcow2-reader.md).
//
// The input is hostile. The language checks every bound; the package has no unsafe code and does not allocate. A
// Decoder serves one call at a time; the package starts no goroutine and takes no lock.
package inflate

import (
	"encoding/binary"
	"errors"
)

var (
	errData    = errors.New("bad deflate data")
	errEndless = errors.New("bad deflate data: a block has no code for its end")
	// ErrShort is the error for input that ends too early.
	ErrShort = errors.New("deflate data ends too early")
	errZlib  = errors.New("no zlib header")
	// ErrLong is the error for input that unpacks to more than its room.
	ErrLong     = errors.New("the data unpacks to more than its room")
	errChecksum = errors.New("the checksum does not match the content")
)

// Decoder holds the tables of a decoder.
type Decoder struct {
	codes

	last bool // no block follows the current block
}

// result is the end of a step.
type result uint8

const (
	more     result = iota // the block continues
	full                   // the output has no more room
	blockEnd               // the block ended
)

// decodeBlock decodes one block, or until the output is full.
func (d *Decoder) decodeBlock(b *bitReader, w *output) (result, error) {
	head, ok := b.takeBits(3)
	if !ok {
		return more, ErrShort
	}
	d.last = head&1 != 0
	switch head >> 1 {
	case 0:
		return d.copyStored(b, w)
	case 1:
		d.loadFixed()
	case 2:
		if err := d.readDynamic(b); err != nil {
			return more, err
		}
	default:
		return more, errData
	}
	return d.decodeCompressed(b, w)
}

// copyStored copies a block without compression.
func (d *Decoder) copyStored(b *bitReader, w *output) (result, error) {
	b.align()
	if len(b.src)-b.pos < 4 {
		return more, ErrShort
	}
	left := int(binary.LittleEndian.Uint16(b.src[b.pos:]))
	if left != int(^binary.LittleEndian.Uint16(b.src[b.pos+2:])) {
		return more, errData
	}
	b.pos += 4
	n := min(left, len(b.src)-b.pos, len(w.buf)-w.pos)
	w.pos += copy(w.buf[w.pos:w.pos+n], b.src[b.pos:])
	b.pos += n
	switch {
	case n == left:
		return blockEnd, nil
	case w.pos == len(w.buf):
		return full, nil
	}
	return more, ErrShort
}

// decodeCompressed decodes a compressed block: fast far from the ends of input and output, else symbol by symbol.
func (d *Decoder) decodeCompressed(b *bitReader, w *output) (result, error) {
	done, err := d.decodeFast(b, w)
	if err != nil {
		return more, err
	}
	if done {
		return blockEnd, nil
	}
	for {
		if r, err := d.decodeSymbol(b, w); err != nil || r != more {
			return r, err
		}
	}
}

// decodeSymbol decodes one symbol.
func (d *Decoder) decodeSymbol(b *bitReader, w *output) (result, error) {
	b.fillBits()
	e := d.lit[b.buf&(1<<litBits-1)]
	if e&flagLink != 0 {
		if b.n < litBits {
			return more, ErrShort
		}
		b.buf >>= litBits
		b.n -= litBits
		e = d.lit[e>>16+uint32(b.buf)&(1<<(e>>8&15)-1)]
	}
	n := uint(e & 0xff)
	if n > b.n {
		return more, ErrShort
	}
	saved := b.buf
	b.buf >>= n & 63
	b.n -= n
	if e&flagLiteral != 0 {
		if w.pos == len(w.buf) {
			return full, nil
		}
		w.buf[w.pos] = byte(e >> 16)
		w.pos++
		return more, nil
	}
	if e&flagSpecial != 0 {
		if e&flagEnd != 0 {
			return blockEnd, nil
		}
		return more, errData
	}
	length := int(e>>16) + int(saved&(1<<(n&63)-1)>>(e>>8&15))
	b.fillBits()
	e = d.dist[b.buf&(1<<distBits-1)]
	if e&flagLink != 0 {
		if b.n < distBits {
			return more, ErrShort
		}
		b.buf >>= distBits
		b.n -= distBits
		e = d.dist[e>>16+uint32(b.buf)&(1<<(e>>8&15)-1)]
	}
	if e&flagSpecial != 0 {
		return more, errData
	}
	if n = uint(e & 0xff); n > b.n {
		return more, ErrShort
	}
	distance := int(e>>16) + int(b.buf&(1<<(n&63)-1)>>(e>>8&15))
	b.buf >>= n & 63
	b.n -= n
	if distance > w.pos {
		return more, errData
	}
	room := len(w.buf) - w.pos
	w.repeat(distance, min(length, room))
	if length > room {
		return full, nil
	}
	return more, nil
}

// decodeFast decodes symbols far from the ends of input and output. decodeFast reports whether the block ended.
func (d *Decoder) decodeFast(b *bitReader, w *output) (done bool, err error) {
	src, pos, buf, n := b.src, b.pos, b.buf, b.n
	dst, out := w.buf, w.pos
	inEnd, outEnd := len(src)-inMargin, len(dst)-outMargin
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
		if distance > out {
			err = errData
			break
		}
		from := out - distance
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
			w.pos = out
			w.repeat(distance, length)
			out = w.pos
			continue
		}
		out += length
	}
	b.pos, b.buf, b.n, w.pos = pos, buf, n, out
	return done, err
}
