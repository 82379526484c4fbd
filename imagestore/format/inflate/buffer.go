package inflate

import (
	"encoding/binary"
	"hash/adler32"
)

// Fill fills dst from src, whatever follows. Used is the length of the deflate data, or 0 where that does not end with
// dst.
func (d *Decoder) Fill(dst, src []byte) (used int, err error) {
	b := Bits{Src: src}
	n, ended, err := d.run(&b, dst)
	switch {
	case err != nil:
		return 0, err
	case n < len(dst):
		return 0, ErrShort
	case !ended:
		return 0, nil
	}
	return b.Pos, nil
}

// Zlib unpacks the zlib stream at the start of src into dst, which has to have room for all of it, and compares its
// checksum. It returns how many bytes of dst it made, and used of src.
func (d *Decoder) Zlib(dst, src []byte) (n, used int, err error) {
	// Deflate with a window of at most 32 KiB, and no dictionary.
	if len(src) < 2 || src[0]&15 != 8 || src[0]>>4 > 7 || src[1]&32 != 0 || binary.BigEndian.Uint16(src)%31 != 0 {
		return 0, 0, errZlib
	}
	b := Bits{Src: src[2:]}
	n, ended, err := d.run(&b, dst)
	if err != nil {
		return n, 0, err
	}
	if !ended {
		return n, 0, ErrLong
	}
	used = 2 + b.Pos
	if len(src)-used < 4 {
		return n, 0, ErrShort
	}
	if binary.BigEndian.Uint32(src[used:]) != adler32.Checksum(dst[:n]) {
		return n, 0, errChecksum
	}
	return n, used + 4, nil
}

// run decodes blocks to the end of the data, or until dst is full and it does not end there.
func (d *Decoder) run(b *Bits, dst []byte) (out int, ended bool, err error) {
	d.Reset()
	w := Window{B: dst, Stop: len(dst) + 1}
	for {
		stop, err := d.Next(b, &w)
		switch {
		case err != nil && w.Pos == len(dst), err == nil && stop == Full:
			return w.Pos, false, nil
		case err != nil:
			return w.Pos, false, err
		case stop == End:
			return w.Pos, true, nil
		}
	}
}
