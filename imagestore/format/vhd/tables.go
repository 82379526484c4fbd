package vhd

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"sync"

	"drover.io/drover/block"
)

const (
	unused     = 1<<32 - 1 // an entry of the allocation table
	maxBitmaps = 256       // bitmaps per call of Next
)

type span struct{ from, to int64 }

// readFull reads the named structure; a file that ends earlier is corrupt.
func (im *Image) readFull(p []byte, off int64, what string) error {
	if off > im.fileSize || int64(len(p)) > im.fileSize-off {
		return corrupt("%s at %#x is not within the file of %d bytes: it was cut off", what, off, im.fileSize)
	}
	n, err := im.r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return corrupt("%s at %#x cannot be read: the file ends at %#x", what, off, off+int64(n))
	}
	return fmt.Errorf("read %s at %#x: %w", what, off, err)
}

// loadTable reads the allocation table and checks that its blocks are inside the file, apart from each other and from
// metadata.
func (im *Image) loadTable(h *header) error {
	im.blockBits = uint(bits.TrailingZeros64(uint64(h.block)))
	im.info.BlockSize = h.block
	im.bitmapSize = (h.block/sector/8 + sector - 1) / sector * sector
	raw := make([]byte, h.entries*4)
	if err := im.readFull(raw, h.table, "the allocation table"); err != nil {
		return err
	}
	im.bat = make([]uint32, h.entries)
	count := 0
	for i := range im.bat {
		if im.bat[i] = be.Uint32(raw[i*4:]); im.bat[i] != unused {
			count++
		}
	}
	if int64(count) > im.fileSize/(im.bitmapSize+sector)+1 {
		return corrupt("the allocation table names %d blocks: the file has %d bytes only", count, im.fileSize)
	}
	own := []span{{0, footerSize}, h.own, {h.table, h.table + int64(len(raw))}}
	blocks := make([]uint32, 0, count)
	for i, s := range im.bat {
		if s == unused {
			continue
		}
		blocks = append(blocks, s)
		n := min(h.block, im.Size()-int64(i)<<im.blockBits)
		im.info.Allocated += n
		from := int64(s) * sector
		to := from + im.bitmapSize + n
		switch {
		case to > im.fileSize:
			return corrupt("block %d at %#x is not within the file of %d bytes: it was cut off", i, from, im.fileSize)
		case slices.ContainsFunc(own, func(o span) bool { return from < o.to && to > o.from }):
			return corrupt("block %d at %#x lies in the image's headers or its allocation table", i, from)
		}
	}
	slices.Sort(blocks)
	for i := 1; i < len(blocks); i++ {
		if int64(blocks[i]-blocks[i-1])*sector < im.bitmapSize+h.block {
			return corrupt("blocks at %#x and %#x overlap", int64(blocks[i-1])*sector, int64(blocks[i])*sector)
		}
	}
	return nil
}

// scratches are buffers for one reader at a time.
var scratches = sync.Pool{New: func() any { return new(scratch) }}

type scratch struct{ bitmap []byte }

// part is a part of the disk with a loaded bitmap: within one block, or a run of unused blocks.
type part struct {
	off, end int64
	bitmap   []byte // nil: all holes
	first    int64  // sector of the disk for the first bit of the bitmap
	host     int64  // offset of the first sector in the file
}

func (im *Image) lookupBlock(s *scratch, off, limit int64) (part, error) {
	number := off >> im.blockBits
	p := part{off: off, end: min((number+1)<<im.blockBits, off+limit)}
	entry := im.bat[number]
	if entry == unused {
		for p.end < off+limit && im.bat[p.end>>im.blockBits] == unused {
			p.end = min(p.end+1<<im.blockBits, off+limit)
		}
		return p, nil
	}
	start := number << im.blockBits
	from, to := (off-start)/sector/8, (p.end-1-start)/sector/8+1
	if int64(cap(s.bitmap)) < to-from {
		s.bitmap = make([]byte, to-from)
	}
	p.bitmap = s.bitmap[:to-from]
	p.first = start/sector + from*8
	p.host = int64(entry)*sector + im.bitmapSize + from*8*sector
	return p, im.readFull(p.bitmap, int64(entry)*sector+from, "a sector bitmap")
}

func (p *part) left() bool { return p.off < p.end }

// isWhole reports whether the part is the whole part of a block on the disk.
func (im *Image) isWhole(p part) bool {
	start := p.off >> im.blockBits << im.blockBits
	return p.bitmap != nil && p.off == start && p.end == min(start+1<<im.blockBits, im.Size())
}

// next takes the next run of one kind off the part; host is the offset of its first byte.
func (p *part) next() (kind block.Kind, host, n int64) {
	from := p.off
	if p.bitmap == nil {
		p.off = p.end
		return block.Hole, 0, p.end - from
	}
	written := func(off int64) bool {
		i := off/sector - p.first
		return p.bitmap[i/8]&(0x80>>(i%8)) != 0
	}
	if written(from) {
		kind = block.Data
	}
	for {
		i := p.off/sector - p.first
		// Most bitmaps are all ones.
		if i%8 == 0 && kind == block.Data && p.bitmap[i/8] == 0xff {
			p.off = (p.first + i + 8) * sector
		} else {
			p.off = (p.first + i + 1) * sector
		}
		if p.off >= p.end {
			p.off = p.end
			break
		}
		if written(p.off) != (kind == block.Data) {
			break
		}
	}
	return kind, p.host + from - p.first*sector, p.off - from
}
