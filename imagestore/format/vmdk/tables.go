package vmdk

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

const (
	tableSize = perTable * 4
	ratioFrom = 64 << 20
	maxVisits = 4 << 10 // grain tables per call of Next
	zeroGrain = 1       // entry of a grain of zeros, if the header allows it
	markSize  = 12      // before the data of a compressed grain
)

// readFull reads the named structure; a file that ends earlier is corrupt.
func (im *Image) readFull(p []byte, off int64, what string) error {
	if off < 0 || off > im.fileSize || int64(len(p)) > im.fileSize-off {
		return corrupt("%s at %#x is not within the file of %d bytes: it was cut off", what, max(off, 0), im.fileSize)
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

type span struct{ from, to int64 }

// metadata are the ranges without grains.
type metadata struct {
	fixed  []span   // header, descriptor, directory
	tables []uint64 // sector<<32 | index, sorted
}

func (m *metadata) fixedHit(from, n int64) bool {
	return slices.ContainsFunc(m.fixed, func(s span) bool { return from < s.to && from+n > s.from })
}

func (m *metadata) hits(from, n int64) bool {
	if m.fixedHit(from, n) {
		return true
	}
	// The first table that ends behind from.
	i, _ := slices.BinarySearch(m.tables, uint64(max((from-tableSize)/sector+1, 0))<<32)
	return i < len(m.tables) && int64(m.tables[i]>>32)*sector < from+n
}

// loadTables reads the grain directory at off and walks all tables once, in the order of the file. Afterwards every
// offset is known to be inside the file and outside of metadata. A map with the same grain twice makes bombs: tables
// must be unique, plain grains are bounded by their sum, compressed grains by the marker in front of each.
func (im *Image) loadTables(off int64) error {
	h := im.h
	raw := make([]byte, h.numTables*4)
	if off < sector {
		return corrupt("the grain directory's offset %#x is in the header", off)
	}
	if err := im.readFull(raw, off, "the grain directory"); err != nil {
		return err
	}
	m := &metadata{fixed: []span{{0, sector}, {h.text, h.text + h.textLen}, {off, off + int64(len(raw))}}}
	im.tables = make([]uint32, h.numTables)
	count := int64(0)
	for i := range im.tables {
		if im.tables[i] = le.Uint32(raw[i*4:]); im.tables[i] != 0 {
			count++
		}
	}
	if count > im.fileSize/tableSize+1 {
		return corrupt("the grain directory names %d tables: the file has %d bytes only", count, im.fileSize)
	}
	m.tables = make([]uint64, 0, count)
	for i, s := range im.tables {
		if s != 0 {
			m.tables = append(m.tables, uint64(s)<<32|uint64(i))
		}
	}
	slices.Sort(m.tables)
	for i, t := range m.tables {
		at, index := int64(t>>32)*sector, uint32(t)
		switch {
		case at > im.fileSize || im.tableLen(int64(index))*4 > im.fileSize-at:
			return corrupt("grain table %d at %#x is not within the file of %d bytes: it was cut off", index, at, im.fileSize)
		case i > 0 && at-int64(m.tables[i-1]>>32)*sector < tableSize:
			return corrupt("grain tables %d and %d overlap at %#x", uint32(m.tables[i-1]), index, at)
		case m.fixedHit(at, tableSize):
			return corrupt("grain table %d at %#x lies in the image's header or directory", index, at)
		}
	}
	im.own, im.info.Data, im.stored = m, 0, 0
	if im.limits.Stream && h.redundant == 0 {
		im.checked = make([]atomic.Bool, len(im.tables))
		return nil
	}
	b := make([]byte, tableSize)
	for _, t := range m.tables {
		if err := im.checkNext(b, int64(uint32(t))); err != nil {
			return err
		}
	}
	im.own = nil
	return nil
}

// checkNext checks a grain table, and the sums over all checked tables.
func (im *Image) checkNext(b []byte, index int64) error {
	n, err := im.checkTable(b, index, im.own)
	if err != nil {
		return err
	}
	if im.stored += n; im.stored > im.fileSize {
		return corrupt("grains are used more than once: the tables map more data than the file has bytes (%d)", im.fileSize)
	}
	if d := im.info.Data; d > ratioFrom && d/im.limits.Ratio > im.fileSize {
		return api.Errorf(api.OutOfRange, "the image of %d bytes unpacks to more than %d times its size", im.fileSize,
			im.limits.Ratio)
	}
	return nil
}

// checkFirst checks a table before its use, unless another goroutine did.
func (im *Image) checkFirst(index int64) error {
	if im.checked == nil || im.checked[index].Load() {
		return nil
	}
	im.mu.Lock()
	defer im.mu.Unlock()
	if im.checked[index].Load() {
		return nil
	}
	if err := im.checkNext(make([]byte, tableSize), index); err != nil {
		return err
	}
	im.checked[index].Store(true)
	return nil
}

// tableLen returns how many entries of a table belong to the disk.
func (im *Image) tableLen(index int64) int64 {
	grains := (im.h.size + im.h.grain - 1) >> im.h.grainBits
	return min(grains-index*perTable, perTable)
}

// checkTable checks a grain table, counts its data, and returns the minimum of bytes of the data in the file.
func (im *Image) checkTable(b []byte, index int64, m *metadata) (stored int64, err error) {
	h := im.h
	b = b[:im.tableLen(index)*4]
	if err := im.readFull(b, int64(im.tables[index])*sector, "a grain table"); err != nil {
		return 0, err
	}
	for i := int64(0); i < int64(len(b))/4; i++ {
		entry := le.Uint32(b[i*4:])
		if im.entryKind(entry) != block.Data {
			continue
		}
		number, host := index*perTable+i, int64(entry)*sector
		n := min(h.grain, h.size-number<<h.grainBits)
		need := n
		if h.compressed {
			need = markSize + 1
		}
		switch {
		case host > im.fileSize || need > im.fileSize-host:
			return 0, corrupt("grain %d (at %d): its data at %#x is not within the file of %d bytes: it was cut off", number,
				number<<h.grainBits, host, im.fileSize)
		case m.hits(host, need):
			return 0, corrupt("grain %d (at %d): its data at %#x lies in the image's metadata", number,
				number<<h.grainBits, host)
		}
		im.info.Data += n
		if h.compressed {
			stored += sector
		} else {
			stored += n
		}
	}
	return stored, nil
}

func (im *Image) entryKind(entry uint32) block.Kind {
	switch {
	case entry == 0:
		return block.Hole
	case entry == zeroGrain && im.h.zeros:
		return block.Zero
	}
	return block.Data
}

// run is a contiguous range of the disk in the file. The run of a compressed image is inside one grain, and host is the
// offset of its marker.
type run struct {
	kind block.Kind
	host int64
	n    int64
}

// part is a part of the disk with loaded entries.
type part struct {
	im       *Image
	off, end int64
	entries  []byte // nil: all holes
	first    int64  // grain of the first entry
}

// lookupEntries finds the entries from off on, of at most limit bytes and within one grain table.
func (im *Image) lookupEntries(u *unpacker, off, limit int64) (part, error) {
	h := im.h
	number := off >> h.grainBits
	index := number / perTable
	end := min((index+1)*perTable<<h.grainBits, h.size, off+limit)
	p := part{im: im, off: off, end: end, first: number}
	if im.tables[index] == 0 {
		return p, nil
	}
	if err := im.checkFirst(index); err != nil {
		return p, err
	}
	count := (end-1)>>h.grainBits - number + 1
	p.entries = u.entries[:count*4]
	return p, im.readFull(p.entries, int64(im.tables[index])*sector+number%perTable*4, "a grain table")
}

func (p *part) left() bool { return p.off < p.end }

// next takes the next run off the part. Without host, grains of one kind are one run at any place.
func (p *part) next(host bool) run {
	if p.entries == nil {
		r := run{n: p.end - p.off}
		p.off = p.end
		return r
	}
	bits := p.im.h.grainBits
	at := func(off int64) run {
		number := off >> bits
		entry := le.Uint32(p.entries[(number-p.first)*4:])
		in := off - number<<bits
		r := run{kind: p.im.entryKind(entry), n: min((number+1)<<bits, p.end) - off}
		if r.host = int64(entry) * sector; !p.im.h.compressed {
			r.host += in
		}
		return r
	}
	r := at(p.off)
	for p.off += r.n; p.off < p.end; {
		more := at(p.off)
		if more.kind != r.kind || host && r.kind == block.Data && (p.im.h.compressed || more.host != r.host+r.n) {
			break
		}
		r.n += more.n
		p.off += more.n
	}
	return r
}
