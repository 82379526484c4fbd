// Package qcow2 reads qcow2 images: versions 2 and 3, every cluster size, zlib and zstd clusters, zero clusters and
// subclusters. The package is written from the format's public specification and treats an image as hostile.
//
// An Image is a block.Source: block.Copy over the Image is the import. The package starts no goroutine; each reader
// unpacks its own clusters straight into its own buffer, so that an import is as parallel as its readers. Image.mu
// guards the results of table checks, cache.mu the cache; they are never held together.
//
// Dependencies of an image on other files or unknown features are refused with a message each: a backing file, an
// external data file, encryption, unknown incompatible features, an image marked corrupt. Internal snapshots are
// ignored. A dirty image is read: see Info.Dirty. Open walks all tables, so that afterwards only data can be damaged;
// for an image in transfer (Limits.Lazy) each table is checked at its first use. Reads never leave the file, and memory
// depends on the limits alone.
package qcow2

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Image is an open qcow2 image. Several goroutines may call its methods at once.
type Image struct {
	r        io.ReaderAt
	fileSize int64
	limits   Limits
	h        *header
	cluster  int64
	l1       []int64 // offsets of the L2 tables; 0: all holes

	perTableBits uint  // log of the clusters that an L2 table maps
	sliceBits    uint  // log of the clusters that a cached part of an L2 table maps
	perSlice     int64 // 1 << sliceBits
	tables       *cache
	clusters     *cache             // unpacked clusters, for reads of less than a cluster
	drop         func(off, n int64) // reports bytes that were read for good; or nil

	mu      sync.Mutex // guards the results of table checks
	overlay overlay
	plain   int64         // bytes in plain clusters, in checked tables
	checked []atomic.Bool // by L1 entry; nil: all tables
}

var _ block.Source = (*Image)(nil)

// unknownSize stands for a file of unknown size.
const unknownSize = 1 << 60

// Open opens the image in the first size bytes of r, which must not change. Close of the image leaves r open. A
// block.Dropper behind r learns which bytes were read for good. Errors are of kind Invalid (not qcow2), Unsupported,
// OutOfRange (above a limit), Corrupt (damaged or cut off), or come from r.
func Open(r io.ReaderAt, size int64, lim Limits) (*Image, error) {
	im, err := openImage(r, size, lim.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("qcow2: %w", err)
	}
	return im, nil
}

func openImage(r io.ReaderAt, size int64, lim Limits) (*Image, error) {
	im := &Image{r: r, fileSize: size, limits: lim}
	if d, ok := r.(block.Dropper); ok {
		im.drop = d.Drop
	}
	if size < 0 {
		im.fileSize = unknownSize
	}
	head := make([]byte, min(im.fileSize, HeadSize))
	if n, err := im.r.ReadAt(head, 0); err == nil || errors.Is(err, io.EOF) {
		head = head[:n]
	} else {
		return nil, fmt.Errorf("read the header: %w", err)
	}
	var err error
	if im.h, err = parseHeader(head, lim); err != nil {
		return nil, err
	}
	im.cluster = 1 << im.h.clusterBits
	im.perTableBits = im.h.clusterBits - im.h.entryBits()
	im.perSlice = min(im.cluster, maxSlice) >> im.h.entryBits()
	for 1<<im.sliceBits < im.perSlice {
		im.sliceBits++
	}
	im.tables = newCache(lim.Memory / 2)
	im.clusters = newCache(lim.Memory / 2)
	if err := im.readL1(); err != nil {
		return nil, err
	}
	if err := im.checkTables(); err != nil {
		return nil, err
	}
	return im, nil
}

// Info describes the image.
func (im *Image) Info() Info {
	im.mu.Lock()
	defer im.mu.Unlock()
	return im.h.info
}

// Size returns the virtual size in bytes.
func (im *Image) Size() int64 { return im.h.size }

// Close drops the cache. The file stays open.
func (im *Image) Close() error {
	im.tables.clear()
	im.clusters.clear()
	return nil
}

// Next returns the extent at off. Unallocated clusters are holes.
func (im *Image) Next(off int64) (block.Extent, error) {
	if off < 0 || off >= im.h.size {
		return block.Extent{}, api.Errorf(api.OutOfRange, "qcow2: offset %d is outside of the %d bytes", off, im.h.size)
	}
	e := block.Extent{Off: off}
	for visits := 0; e.End() < im.h.size && visits < maxSpanVisits; {
		m, n, err := im.findMapping(e.End(), im.h.size)
		if err != nil {
			return block.Extent{}, fmt.Errorf("qcow2: %w", err)
		}
		if e.Len > 0 && m.kind != e.Kind {
			break
		}
		e.Kind = m.kind
		e.Len += m.n
		visits += n
		if im.checked != nil && e.Kind == block.Data && e.End()&(1<<im.h.tableBits()-1) == 0 {
			break // the next table may still be in transfer, the data of this table has arrived
		}
	}
	return e, nil
}

// ReadAt implements io.ReaderAt for the virtual disk.
func (im *Image) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, api.Errorf(api.OutOfRange, "qcow2: offset %d is negative", off)
	}
	if off >= im.h.size {
		return 0, io.EOF
	}
	if int64(len(p)) > im.h.size-off {
		p, err = p[:im.h.size-off], io.EOF
	}
	u := unpackers.Get().(*unpacker)
	defer unpackers.Put(u)
	u.reset()
	for n < len(p) {
		m, _, err := im.findMapping(off+int64(n), int64(len(p)-n))
		if err != nil {
			return n, fmt.Errorf("qcow2: %w", err)
		}
		to := p[n : n+int(m.n) : n+int(m.n)]
		switch {
		case m.packed:
			err = im.unpackCluster(u, m, to, off+int64(n), int64(len(p)-n))
		case m.kind == block.Data:
			if err = im.readFull(to, m.host, "a data cluster"); err == nil && im.drop != nil {
				im.drop(m.host, int64(len(to)))
			}
		default:
			clear(to)
		}
		if err != nil {
			return n, fmt.Errorf("qcow2: at %d: %w", off+int64(n), err)
		}
		n += len(to)
	}
	return n, err
}
