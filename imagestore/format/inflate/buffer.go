package inflate

import (
	"encoding/binary"
	"hash/adler32"
)

// Fill fills dst from src, with anything behind the data. used is the length of the deflate data, or 0 if the data does
// not end with dst.
func (d *Decoder) Fill(dst, src []byte) (used int, err error) {
	b := bitReader{src: src}
	n, ended, err := d.decodeBlocks(&b, dst)
	switch {
	case err != nil:
		return 0, err
	case n < len(dst):
		return 0, ErrShort
	case !ended:
		return 0, nil
	}
	return b.pos, nil
}

// Zlib unpacks the zlib stream at the start of src into dst, which needs room for all of the content, and compares the
// checksum. n is the number of bytes in dst, used the length of the stream.
func (d *Decoder) Zlib(dst, src []byte) (n, used int, err error) {
	// Deflate with a window of at most 32 KiB, and no dictionary.
	if len(src) < 2 || src[0]&15 != 8 || src[0]>>4 > 7 || src[1]&32 != 0 || binary.BigEndian.Uint16(src)%31 != 0 {
		return 0, 0, errZlib
	}
	b := bitReader{src: src[2:]}
	n, ended, err := d.decodeBlocks(&b, dst)
	if err != nil {
		return n, 0, err
	}
	if !ended {
		return n, 0, ErrLong
	}
	used = 2 + b.pos
	if len(src)-used < 4 {
		return n, 0, ErrShort
	}
	if binary.BigEndian.Uint32(src[used:]) != adler32.Checksum(dst[:n]) {
		return n, 0, errChecksum
	}
	return n, used + 4, nil
}

// decodeBlocks decodes blocks to the end of the data, or until dst is full before the end of the data.
func (d *Decoder) decodeBlocks(b *bitReader, dst []byte) (out int, ended bool, err error) {
	w := output{buf: dst}
	for {
		r, err := d.decodeBlock(b, &w)
		switch {
		case err != nil && w.pos == len(dst), err == nil && r == full:
			return w.pos, false, nil
		case err != nil:
			return w.pos, false, err
		case d.last:
			b.align()
			return w.pos, true, nil
		}
	}
}
