package vmdk

import (
	"bytes"
	"errors"
	"io"
	"sync"

	"github.com/klauspost/compress/zlib"
)

// unpackers holds what one reader needs for its time. Nothing in it belongs to an image.
var unpackers = sync.Pool{New: func() any { return new(unpacker) }}

type unpacker struct {
	entries [tableSize]byte
	mark    [markSize]byte
	rest    [sector]byte
	packed  []byte
	plain   []byte // of a grain that is not wanted whole
	src     bytes.Reader
	zlib    io.ReadCloser
}

var (
	errShort = errors.New("it ends too early")
	errLong  = errors.New("it unpacks to more than a grain")
)

// unpack fills to, which starts at off and lies in one grain, from the compressed grain whose marker is at host.
func (im *Image) unpack(u *unpacker, host int64, to []byte, off int64) error {
	h := im.h
	number := off >> h.grainBits
	start := number << h.grainBits
	need := int(min(h.grain, h.size-start))
	mark := u.mark[:]
	if err := im.readFull(mark, host, "a grain's marker"); err != nil {
		return err
	}
	if lba := le.Uint64(mark); lba != uint64(start/sector) {
		return corrupt("the grain at %#x is that of sector %d, not %d: grains are mixed up", host, lba, start/sector)
	}
	// What does not compress grows by its block headers only.
	size := int64(le.Uint32(mark[8:]))
	if size == 0 || size > h.grain+h.grain/16+1024 {
		return corrupt("the grain at %#x has %d compressed bytes: there are more than 0, and not more than its content", host,
			size)
	}
	if int64(cap(u.packed)) < size {
		u.packed = make([]byte, h.grain+h.grain/16+1024)
	}
	packed := u.packed[:size]
	if err := im.readFull(packed, host+markSize, "a compressed grain"); err != nil {
		return err
	}
	dst := to
	if len(to) != need {
		if cap(u.plain) < need {
			u.plain = make([]byte, h.grain)
		}
		dst = u.plain[:need]
	}
	if err := u.inflate(dst, packed, int(h.grain)-need); err != nil {
		return corrupt("compressed data at %#x: %w", host, err)
	}
	if len(to) != need {
		copy(to, dst[off-start:])
	}
	return nil
}

// inflate fills dst from a zlib stream, which may go on for slack bytes and no more.
func (u *unpacker) inflate(dst, src []byte, slack int) error {
	u.src.Reset(src)
	var err error
	if u.zlib == nil {
		u.zlib, err = zlib.NewReader(&u.src)
	} else {
		err = u.zlib.(zlib.Resetter).Reset(&u.src, nil)
	}
	if err != nil {
		return err
	}
	for n := 0; n < len(dst); {
		k, err := u.zlib.Read(dst[n:])
		if n += k; err == io.EOF && n < len(dst) {
			return errShort
		}
		if err != nil && err != io.EOF {
			return err
		}
	}
	// The checksum is at the very end.
	for {
		k, err := u.zlib.Read(u.rest[:])
		if slack -= k; slack < 0 {
			return errLong
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
