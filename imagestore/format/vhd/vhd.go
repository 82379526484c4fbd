// Package vhd reads VHD images of Virtual PC and Hyper-V: fixed disks (content, then a footer) and dynamic ones (a
// block allocation table and a sector bitmap in front of each block). It is written from Microsoft's "Virtual Hard Disk
// Image Format Specification" 1.0, checked against qemu-img, and treats an image as hostile.
//
// An Image is a block.Source: block.Copy over it is the import. It owns no goroutine and keeps the allocation table, at
// most 16 MiB, twice that while it is opened. Open walks the table, so that after it every block is known to be inside
// the file and to be there once. Differencing disks are refused: their parent is another file.
//
// The size is what the maker of the file takes it for. Virtual PC, and qemu-img unless told otherwise, go by the
// geometry (cylinders * heads * sectors); everybody else goes by the footer's current size, and so do all for disks
// that have no geometry, or none that describes them. qemu-img 7.2 is the same for the makers that it knows, but takes
// those that it does not know (VirtualBox, Azure) for Virtual PC, which cuts off the end of their disks; it is not
// followed there.
//
// A sector that its bitmap does not mark was never written and is a hole, as the specification says.
package vhd

import (
	"fmt"
	"io"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Info says what an image is.
type Info struct {
	// Fixed: the disk is the first VirtualSize bytes of the file, so that it can be read from there as well.
	Fixed       bool
	VirtualSize int64 // bytes
	BlockSize   int64 // bytes; 0 for a fixed disk
	Creator     string
	// ByGeometry: the size follows from the geometry, not from the footer's current size.
	ByGeometry bool
	// FrontCopy: the footer at the end is missing or damaged, and its copy at the start is good.
	FrontCopy bool
	Allocated int64 // bytes of the virtual disk that are in allocated blocks
}

// Limits bound what an image may ask for. The zero value of each field means its default.
type Limits struct {
	VirtualSize int64 // bytes; default 64 TiB. The format itself ends at 2040 GiB.
	// Stream is for an image that is still on its way, in the order of its file, and is read from its first block to its
	// last: a good copy of the footer at the start is taken for it, so that reads can begin with the first blocks.
	// Settled compares it with the footer when that has come.
	Stream bool
}

// Image is an open VHD image. Its methods may be called from several goroutines at once.
type Image struct {
	r        io.ReaderAt
	fileSize int64
	info     Info
	stream   bool
	limits   Limits
	front    *footer            // what a stream is read by; or nil
	drop     func(off, n int64) // tells of bytes that were read once and for all; or nil

	blockBits  uint
	bitmapSize int64
	bat        []uint32 // sectors of the blocks
}

var _ block.Source = (*Image)(nil)

// Open opens the image in the first size bytes of r, which must stay as they are. Closing the image leaves r open.
// A block.Dropper behind r is told what was read of data.
// Errors are of kind Invalid (not VHD), Unsupported, OutOfRange (above a limit), Corrupt (damaged or cut off), or come
// from r.
func Open(r io.ReaderAt, size int64, lim Limits) (*Image, error) {
	if lim.VirtualSize <= 0 {
		lim.VirtualSize = 64 << 40
	}
	im := &Image{r: r, fileSize: size, stream: lim.Stream, limits: lim}
	if d, ok := r.(block.Dropper); ok {
		im.drop = d.Drop
	}
	if err := im.open(lim); err != nil {
		return nil, fmt.Errorf("vhd: %w", err)
	}
	return im, nil
}

func (im *Image) open(lim Limits) error {
	f, err := im.footer()
	if err != nil {
		return err
	}
	if err := f.check(lim); err != nil {
		return err
	}
	im.info.VirtualSize, im.info.Creator, im.info.ByGeometry = f.size, f.creator, f.byGeometry
	if f.kind == kindFixed {
		im.info.Fixed = true
		im.info.Allocated = f.size
		if f.size > im.fileSize-footerSize {
			return corrupt("the disk of %d bytes is not in the file of %d bytes: it was cut off", f.size, im.fileSize)
		}
		return nil
	}
	h, err := im.dynamic(f)
	if err != nil {
		return err
	}
	return im.load(h)
}

// Info says what the image is.
func (im *Image) Info() Info { return im.info }

// Size is the virtual size in bytes.
func (im *Image) Size() int64 { return im.info.VirtualSize }

// Close has nothing to give back. The file stays open: whoever opened it closes it.
func (im *Image) Close() error { return nil }

// Next is the extent that holds off, from off on. What was never written is a hole; a fixed disk is all data.
func (im *Image) Next(off int64) (block.Extent, error) {
	size := im.Size()
	if off < 0 || off >= size {
		return block.Extent{}, api.Errorf(api.OutOfRange, "vhd: offset %d is outside of the %d bytes", off, size)
	}
	e := block.Extent{Off: off}
	if im.info.Fixed {
		e.Kind, e.Len = block.Data, size-off
		return e, nil
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for looked := 0; e.End() < size && looked < maxBitmaps; {
		part, err := im.lookup(s, e.End(), size-e.End())
		if err != nil {
			return block.Extent{}, fmt.Errorf("vhd: %w", err)
		}
		if part.bitmap != nil {
			if looked++; im.stream {
				looked = maxBitmaps // the next block may not have come yet, this one's data have
			}
		}
		for part.left() {
			kind, _, n := part.next()
			if e.Len > 0 && kind != e.Kind {
				return e, nil
			}
			e.Kind = kind
			e.Len += n
		}
	}
	return e, nil
}

// ReadAt reads from the virtual disk.
func (im *Image) ReadAt(p []byte, off int64) (n int, err error) {
	size := im.Size()
	if off < 0 {
		return 0, api.Errorf(api.OutOfRange, "vhd: offset %d is negative", off)
	}
	if off >= size {
		return 0, io.EOF
	}
	if int64(len(p)) > size-off {
		p, err = p[:size-off], io.EOF
	}
	if im.info.Fixed {
		if rerr := im.readFull(p, off, "the disk"); rerr != nil {
			return 0, fmt.Errorf("vhd: %w", rerr)
		}
		return len(p), err
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for n < len(p) {
		part, err := im.lookup(s, off+int64(n), int64(len(p)-n))
		if err != nil {
			return n, fmt.Errorf("vhd: %w", err)
		}
		whole, size := im.stream && im.isWhole(part), part.end-part.off
		for part.left() {
			kind, host, length := part.next()
			to := p[n : n+int(length)]
			if kind != block.Data {
				clear(to)
			} else if err := im.readFull(to, host, "a block"); err != nil {
				return n, fmt.Errorf("vhd: at %d: %w", off+int64(n), err)
			} else if im.drop != nil && !whole {
				im.drop(host, length)
			}
			n += len(to)
		}
		if whole && im.drop != nil {
			im.drop(part.host-im.bitmapSize, im.bitmapSize+size)
		}
	}
	return n, err
}
