// Package vmdk reads VMware disks in one file: monolithicSparse and streamOptimized (compressed grains, with the
// directory in front or behind a footer), header versions 1 to 3. The package is written from VMware's "Virtual Disk
// Format 5.0" technical note, checked against qemu-img, and treats an image as hostile.
//
// An Image is a block.Source: block.Copy over the Image is the import. The package starts no goroutine; each reader
// unpacks its own grains straight into its own buffer, so that an import is as parallel as its readers. Image.mu is the
// only lock and guards the results of table checks.
//
// No other file is ever opened: a descriptor without data, a descriptor of further or other files, a delta of a parent
// and a single extent of a larger disk are refused with a message each. Open walks the grain directory and all grain
// tables, so that afterwards only data can be damaged. For damaged tables, Open uses the redundant tables of the image
// as a whole, and sets Info.Redundant. Reads never leave the file. An open image takes 4 bytes of memory per 32 MiB of
// disk (with grains of 64 KiB), and at most 64 MiB during Open.
package vmdk

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Info describes an image.
type Info struct {
	CreateType  string // monolithicSparse or streamOptimized
	Version     int
	VirtualSize int64 // bytes
	GrainSize   int64 // bytes
	Compressed  bool
	// Unclean: the writer did not close the image. Data that the writer still held is missing; everything else reads.
	Unclean bool
	// Redundant: the grain directory or a grain table is damaged, and the redundant tables are read instead.
	Redundant bool
	Data      int64 // bytes of data on the virtual disk
}

// Limits bound the demands of an image. The zero value of a field means its default.
type Limits struct {
	VirtualSize int64 // bytes; default 64 TiB
	// Ratio bounds the bytes of data per byte of the file, once there are more than 64 MiB of data; default 2000.
	Ratio int64
	// Stream: the image is in transfer, and reads wait for their bytes.
	Stream bool
}

func (l Limits) withDefaults() Limits {
	if l.VirtualSize <= 0 {
		l.VirtualSize = 64 << 40
	}
	if l.Ratio <= 0 {
		l.Ratio = 2000
	}
	return l
}

// Image is an open VMDK image. Several goroutines may call its methods at once.
type Image struct {
	r        io.ReaderAt
	fileSize int64
	limits   Limits
	h        *header
	info     Info
	drop     func(off, n int64) // reports bytes that were read for good; or nil
	tables   []uint32           // the grain directory: sectors of the grain tables; 0: all holes

	mu      sync.Mutex    // guards the sums of checked tables
	checked []atomic.Bool // by table; nil: all tables
	own     *metadata
	stored  int64 // minimum of bytes of data in the file
}

var _ block.Source = (*Image)(nil)

// Open opens the image in the first size bytes of r, which must not change. Close of the image leaves r open. A
// block.Dropper behind r learns which bytes were read for good. Errors are of kind Invalid (not VMDK), Unsupported,
// OutOfRange (above a limit), Corrupt (damaged or cut off), or come from r.
func Open(r io.ReaderAt, size int64, lim Limits) (*Image, error) {
	im := &Image{r: r, fileSize: size, limits: lim.withDefaults()}
	if d, ok := r.(block.Dropper); ok {
		im.drop = d.Drop
	}
	if err := im.openImage(); err != nil {
		return nil, fmt.Errorf("vmdk: %w", err)
	}
	return im, nil
}

func (im *Image) openImage() error {
	head := make([]byte, min(im.fileSize, textSize))
	if err := im.readFull(head, 0, "the header"); err != nil {
		return err
	}
	if err := refuseOtherFiles(head); err != nil {
		return err
	}
	front, err := parseHeader(head)
	if err != nil {
		return err
	}
	im.h = front
	if front.directory == atEnd {
		if im.h, err = im.readFooter(); err != nil {
			return fmt.Errorf("the footer: %w", err)
		}
	}
	if err := im.h.checkSizes(im.limits); err != nil {
		return err
	}
	createType, err := im.readDescriptor(front)
	if err != nil {
		return err
	}
	im.h.text, im.h.textLen = front.text, front.textLen
	im.info = Info{CreateType: createType, Version: int(im.h.version), VirtualSize: im.h.size, GrainSize: im.h.grain,
		Compressed: im.h.compressed, Unclean: im.h.unclean}
	err = im.loadTables(im.h.directory)
	if api.Is(err, api.Corrupt) && im.h.redundant != 0 && im.loadTables(im.h.redundant) == nil {
		im.info.Redundant, err = true, nil
	}
	return err
}

// Info describes the image.
func (im *Image) Info() Info {
	im.mu.Lock()
	defer im.mu.Unlock()
	return im.info
}

// Size returns the virtual size in bytes.
func (im *Image) Size() int64 { return im.h.size }

// Close does nothing. The file stays open.
func (im *Image) Close() error { return nil }

// Next returns the extent at off. Unallocated grains are holes.
func (im *Image) Next(off int64) (block.Extent, error) {
	if off < 0 || off >= im.h.size {
		return block.Extent{}, api.Errorf(api.OutOfRange, "vmdk: offset %d is outside of the %d bytes", off, im.h.size)
	}
	u := unpackers.Get().(*unpacker)
	defer unpackers.Put(u)
	e := block.Extent{Off: off}
	for visits := 0; e.End() < im.h.size && visits < maxVisits; visits++ {
		part, err := im.lookupEntries(u, e.End(), im.h.size-e.End())
		if err != nil {
			return block.Extent{}, fmt.Errorf("vmdk: %w", err)
		}
		for part.left() {
			run := part.next(false)
			if e.Len > 0 && run.kind != e.Kind {
				return e, nil
			}
			e.Kind = run.kind
			e.Len += run.n
		}
		if im.checked != nil && e.Kind == block.Data && e.End()&(perTable<<im.h.grainBits-1) == 0 {
			break // the next table may still be in transfer, the data of this table has arrived
		}
	}
	return e, nil
}

// ReadAt implements io.ReaderAt for the virtual disk.
func (im *Image) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, api.Errorf(api.OutOfRange, "vmdk: offset %d is negative", off)
	}
	if off >= im.h.size {
		return 0, io.EOF
	}
	if int64(len(p)) > im.h.size-off {
		p, err = p[:im.h.size-off], io.EOF
	}
	u := unpackers.Get().(*unpacker)
	defer unpackers.Put(u)
	for n < len(p) {
		part, err := im.lookupEntries(u, off+int64(n), int64(len(p)-n))
		if err != nil {
			return n, fmt.Errorf("vmdk: %w", err)
		}
		for part.left() {
			at := part.off
			run := part.next(true)
			to := p[n : n+int(run.n)]
			switch {
			case run.kind != block.Data:
				clear(to)
			case im.h.compressed:
				err = im.unpackGrain(u, run.host, to, at)
			default:
				if err = im.readFull(to, run.host, "a grain"); err == nil && im.drop != nil {
					im.drop(run.host, run.n)
				}
			}
			if err != nil {
				return n, fmt.Errorf("vmdk: at %d: %w", at, err)
			}
			n += len(to)
		}
	}
	return n, err
}
