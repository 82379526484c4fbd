package qcow2

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

const (
	l1Reserved    = 0x7f000000000001ff
	l2Reserved    = 0x3f000000000001fe
	offsetMask    = 0x00fffffffffffe00
	flagZero      = 1 << 0
	flagPacked    = 1 << 62
	sector        = 512
	subclusters   = 32
	maxSlice      = 64 << 10
	ratioFrom     = 64 << 20
	maxSpanVisits = 16 << 10 // entries per call of Next
)

// mapping is the place of a run of the virtual disk. The run of a compressed cluster is the rest of the cluster.
type mapping struct {
	kind   block.Kind
	packed bool
	host   int64 // of the run's first byte; of the cluster's compressed bytes if packed
	bytes  int64 // of the compressed data, at most
	n      int64 // bytes of the virtual disk
}

// entry is a decoded L2 entry. A subcluster without a bit in alloc and zero is a hole.
type entry struct {
	packed      bool
	host, bytes int64
	alloc, zero uint32
}

func (e entry) kind(sub uint) block.Kind {
	switch {
	case e.packed || e.alloc>>sub&1 != 0:
		return block.Data
	case e.zero>>sub&1 != 0:
		return block.Zero
	}
	return block.Hole
}

// decodeEntry reads entry i of a slice of an L2 table. Its errors do not name the place of the entry.
func (im *Image) decodeEntry(slice []byte, i int64) (e entry, err error) {
	raw := binary.BigEndian.Uint64(slice[i<<im.h.entryBits():])
	if raw&flagPacked != 0 {
		x := 62 - (im.h.clusterBits - 8)
		e.packed = true
		e.host = int64(raw & (1<<x - 1))
		e.bytes = int64(raw&(flagPacked-1)>>x+1)*sector - e.host%sector
		if e.host < im.cluster || e.host >= im.fileSize {
			return e, corrupt("compressed data at %#x is outside of the file of %d bytes", e.host, im.fileSize)
		}
		// The last sector need not be there in full: the decoder says if anything is missing.
		e.bytes = min(e.bytes, im.fileSize-e.host)
		return e, nil
	}
	if raw&l2Reserved != 0 {
		return e, corrupt("reserved bits are set in %#x", raw)
	}
	e.host = int64(raw & offsetMask)
	if e.host&(im.cluster-1) != 0 {
		return e, corrupt("host offset %#x is not that of a cluster", e.host)
	}
	if im.h.extended {
		if raw&flagZero != 0 {
			return e, corrupt("reserved bits are set in %#x", raw)
		}
		bitmap := binary.BigEndian.Uint64(slice[i<<4+8:])
		e.alloc, e.zero = uint32(bitmap), uint32(bitmap>>32)
		if e.alloc&e.zero != 0 {
			return e, corrupt("a subcluster is both data and zero in %#x", bitmap)
		}
	} else if raw&flagZero != 0 {
		if im.h.version < 3 {
			return e, corrupt("a zero cluster in a version 2 image")
		}
		e.zero = ^uint32(0)
	} else if e.host != 0 {
		e.alloc = ^uint32(0)
	}
	if e.alloc != 0 && e.host == 0 {
		return e, corrupt("subclusters are allocated, but no cluster")
	}
	return e, nil
}

// neededBytes returns how many bytes of a cluster belong to the disk and must be in the file.
func (im *Image) neededBytes(e entry, number int64) int64 {
	n := min(im.cluster, im.h.size-number<<im.h.clusterBits)
	if im.h.extended {
		n = min(n, im.cluster/subclusters*int64(bits.Len32(e.alloc)))
	}
	return n
}

func (im *Image) readL1() error {
	h := im.h
	raw := make([]byte, h.l1Entries*8)
	if err := im.readFull(raw, h.l1Offset, "the L1 table"); err != nil {
		return err
	}
	im.l1 = make([]int64, h.l1Entries)
	for i := range im.l1 {
		e := binary.BigEndian.Uint64(raw[i*8:])
		off := int64(e & offsetMask)
		if e&l1Reserved != 0 || off&(im.cluster-1) != 0 {
			return corrupt("L1 entry %d: %#x is not the offset of a cluster", i, e)
		}
		im.l1[i] = off
	}
	return nil
}

// overlay finds clusters of the active map inside its tables.
type overlay struct {
	l1From, l1To int64
	cluster      int64
	l2           []int64 // sorted
}

func (o *overlay) hits(from, n int64) bool {
	if from < o.l1To && from+n > o.l1From {
		return true
	}
	i, _ := slices.BinarySearch(o.l2, from-o.cluster+1)
	return i < len(o.l2) && o.l2[i] < from+n
}

// checkTables walks all tables once, in the order of the file. Afterwards every offset is known to be inside the file
// and outside of all metadata. A map with the same cluster twice makes loops and bombs: tables must be unique, data is
// bounded by its sum. In lazy mode, checkTables reads the L1 table alone.
func (im *Image) checkTables() error {
	h := im.h
	type table struct {
		off   int64
		index int64
	}
	var tables []table
	for i, off := range im.l1 {
		if off != 0 {
			tables = append(tables, table{off, int64(i)})
		}
	}
	slices.SortFunc(tables, func(a, b table) int { return cmp.Compare(a.off, b.off) })
	o := &im.overlay
	o.l1From, o.l1To, o.cluster = h.l1Offset, h.l1Offset+h.l1Entries*8, im.cluster
	for i, t := range tables {
		switch {
		case t.off > im.fileSize-im.cluster:
			return corrupt("L1 entry %d: the L2 table at %#x is not within the file of %d bytes: it was cut off", t.index,
				t.off, im.fileSize)
		case i > 0 && t.off == tables[i-1].off:
			return corrupt("L1 entries %d and %d name the same L2 table at %#x", tables[i-1].index, t.index, t.off)
		case o.hits(t.off, im.cluster):
			return corrupt("L1 entry %d: the L2 table at %#x lies in the L1 table", t.index, t.off)
		}
	}
	for _, t := range tables {
		o.l2 = append(o.l2, t.off)
	}
	if im.limits.Lazy {
		im.checked = make([]atomic.Bool, len(im.l1))
		return nil
	}
	for _, t := range tables {
		if err := im.checkNext(t.index); err != nil {
			return err
		}
	}
	return nil
}

// checkNext checks the L2 table of an L1 entry, and the sums over all checked tables.
func (im *Image) checkNext(index int64) error {
	before := im.h.info.Data
	n, err := im.checkTable(index, &im.overlay)
	if err != nil {
		return err
	}
	if im.plain += n; im.plain > im.fileSize {
		return corrupt("clusters are used more than once: the tables map more data than the file has bytes (%d)",
			im.fileSize)
	}
	size, counted := im.fileSize, im.h.info.Data
	if s, ok := im.r.(interface{ Have() int64 }); ok && size == unknownSize {
		size, counted = s.Have(), before // the data of this table is still in transfer
	}
	if counted > ratioFrom && counted/im.limits.Ratio > size {
		return api.Errorf(api.OutOfRange, "the image of %d bytes unpacks to more than %d times its size", size,
			im.limits.Ratio)
	}
	return nil
}

// checkTable checks the L2 table of an L1 entry, counts its data, and returns the bytes in plain clusters.
func (im *Image) checkTable(index int64, o *overlay) (plain int64, err error) {
	h, first := im.h, index<<im.perTableBits
	last := min(first+1<<im.perTableBits, (h.size+im.cluster-1)>>h.clusterBits)
	for number := first; number < last; {
		slice, err := im.loadSlice(number)
		if err != nil {
			return 0, err
		}
		for end := min(last, (number|(im.perSlice-1))+1); number < end; number++ {
			e, err := im.decodeEntry(slice, number&(im.perSlice-1))
			if err != nil {
				return 0, im.nameCluster(number, err)
			}
			if !e.packed && e.alloc == 0 {
				continue
			}
			n := min(im.cluster, h.size-number<<h.clusterBits)
			if e.packed {
				h.info.Compressed += n
			} else {
				e.bytes = im.neededBytes(e, number)
				if e.host+e.bytes > im.fileSize {
					return 0, im.nameCluster(number, corrupt("the data at %#x is not within the file of %d bytes: it was cut off",
						e.host, im.fileSize))
				}
				if h.extended {
					n = min(n, im.cluster/subclusters*int64(bits.OnesCount32(e.alloc)))
				}
				plain += n
			}
			h.info.Data += n
			// Compressed data is counted in whole sectors, and the last one may belong to something else.
			if o.hits(e.host, min(e.bytes, max(1, e.bytes-sector))) {
				return 0, im.nameCluster(number, corrupt("the data at %#x lies in the image's tables", e.host))
			}
		}
	}
	return plain, nil
}

// nameCluster names the cluster in an error.
func (im *Image) nameCluster(number int64, err error) error {
	return fmt.Errorf("cluster %d (at %d): %w", number, number<<im.h.clusterBits, err)
}

// checkedSlice returns the part of an existing L2 table with the cluster, after the check of the table.
func (im *Image) checkedSlice(number int64) ([]byte, error) {
	if index := number >> im.perTableBits; im.checked != nil && !im.checked[index].Load() {
		if err := im.checkFirst(index); err != nil {
			return nil, err
		}
	}
	return im.loadSlice(number)
}

// checkFirst checks the L2 table of an L1 entry, unless another goroutine did.
func (im *Image) checkFirst(index int64) error {
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.checked[index].Load() {
		return nil
	}
	if err := im.checkNext(index); err != nil {
		return err
	}
	im.checked[index].Store(true)
	return nil
}

// loadSlice is checkedSlice without the check.
func (im *Image) loadSlice(number int64) ([]byte, error) {
	key := number >> im.sliceBits
	if b, ok := im.tables.get(key); ok {
		return b, nil
	}
	in := number & (1<<im.perTableBits - 1) &^ (im.perSlice - 1)
	b := make([]byte, im.perSlice<<im.h.entryBits())
	if err := im.readFull(b, im.l1[number>>im.perTableBits]+in<<im.h.entryBits(), "an L2 table"); err != nil {
		return nil, err
	}
	im.tables.put(key, b)
	return b, nil
}

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
		return corrupt("%s at %#x cannot be read: the file ends at %#x: it was cut off", what, off, off+int64(n))
	}
	return fmt.Errorf("read %s at %#x: %w", what, off, err)
}

// findMapping finds the run of one mapping at off, of at most limit bytes, within one slice of the tables. visits is
// the number of entries read.
func (im *Image) findMapping(off, limit int64) (m mapping, visits int, err error) {
	h := im.h
	limit = min(limit, h.size-off)
	number := off >> h.clusterBits
	if im.l1[number>>im.perTableBits] == 0 {
		i := number>>im.perTableBits + 1
		for visits = 1; i < int64(len(im.l1)) && im.l1[i] == 0 && visits < maxSpanVisits; visits++ {
			i++
		}
		return mapping{kind: block.Hole, n: min(limit, i<<h.tableBits()-off)}, visits, nil
	}
	slice, err := im.checkedSlice(number)
	if err != nil {
		return m, 0, err
	}
	for end := (number | (im.perSlice - 1)) + 1; number < end && m.n < limit; number++ {
		visits++
		e, err := im.decodeEntry(slice, number&(im.perSlice-1))
		if err != nil {
			return m, visits, im.nameCluster(number, err)
		}
		in := (off + m.n) & (im.cluster - 1)
		if e.packed {
			if m.n == 0 {
				m = mapping{kind: block.Data, packed: true, host: e.host, bytes: e.bytes, n: min(limit, im.cluster-in)}
			}
			break
		}
		if ok := im.extendMapping(&m, e, in); !ok {
			break
		}
	}
	m.n = min(m.n, limit)
	return m, visits, nil
}

// extendMapping adds the mapping of e from byte in of its cluster, and reports whether the run reaches the end of the
// cluster.
func (im *Image) extendMapping(m *mapping, e entry, in int64) bool {
	step := im.cluster
	if im.h.extended {
		step = im.cluster / subclusters
	}
	for in < im.cluster {
		// Without subclusters all bits are equal.
		sub := uint(in * subclusters >> im.h.clusterBits)
		kind := e.kind(sub)
		if m.n == 0 {
			m.kind, m.host = kind, e.host+in
		} else if kind != m.kind || kind == block.Data && e.host+in != m.host+m.n {
			return false
		}
		next := (in/step + 1) * step
		m.n += next - in
		in = next
	}
	return true
}
