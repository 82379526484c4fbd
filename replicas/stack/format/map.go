package format

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// BlockMap answers which blocks a layer holds.
type BlockMap interface {
	// Length is the size of the layer in bytes.
	Length() int64
	// Uniform is the one kind of page p, if the page is known to have one.
	Uniform(p int) (block.Kind, bool)
	// Load fills kinds, one per block of page p, up to the end of the layer; the rest is holes.
	Load(p int, kinds *[PageBlocks]block.Kind) error
}

// Sizes in the file of a map, in bytes.
const (
	mapMagic  = "DROVERM1"
	MapHeader = 64
	MapEntry  = 16
	mapPage   = PageBlocks / 4 // bytes of a page with 2 bits per block

	entryUniform = 0
	entryPacked  = 1
)

// Map is the opened map of a layer: its table in memory, its pages on the disk.
type Map struct {
	size  int64
	pages int
	table []byte
	h     io.ReaderAt
}

// OpenMap reads and checks the header and the table.
func OpenMap(h io.ReaderAt, length, size int64) (*Map, error) {
	var b [MapHeader]byte
	if _, err := h.ReadAt(b[:], 0); err != nil {
		return nil, api.Errorf(api.Corrupt, "header of the map: %w", err)
	}
	pages := (size + PageSize - 1) / PageSize
	if string(b[:8]) != mapMagic || binary.LittleEndian.Uint32(b[8:]) != version ||
		crc32.Checksum(b[:60], castagnoli) != binary.LittleEndian.Uint32(b[60:]) ||
		int64(binary.LittleEndian.Uint64(b[16:])) != size || int64(binary.LittleEndian.Uint64(b[24:])) != pages ||
		length < MapHeader+pages*MapEntry {
		return nil, api.Errorf(api.Corrupt, "header of the map is damaged")
	}
	m := &Map{size: size, pages: int(pages), table: make([]byte, pages*MapEntry), h: h}
	if _, err := h.ReadAt(m.table, MapHeader); err != nil {
		return nil, fmt.Errorf("table of the map: %w", err)
	}
	if crc32.Checksum(m.table, castagnoli) != binary.LittleEndian.Uint32(b[32:]) {
		return nil, api.Errorf(api.Corrupt, "table of the map is damaged")
	}
	for p := range m.pages {
		t, k, off := m.entryAt(p)
		if t > entryPacked || k > byte(block.Data) ||
			t == entryPacked && (off < MapHeader+pages*MapEntry || off > length-mapPage) {
			return nil, api.Errorf(api.Corrupt, "table of the map: entry %d makes no sense", p)
		}
	}
	return m, nil
}

// Length is the size of the layer in bytes.
func (m *Map) Length() int64 { return m.size }

func (m *Map) entryAt(p int) (typ, kind byte, off int64) {
	e := m.table[p*MapEntry:]
	return e[0], e[1], int64(binary.LittleEndian.Uint64(e[8:]))
}

// Uniform is the one kind of page p, if the page has one.
func (m *Map) Uniform(p int) (block.Kind, bool) {
	if p >= m.pages {
		return block.Hole, true
	}
	t, k, _ := m.entryAt(p)
	return block.Kind(k), t == entryUniform
}

// Load fills kinds, one byte per block of page p, up to the end of the layer; the rest is holes.
func (m *Map) Load(p int, kinds *[PageBlocks]block.Kind) error {
	end := PageBlocks
	if last := m.size>>BlockBits - int64(p)<<PageBits; last < PageBlocks {
		end = int(max(last, 0))
	}
	clear(kinds[end:])
	if k, ok := m.Uniform(p); ok {
		for i := range kinds[:end] {
			kinds[i] = k
		}
		return nil
	}
	_, _, off := m.entryAt(p)
	var b [mapPage]byte
	if _, err := m.h.ReadAt(b[:], off); err != nil {
		return fmt.Errorf("page %d of the map: %w", p, err)
	}
	if crc32.Checksum(b[:], castagnoli) != binary.LittleEndian.Uint32(m.table[p*MapEntry+4:]) {
		return api.Errorf(api.Corrupt, "page %d of the map is damaged", p)
	}
	for i := range kinds[:end] {
		k := block.Kind(b[i>>2] >> (i & 3 * 2) & 3)
		if k > block.Data {
			return api.Errorf(api.Corrupt, "page %d of the map holds a kind that does not exist", p)
		}
		kinds[i] = k
	}
	return nil
}

// MapWriter writes the file of a map: first pages in any number of steps, in the end the header and the table.
type MapWriter struct {
	w    io.WriterAt
	head []byte // header and table
	at   int64  // where the next page goes
}

// NewMapWriter begins a map of a number of pages.
func NewMapWriter(w io.WriterAt, pages int) *MapWriter {
	m := &MapWriter{w: w, head: make([]byte, MapHeader+pages*MapEntry)}
	m.at = int64(len(m.head))
	return m
}

// tableEntries returns the table entries of the pages [from, end).
func (m *MapWriter) tableEntries(from, end int) []byte {
	return m.head[MapHeader+from*MapEntry : MapHeader+end*MapEntry]
}

// Put writes the pages [from, end) of an index of kinds, without the table entries. Only a few pages are in memory a
// second time.
func (m *MapWriter) Put(x *Index, from, end int) error {
	some := make([]byte, 0, 64*mapPage)
	flush := func() error {
		_, err := m.w.WriteAt(some, m.at)
		m.at, some = m.at+int64(len(some)), some[:0]
		return err
	}
	for p := from; p < end; p++ {
		e := m.tableEntries(p, p+1)
		q := x.Packed[p]
		if q == nil {
			e[0], e[1] = entryUniform, byte(x.Uniform[p])
			continue
		}
		n := len(some)
		some = some[:n+mapPage]
		b := some[n:]
		clear(b)
		for i := range q.blocks {
			b[i>>2] |= byte(q.pal[q.codeAt(i)]) << (i & 3 * 2)
		}
		e[0] = entryPacked
		binary.LittleEndian.PutUint32(e[4:], crc32.Checksum(b, castagnoli))
		binary.LittleEndian.PutUint64(e[8:], uint64(m.at)+uint64(n))
		if len(some) == cap(some) {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if len(some) > 0 {
		return flush()
	}
	return nil
}

// Finish writes the header and the table, after all pages of a layer of that many blocks.
func (m *MapWriter) Finish(blocks int64) error {
	pages := (len(m.head) - MapHeader) / MapEntry
	copy(m.head, mapMagic)
	binary.LittleEndian.PutUint32(m.head[8:], version)
	binary.LittleEndian.PutUint64(m.head[16:], uint64(blocks)<<BlockBits)
	binary.LittleEndian.PutUint64(m.head[24:], uint64(pages))
	binary.LittleEndian.PutUint32(m.head[32:], crc32.Checksum(m.tableEntries(0, pages), castagnoli))
	binary.LittleEndian.PutUint32(m.head[60:], crc32.Checksum(m.head[:60], castagnoli))
	_, err := m.w.WriteAt(m.head, 0)
	return err
}

// PutMap writes the file of a map from an index of kinds.
func PutMap(w io.WriterAt, x *Index) error {
	m := NewMapWriter(w, len(x.Uniform))
	if err := m.Put(x, 0, len(x.Uniform)); err != nil {
		return err
	}
	return m.Finish(x.Blocks)
}

// WriteMap makes the file of a map with durable content; the name becomes durable with a sync of the folder.
func WriteMap(fsys file.FS, name string, x *Index) error {
	h, err := fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := PutMap(h, x); err != nil {
		return errors.Join(err, h.Close())
	}
	return errors.Join(h.Datasync(), h.Close())
}

// EncodeMap returns the bytes that PutMap writes.
func EncodeMap(x *Index) []byte {
	n := MapHeader + len(x.Uniform)*MapEntry
	for _, q := range x.Packed {
		if q != nil {
			n += mapPage
		}
	}
	out := make(inMemory, n)
	_ = PutMap(out, x) // out has room for all
	return out
}

// inMemory is a file of a known length in memory.
type inMemory []byte

// WriteAt implements io.WriterAt.
func (m inMemory) WriteAt(b []byte, off int64) (int, error) { return copy(m[off:], b), nil }

// IndexOf reads a whole map into memory.
func IndexOf(m BlockMap) (*Index, error) {
	x := NewIndex(m.Length()>>BlockBits, uint16(block.Hole))
	kinds := new([PageBlocks]block.Kind)
	for p := range x.Uniform {
		if k, ok := m.Uniform(p); ok {
			x.Uniform[p] = uint16(k)
			continue
		}
		if err := m.Load(p, kinds); err != nil {
			return nil, err
		}
		n := x.PageLen(p)
		for i := 0; i < n; {
			j := i + 1
			for j < n && kinds[j] == kinds[i] {
				j++
			}
			x.setInPage(p, i, j, uint16(kinds[i]))
			i = j
		}
	}
	return &x, nil
}

// ResumeMap continues the map of a layer of size bytes. The first done pages and their table entries are in h; sum is
// the checksum of the entries.
func ResumeMap(h file.Handle, size int64, done int, sum uint32) (*MapWriter, error) {
	pages := int((size + PageSize - 1) / PageSize)
	w := NewMapWriter(h, pages)
	if done == 0 {
		return w, nil
	}
	if done > pages {
		return nil, api.Errorf(api.Corrupt, "%d pages of a map that has %d", done, pages)
	}
	table := w.tableEntries(0, done)
	if n, err := h.ReadAt(table, MapHeader); n < len(table) {
		return nil, fmt.Errorf("table of the merge's map: %w", err)
	}
	if w.TableSum(done) != sum {
		return nil, api.Errorf(api.Corrupt, "table of the merge's map is damaged")
	}
	m := Map{pages: done, table: table}
	for p := range done {
		if t, _, off := m.entryAt(p); t == entryPacked {
			w.at = max(w.at, off+mapPage)
		}
	}
	return w, nil
}

// TableSum is the checksum of the table entries of the first pages.
func (m *MapWriter) TableSum(pages int) uint32 {
	return crc32.Checksum(m.tableEntries(0, pages), castagnoli)
}

// SaveTable writes the table entries of the pages [from, end) before the map is finished.
func (m *MapWriter) SaveTable(from, end int) error {
	_, err := m.w.WriteAt(m.tableEntries(from, end), MapHeader+int64(from)*MapEntry)
	return err
}

// Written returns the map of the first pages; h holds the pages.
func (m *MapWriter) Written(size int64, pages int, h io.ReaderAt) *Map {
	return &Map{size: size, pages: pages, table: m.tableEntries(0, pages), h: h}
}

// PackedRange is the part of the file that holds the packed pages among the first pages.
func (m *Map) PackedRange(pages int) (from, end int64) {
	for p := range min(pages, m.pages) {
		if t, _, off := m.entryAt(p); t == entryPacked {
			if end == 0 {
				from = off
			}
			end = off + mapPage
		}
	}
	return from, end
}
