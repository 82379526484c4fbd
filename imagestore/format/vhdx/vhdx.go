// Package vhdx reads VHDX images of Hyper-V: fixed and dynamic disks, every block size, logical sectors of 512 and 4096
// bytes. The package is written from Microsoft's open specification [MS-VHDX], checked against qemu-img, and treats an
// image as hostile.
//
// An Image is a block.Source: block.Copy over the Image is the import. The package starts no goroutine and takes no
// lock. An Image keeps no table: a read loads its entries of the block allocation table, 8 bytes per block.
//
// An image that was not closed has a log of changes to its tables. Open replays the log in memory, over the unchanged
// file, and sets Info.Replayed. Open walks the allocation table, so that afterwards every block is known to be inside
// the file and to exist once. Differencing disks are refused: their parent is another file. Memory is bounded by the
// log (Limits.Log, twice as much during the replay) and one bit per MiB of the file.
package vhdx

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Info describes an image.
type Info struct {
	Creator           string
	Fixed             bool  // allocated blocks stay allocated; not every block is
	VirtualSize       int64 // bytes
	BlockSize         int64 // bytes
	LogicalSectorSize int64 // bytes
	// Replayed is how many entries of the log were replayed in memory: the image was not closed.
	Replayed int
	Data     int64 // bytes of data on the virtual disk
}

// Limits bound the demands of an image. The zero value of a field means its default.
type Limits struct {
	VirtualSize int64 // bytes; default 64 TiB
	Log         int64 // bytes of a log to replay; default 32 MiB
}

func (l Limits) withDefaults() Limits {
	if l.VirtualSize <= 0 {
		l.VirtualSize = 64 << 40
	}
	if l.Log <= 0 {
		l.Log = 32 << 20
	}
	return l
}

// Image is an open VHDX image. Several goroutines may call its methods at once.
type Image struct {
	r        io.ReaderAt
	fileSize int64 // including the growth by a replay
	realSize int64
	limits   Limits
	info     Info
	drop     func(off, n int64) // reports bytes that were read for good; or nil
	changes  []change           // of the log, sorted

	blockBits uint
	ratioBits uint // log of the blocks between two unused entries of the table
	table     int64
}

var _ block.Source = (*Image)(nil)

var le = binary.LittleEndian

func corrupt(format string, args ...any) error { return api.Errorf(api.Corrupt, format, args...) }

// Open opens the image in the first size bytes of r, which must not change. Close of the image leaves r open. A
// block.Dropper behind r learns which bytes were read for good. Errors are of kind Invalid (not VHDX), Unsupported,
// OutOfRange (above a limit), Corrupt (damaged or cut off), or come from r.
func Open(r io.ReaderAt, size int64, lim Limits) (*Image, error) {
	im := &Image{r: r, fileSize: size, realSize: size, limits: lim.withDefaults()}
	if d, ok := r.(block.Dropper); ok {
		im.drop = d.Drop
	}
	if err := im.openImage(); err != nil {
		return nil, fmt.Errorf("vhdx: %w", err)
	}
	return im, nil
}

func (im *Image) openImage() error {
	if err := im.readIdentifier(); err != nil {
		return err
	}
	h, err := im.readHeader()
	if err != nil {
		return err
	}
	if h.logID != (guid{}) {
		if err := im.replayLog(h); err != nil {
			return fmt.Errorf("the log: %w", err)
		}
	}
	table, metadata, err := im.readRegions(h)
	if err != nil {
		return err
	}
	if err := im.readMetadata(metadata); err != nil {
		return fmt.Errorf("the metadata: %w", err)
	}
	return im.checkBlocks(table, []span{{0, headersSize}, h.log, table, metadata})
}

// readFull reads the named structure through the changes of the log; a file that ends earlier is corrupt.
func (im *Image) readFull(p []byte, off int64, what string) error {
	if off > im.fileSize || int64(len(p)) > im.fileSize-off {
		return corrupt("%s at %#x is not within the file of %d bytes: it was cut off", what, off, im.fileSize)
	}
	rest := p
	if over := off + int64(len(p)) - im.realSize; over > 0 {
		// The log says that the file is longer than it was when the writer stopped.
		keep := max(int64(len(p))-over, 0)
		clear(p[keep:])
		rest = p[:keep]
	}
	n, err := im.r.ReadAt(rest, off)
	if n < len(rest) {
		if err == nil || errors.Is(err, io.EOF) {
			return corrupt("%s at %#x cannot be read: the file ends at %#x", what, off, off+int64(n))
		}
		return fmt.Errorf("read %s at %#x: %w", what, off, err)
	}
	im.patchBytes(p, off)
	return nil
}

// Info describes the image.
func (im *Image) Info() Info { return im.info }

// Size returns the virtual size in bytes.
func (im *Image) Size() int64 { return im.info.VirtualSize }

// Close does nothing. The file stays open.
func (im *Image) Close() error { return nil }

// Next returns the extent at off. Missing and unmapped blocks are holes.
func (im *Image) Next(off int64) (block.Extent, error) {
	size := im.Size()
	if off < 0 || off >= size {
		return block.Extent{}, api.Errorf(api.OutOfRange, "vhdx: offset %d is outside of the %d bytes", off, size)
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	e := block.Extent{Off: off}
	for visits := 0; e.End() < size && visits < maxVisits; visits++ {
		entries, err := im.readEntries(s, e.End(), size)
		if err != nil {
			return block.Extent{}, fmt.Errorf("vhdx: %w", err)
		}
		for ; len(entries) > 0; entries = entries[8:] {
			kind := kindOf(le.Uint64(entries))
			if e.Len > 0 && kind != e.Kind {
				return e, nil
			}
			e.Kind = kind
			next := (e.End()>>im.blockBits + 1) << im.blockBits
			e.Len = min(next, size) - off
		}
	}
	return e, nil
}

// ReadAt implements io.ReaderAt for the virtual disk.
func (im *Image) ReadAt(p []byte, off int64) (n int, err error) {
	size := im.Size()
	if off < 0 {
		return 0, api.Errorf(api.OutOfRange, "vhdx: offset %d is negative", off)
	}
	if off >= size {
		return 0, io.EOF
	}
	if int64(len(p)) > size-off {
		p, err = p[:size-off], io.EOF
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for n < len(p) {
		entries, err := im.readEntries(s, off+int64(n), off+int64(len(p)))
		if err != nil {
			return n, fmt.Errorf("vhdx: %w", err)
		}
		for ; len(entries) > 0; entries = entries[8:] {
			at := off + int64(n)
			in := at & (1<<im.blockBits - 1)
			to := p[n:min(int64(len(p)), int64(n)+1<<im.blockBits-in)]
			entry := le.Uint64(entries)
			if kindOf(entry) != block.Data {
				clear(to)
			} else if err := im.readFull(to, hostOf(entry)+in, "a block"); err != nil {
				return n, fmt.Errorf("vhdx: at %d: %w", at, err)
			} else if im.drop != nil {
				im.drop(hostOf(entry)+in, int64(len(to)))
			}
			n += len(to)
		}
	}
	return n, err
}

// scratches are buffers for one reader at a time.
var scratches = sync.Pool{New: func() any { return new(scratch) }}

type scratch struct{ entries [4096]byte }
