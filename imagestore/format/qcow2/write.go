package qcow2

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// WriteOptions configure Write. The zero value is usable.
type WriteOptions struct {
	// Compress makes clusters of zstd (QEMU 5.1 or later reads them).
	Compress bool
	// Progress, if set, is told how many bytes of the content are dealt with.
	Progress func(done, total int64)
}

const (
	writeCluster = 64 << 10
	writeBits    = 16
	perTable     = writeCluster / 8        // clusters that an L2 table maps
	tableSpan    = perTable * writeCluster // bytes
	maxWrite     = int64(1) << 46          // bytes of content
	copiedFlag   = uint64(1) << 63         // in an entry: the only reference of the cluster
	packedFlag   = uint64(1) << 62         // in an entry: compressed
	sectorShift  = 62 - (writeBits - 8)    // place of the count of sectors in an entry
	zstdFeature  = uint64(1) << 3          // incompatible: the compression type counts
	headerLength = 112                     // with the compression type
	perRefBlock  = int64(writeCluster / 2) // counts of 16 bits
	perRefTable  = int64(writeCluster / 8) // of their blocks in a cluster of the table
)

// Write writes src as a qcow2 image of version 3; holes and zeros take no room. out must be empty. The header is
// written last, so that an incomplete file is no image.
func Write(ctx context.Context, out io.WriterAt, src block.Source, o WriteOptions) error {
	if err := writeImage(ctx, out, src, o); err != nil {
		return fmt.Errorf("write qcow2: %w", err)
	}
	return nil
}

type qwriter struct {
	out    io.WriterAt
	src    block.Source
	o      WriteOptions
	size   int64
	end    int64 // of the file so far
	packed int64 // place of the next compressed cluster, if before end
	refs   []uint16
	l1     []uint64
	l2     []uint64 // of the current table
}

func writeImage(ctx context.Context, out io.WriterAt, src block.Source, o WriteOptions) error {
	w := &qwriter{out: out, src: src, o: o, size: src.Size()}
	if w.size > maxWrite {
		return api.Errorf(api.OutOfRange, "%d bytes are more than %d", w.size, maxWrite)
	}
	if w.size%512 != 0 {
		return api.Errorf(api.Invalid, "%d bytes are no whole sectors", w.size)
	}
	w.l1 = make([]uint64, (w.size+tableSpan-1)/tableSpan)
	l1Bytes := max((int64(len(w.l1))*8+writeCluster-1)/writeCluster, 1) * writeCluster
	l1At := int64(writeCluster)
	w.allocateClusters(l1At + l1Bytes)
	if err := w.writeContent(ctx); err != nil {
		return err
	}
	l1 := make([]byte, l1Bytes)
	for i, e := range w.l1 {
		binary.BigEndian.PutUint64(l1[i*8:], e)
	}
	if _, err := out.WriteAt(l1, l1At); err != nil {
		return err
	}
	tableAt, clusters, err := w.writeRefcounts()
	if err != nil {
		return err
	}
	h := make([]byte, writeCluster)
	be := binary.BigEndian
	copy(h, "QFI\xfb")
	be.PutUint32(h[4:], 3)
	be.PutUint32(h[20:], writeBits)
	be.PutUint64(h[24:], uint64(w.size))
	be.PutUint32(h[36:], uint32(len(w.l1)))
	be.PutUint64(h[40:], uint64(l1At))
	be.PutUint64(h[48:], uint64(tableAt))
	be.PutUint32(h[56:], uint32(clusters))
	if o.Compress {
		be.PutUint64(h[72:], zstdFeature)
		h[104] = 1
	}
	be.PutUint32(h[96:], 4) // counts of 16 bits
	be.PutUint32(h[100:], headerLength)
	_, err = out.WriteAt(h, 0)
	return err
}

// allocateClusters extends the file by whole clusters with one reference each, and returns their place.
func (w *qwriter) allocateClusters(n int64) int64 {
	at := w.end
	w.end += (n + writeCluster - 1) / writeCluster * writeCluster
	for int64(len(w.refs)) < w.end/writeCluster {
		w.refs = append(w.refs, 1)
	}
	return at
}

// batch is a chunk of the content in progress.
type batch struct {
	off   int64
	data  []byte
	parts [][]byte // by cluster: nil for zeros; compressed if smaller
	err   error
	ready chan struct{}
}

func (w *qwriter) writeContent(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	queue := make(chan *batch, 2*runtime.GOMAXPROCS(0))
	work := make(chan *batch)
	free := sync.Pool{New: func() any { b := make([]byte, block.ChunkSize); return &b }}
	defer wg.Wait()
	defer cancel()
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			var enc *zstd.Encoder
			if w.o.Compress {
				enc, _ = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(writeCluster),
					zstd.WithSingleSegment(true)) // the options are sound
				defer func() { _ = enc.Close() }() // no output is buffered
			}
			for b := range work {
				b.err = w.fillBatch(b, enc)
				close(b.ready)
			}
		})
	}
	planned := make(chan error, 1)
	wg.Go(func() {
		defer close(queue)
		defer close(work)
		for off := int64(0); off < w.size; {
			next, err := w.nextData(off)
			if err != nil || next >= w.size {
				planned <- err
				return
			}
			off = next / block.ChunkSize * block.ChunkSize
			n := min(block.ChunkSize, w.size-off)
			b := &batch{off: off, data: (*free.Get().(*[]byte))[:n], ready: make(chan struct{})}
			for _, c := range []chan *batch{queue, work} {
				select {
				case c <- b:
				case <-ctx.Done():
					planned <- ctx.Err()
					return
				}
			}
			off += n
		}
		planned <- nil
	})
	table := int64(-1)
	for b := range queue {
		select {
		case <-b.ready:
		case <-ctx.Done():
			return ctx.Err()
		}
		if b.err != nil {
			return b.err
		}
		for i, part := range b.parts {
			at := b.off + int64(i)*writeCluster
			if part == nil {
				continue
			}
			if t := at / tableSpan; t != table {
				if err := w.endTable(table); err != nil {
					return err
				}
				table, w.l2 = t, make([]uint64, perTable)
			}
			entry, err := w.putCluster(part)
			if err != nil {
				return err
			}
			w.l2[at/writeCluster%perTable] = entry
		}
		whole := b.data[:block.ChunkSize]
		free.Put(&whole)
		if w.o.Progress != nil {
			w.o.Progress(b.off+int64(len(b.data)), w.size)
		}
	}
	return errors.Join(<-planned, w.endTable(table))
}

// nextData returns the first byte of data at or behind off.
func (w *qwriter) nextData(off int64) (int64, error) {
	for off < w.size {
		e, err := w.src.Next(off)
		if err != nil {
			return 0, fmt.Errorf("map of the source at %d: %w", off, err)
		}
		if e.Kind == block.Data {
			return off, nil
		}
		off = e.End()
	}
	return off, nil
}

// fillBatch reads a chunk and makes its clusters.
func (w *qwriter) fillBatch(b *batch, enc *zstd.Encoder) error {
	if n, err := w.src.ReadAt(b.data, b.off); n < len(b.data) {
		return fmt.Errorf("read at %d: %w", b.off, err)
	}
	var zeros [writeCluster]byte
	for off := 0; off < len(b.data); off += writeCluster {
		part := b.data[off:min(off+writeCluster, len(b.data))]
		if bytes.Equal(part, zeros[:len(part)]) {
			b.parts = append(b.parts, nil)
			continue
		}
		if len(part) < writeCluster { // the last one
			part = append(bytes.Clone(part), zeros[:writeCluster-len(part)]...)
		}
		if enc != nil {
			if small := enc.EncodeAll(part, nil); len(small) < writeCluster-512 {
				part = small
			}
		}
		b.parts = append(b.parts, part)
	}
	return nil
}

// putCluster writes a cluster and returns its entry.
func (w *qwriter) putCluster(part []byte) (uint64, error) {
	if len(part) == writeCluster {
		at := w.allocateClusters(writeCluster)
		_, err := w.out.WriteAt(part, at)
		return uint64(at) | copiedFlag, err
	}
	// Compressed ones lie one behind the other, each from a sector on; they count in every cluster that they touch.
	n := int64(len(part)+511) / 512 * 512
	room := (w.packed+writeCluster-1)/writeCluster*writeCluster - w.packed
	at := w.packed
	switch {
	case room == 0:
		at = w.allocateClusters(writeCluster)
		w.refs[at/writeCluster] = 0
	case n > room && w.packed+room == w.end: // the data continues in the next cluster
		next := w.allocateClusters(writeCluster)
		w.refs[next/writeCluster] = 0
	case n > room:
		at = w.allocateClusters(writeCluster)
		w.refs[at/writeCluster] = 0
	}
	w.packed = at + n
	for c := at / writeCluster; c <= (at+n-1)/writeCluster; c++ {
		w.refs[c]++
	}
	_, err := w.out.WriteAt(append(part, make([]byte, n-int64(len(part)))...), at)
	return packedFlag | uint64(n/512-1)<<sectorShift | uint64(at), err
}

// endTable writes the full L2 table.
func (w *qwriter) endTable(table int64) error {
	if table < 0 {
		return nil
	}
	b := make([]byte, writeCluster)
	for i, e := range w.l2 {
		binary.BigEndian.PutUint64(b[i*8:], e)
	}
	at := w.allocateClusters(writeCluster)
	w.l1[table] = uint64(at) | copiedFlag
	_, err := w.out.WriteAt(b, at)
	return err
}

// writeRefcounts writes the reference counts of all clusters, including the counts themselves.
func (w *qwriter) writeRefcounts() (tableAt, tableClusters int64, err error) {
	used := w.end / writeCluster
	blocks, tables := int64(0), int64(0)
	for { // more counts need more room, which needs counts
		b := (used + blocks + tables + perRefBlock - 1) / perRefBlock
		t := (b + perRefTable - 1) / perRefTable
		if b == blocks && t == tables {
			break
		}
		blocks, tables = b, t
	}
	tableAt = w.allocateClusters(tables * writeCluster)
	blocksAt := w.allocateClusters(blocks * writeCluster)
	table := make([]byte, tables*writeCluster)
	buf := make([]byte, writeCluster)
	for i := range blocks {
		binary.BigEndian.PutUint64(table[i*8:], uint64(blocksAt+i*writeCluster))
		clear(buf)
		for k := range perRefBlock {
			if c := i*perRefBlock + k; c < int64(len(w.refs)) {
				binary.BigEndian.PutUint16(buf[k*2:], w.refs[c])
			}
		}
		if _, err := w.out.WriteAt(buf, blocksAt+i*writeCluster); err != nil {
			return 0, 0, err
		}
	}
	_, err = w.out.WriteAt(table, tableAt)
	return tableAt, tables, err
}
