// Package vhd reads VHD images of Virtual PC and Hyper-V: fixed disks (content, then a footer) and dynamic disks (a
// block allocation table and a sector bitmap in front of each block). The package is written from Microsoft's "Virtual
// Hard Disk Image Format Specification" 1.0, checked against qemu-img, and treats an image as hostile.
//
// An Image is a block.Source: block.Copy over the Image is the import. The package starts no goroutine and takes no
// lock. An Image keeps the allocation table, at most 16 MiB, twice as much during Open. Open walks the table, so that
// afterwards every block is known to be inside the file and to exist once. Differencing disks are refused: their parent
// is another file.
//
// The size of a disk depends on the maker of the file. Virtual PC, and qemu-img by default, use the geometry (cylinders
// * heads * sectors); all other makers use the footer's current size, and so do all makers for disks without a usable
// geometry. qemu-img 7.2 agrees for known makers, but takes unknown makers (VirtualBox, Azure) for Virtual PC and so
// cuts off the end of their disks; the package does not follow qemu-img there.
//
// A sector without a bit in its bitmap was never written and is a hole, as the specification says.
package vhd

import (
	"fmt"
	"io"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Info describes an image.
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
	Allocated int64 // bytes of the virtual disk in allocated blocks
}

// Limits bound the demands of an image. The zero value of a field means its default.
type Limits struct {
	VirtualSize int64 // bytes; default 64 TiB. The format itself ends at 2040 GiB.
	// Stream is for an image in transfer, in the order of its file, which is read from its first to its last block: a
	// valid footer copy at the start replaces the footer, so that reads can begin with the first blocks. Settled compares
	// the copy with the footer in the end.
	Stream bool
}

// Image is an open VHD image. Several goroutines may call its methods at once.
type Image struct {
	r        io.ReaderAt
	fileSize int64
	info     Info
	stream   bool
	limits   Limits
	front    *footer            // footer copy of a stream; or nil
	drop     func(off, n int64) // reports bytes that were read for good; or nil

	blockBits  uint
	bitmapSize int64
	bat        []uint32 // sectors of the blocks
}

var _ block.Source = (*Image)(nil)

// Open opens the image in the first size bytes of r, which must not change. Close of the image leaves r open. A
// block.Dropper behind r learns which bytes were read for good. Errors are of kind Invalid (not VHD), Unsupported,
// OutOfRange (above a limit), Corrupt (damaged or cut off), or come from r.
func Open(r io.ReaderAt, size int64, lim Limits) (*Image, error) {
	if lim.VirtualSize <= 0 {
		lim.VirtualSize = 64 << 40
	}
	im := &Image{r: r, fileSize: size, stream: lim.Stream, limits: lim}
	if d, ok := r.(block.Dropper); ok {
		im.drop = d.Drop
	}
	if err := im.openImage(lim); err != nil {
		return nil, fmt.Errorf("vhd: %w", err)
	}
	return im, nil
}

func (im *Image) openImage(lim Limits) error {
	f, err := im.readFooter()
	if err != nil {
		return err
	}
	if err := f.setSize(lim); err != nil {
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
	h, err := im.readDynamicHeader(f)
	if err != nil {
		return err
	}
	return im.loadTable(h)
}

// Info describes the image.
func (im *Image) Info() Info { return im.info }

// Size returns the virtual size in bytes.
func (im *Image) Size() int64 { return im.info.VirtualSize }

// Close does nothing. The file stays open.
func (im *Image) Close() error { return nil }

// Next returns the extent at off. Sectors that were never written are holes; a fixed disk is all data.
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
		part, err := im.lookupBlock(s, e.End(), size-e.End())
		if err != nil {
			return block.Extent{}, fmt.Errorf("vhd: %w", err)
		}
		if part.bitmap != nil {
			if looked++; im.stream {
				looked = maxBitmaps // the next block may still be in transfer, the data of this block has arrived
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

// ReadAt implements io.ReaderAt for the virtual disk.
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
		part, err := im.lookupBlock(s, off+int64(n), int64(len(p)-n))
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
