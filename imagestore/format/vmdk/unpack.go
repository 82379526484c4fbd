package vmdk

import (
	"errors"
	"sync"

	"drover.io/drover/imagestore/format/inflate"
)

// unpackers are buffers for one reader at a time, independent of images.
var unpackers = sync.Pool{New: func() any { return new(unpacker) }}

type unpacker struct {
	entries [tableSize]byte
	mark    [markSize]byte
	packed  []byte
	plain   []byte // of a grain that is read in part
	inflate inflate.Decoder
}

var (
	errShort = errors.New("the data ends too early")
	errLong  = errors.New("the data unpacks to more than a grain")
)

// unpackGrain fills to, which starts at off and lies in one grain, from the compressed grain with its marker at host.
func (im *Image) unpackGrain(u *unpacker, host int64, to []byte, off int64) error {
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
	// Incompressible data grows by its block headers only.
	size := int64(le.Uint32(mark[8:]))
	if size == 0 || size > h.grain+h.grain/16+1024 {
		return corrupt("the grain at %#x has %d compressed bytes: a grain has more than 0, and not more than its "+
			"content", host, size)
	}
	if int64(cap(u.packed)) < size {
		u.packed = make([]byte, h.grain+h.grain/16+1024)
	}
	packed := u.packed[:size]
	if err := im.readFull(packed, host+markSize, "a compressed grain"); err != nil {
		return err
	}
	dst := to
	if len(to) != int(h.grain) { // a part of the grain, or the last grain, which may exceed the disk
		if cap(u.plain) < int(h.grain) {
			u.plain = make([]byte, h.grain)
		}
		dst = u.plain[:h.grain]
	}
	n, _, err := u.inflate.Zlib(dst, packed)
	switch {
	case errors.Is(err, inflate.ErrLong):
		err = errLong
	case err == nil && n < need:
		err = errShort
	}
	if err != nil {
		return corrupt("compressed data at %#x: %w", host, err)
	}
	if len(to) != int(h.grain) {
		copy(to, dst[off-start:])
	}
	if im.drop != nil && len(to) == need {
		im.drop(host, (markSize+size+sector-1)/sector*sector)
	}
	return nil
}
