package index

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"sort"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
)

// A table is a file of pages. Page 0 has the counts; then follow the sections: entries in the order of their ids, names
// of packs, names of the index files that the table covers, and the first eight bytes of each page of entries. A page
// has a header (CRC32C of the rest of the page, number of items, number of the page) and items of equal size.
const (
	pageSize   = 4096
	headerSize = 16
	tableMagic = "drover index 2\n\x00"

	recordSize = 32 + 4*4
	prefixSize = 8
	idSize     = len(blob.ID{})
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var pagePool = sync.Pool{New: func() any { return new([pageSize]byte) }}

// Location says where a blob lies.
type Location struct {
	Pack blob.ID
	pack.Entry
}

// record is an entry of a table.
type record struct {
	id                          blob.ID
	pack, offset, length, plain uint32 // pack has a number and three bits
}

// Bits of record.pack.
const (
	treeBit    = 1 << 31
	hiddenBit  = 1 << 30 // the pack is hidden
	damagedBit = 1 << 29 // a verification found the pack damaged
)

// copiesLimit is how many entries of one blob a table keeps: the best ones.
const copiesLimit = 8

func (r *record) kind() blob.Kind { return blob.Kind(r.pack / treeBit) }
func (r *record) number() uint32  { return r.pack &^ (treeBit | hiddenBit | damagedBit) }
func (r *record) hidden() bool    { return r.pack&hiddenBit != 0 }
func (r *record) damaged() bool   { return r.pack&damagedBit != 0 }

// order is compare for entries of one blob, too: that of a hidden pack comes after the others, those of damaged packs
// come last.
func (r *record) order(o *record) int {
	if c := r.compare(o); c != 0 {
		return c
	}
	return int(r.pack>>29&1<<1|r.pack>>30&1) - int(o.pack>>29&1<<1|o.pack>>30&1)
}

func (r *record) compare(o *record) int {
	if c := bytes.Compare(r.id[:], o.id[:]); c != 0 {
		return c
	}
	return int(r.kind()) - int(o.kind())
}

func (r *record) encode(b []byte) {
	copy(b, r.id[:])
	for i, v := range [...]uint32{r.pack, r.offset, r.length, r.plain} {
		binary.LittleEndian.PutUint32(b[idSize+4*i:], v)
	}
}

func (r *record) decode(b []byte) {
	r.id = blob.ID(b[:idSize])
	r.pack, r.offset = binary.LittleEndian.Uint32(b[idSize:]), binary.LittleEndian.Uint32(b[idSize+4:])
	r.length, r.plain = binary.LittleEndian.Uint32(b[idSize+8:]), binary.LittleEndian.Uint32(b[idSize+12:])
}

// section is a part of a table: items of equal size from a page on.
type section struct{ first, count, size int64 }

func (s section) perPage() int64 { return (pageSize - headerSize) / s.size }
func (s section) pages() int64   { return (s.count + s.perPage() - 1) / s.perPage() }

// layout computes the sections from their counts.
func layout(records, packs, files int64) (l struct{ records, packs, files, prefixes section }) {
	l.records = section{1, records, recordSize}
	l.packs = section{l.records.first + l.records.pages(), packs, int64(idSize)}
	l.files = section{l.packs.first + l.packs.pages(), files, int64(idSize)}
	l.prefixes = section{l.files.first + l.files.pages(), l.records.pages(), prefixSize}
	return l
}

// Table finds blobs.
type Table struct {
	file           *os.File
	records, packs section
	prefixes       []uint64 // of the first entry of each page
	files          []blob.ID
}

// OpenTable opens the table of a repository. A missing file is an error of kind NotFound; a file that is damaged, or of
// another repository, one of kind Corrupt.
func OpenTable(path string, repository blob.ID) (*Table, error) {
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil, api.Errorf(api.NotFound, "index table %s does not exist", path)
	} else if err != nil {
		return nil, err
	}
	t, err := readTable(f, repository)
	if err != nil {
		_ = f.Close()
		return nil, api.Errorf(api.KindOf(err), "index table %s: %w", path, err)
	}
	return t, nil
}

func readTable(f *os.File, repository blob.ID) (*Table, error) {
	t := &Table{file: f}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var page [pageSize]byte
	if _, err := t.readPage(&page, 0); err != nil {
		return nil, err
	}
	head := page[headerSize:]
	counts := head[len(tableMagic)+idSize:]
	if string(head[:len(tableMagic)]) != tableMagic || blob.ID(head[len(tableMagic):][:idSize]) != repository {
		return nil, api.Errorf(api.Corrupt, "the file is no table of repository %s", repository)
	}
	most := uint64(info.Size())
	records, packs, files := binary.LittleEndian.Uint64(counts), binary.LittleEndian.Uint64(counts[8:]),
		binary.LittleEndian.Uint64(counts[16:])
	if max(records, packs, files) > most {
		return nil, api.Errorf(api.Corrupt, "the file has %d bytes for %d blobs", most, records)
	}
	l := layout(int64(records), int64(packs), int64(files))
	if end := l.prefixes.first + l.prefixes.pages(); info.Size() != end*pageSize {
		return nil, api.Errorf(api.Corrupt, "the file has %d bytes instead of %d", info.Size(), end*pageSize)
	}
	t.records, t.packs = l.records, l.packs
	t.prefixes = make([]uint64, 0, l.prefixes.count)
	if err := t.each(l.prefixes, func(item []byte) error {
		t.prefixes = append(t.prefixes, binary.BigEndian.Uint64(item))
		return nil
	}); err != nil {
		return nil, err
	}
	return t, t.each(l.files, func(item []byte) error {
		t.files = append(t.files, blob.ID(item))
		return nil
	})
}

// Files are the index files whose blobs the table has.
func (t *Table) Files() []blob.ID { return t.files }

// Len is the number of blobs.
func (t *Table) Len() int64 { return t.records.count }

// Close closes the file.
func (t *Table) Close() error { return t.file.Close() }

// Has reports whether the table has a blob, and not only in damaged packs. An error of kind Corrupt says that the table
// is damaged.
func (t *Table) Has(id blob.ID, kind blob.Kind) (bool, error) {
	r, _, ok, err := t.search(id, kind)
	return ok && !r.damaged(), err
}

// Number returns the place of a blob's best entry among all entries, in the order of Each. Errors are those of Has.
func (t *Table) Number(id blob.ID, kind blob.Kind) (number int64, ok bool, err error) {
	_, number, ok, err = t.search(id, kind)
	return number, ok, err
}

// Row is an entry of a table.
type Row struct {
	pack.Entry
	Number int64  // of the entry; the first entry of a blob is the best one
	Pack   uint32 // index of the pack in Packs
	Hidden bool   // the pack is hidden
	// Damaged says that a verification marked the pack. If this is the first entry of a blob, no other pack has the blob.
	Damaged bool
}

// Each calls row with all entries, in the order of the ids. Errors are those of Has and row.
func (t *Table) Each(row func(Row) error) error {
	next := t.stream()
	for number := int64(0); ; number++ {
		var r record
		if ok, err := next(&r); err != nil || !ok {
			return err
		}
		e := pack.Entry{ID: r.id, Kind: r.kind(), Offset: r.offset, Length: r.length, Plain: r.plain}
		if err := row(Row{e, number, r.number(), r.hidden(), r.damaged()}); err != nil {
			return err
		}
	}
}

// Packs are the names of all packs. A pack that two index files name is there twice.
func (t *Table) Packs() (names []blob.ID, err error) {
	return names, t.each(t.packs, func(item []byte) error {
		names = append(names, blob.ID(item))
		return nil
	})
}

// Find returns the best location of a blob. Errors are those of Has.
func (t *Table) Find(id blob.ID, kind blob.Kind) (Location, bool, error) {
	r, _, ok, err := t.search(id, kind)
	if err != nil || !ok {
		return Location{}, false, err
	}
	l, err := t.locate(&r)
	return l, err == nil, err
}

// FindAll returns all locations of a blob that the table has, the best first. Errors are those of Has.
func (t *Table) FindAll(id blob.ID, kind blob.Kind) (all []Location, err error) {
	_, number, ok, err := t.search(id, kind)
	if err != nil || !ok {
		return nil, err
	}
	page := pagePool.Get().(*[pageSize]byte)
	defer pagePool.Put(page)
	for ; number < t.records.count; number++ {
		at := int(number%t.records.perPage()) * recordSize
		items, err := t.readPage(page, t.records.first+number/t.records.perPage())
		if err != nil {
			return nil, err
		}
		if at+recordSize > len(items) {
			return nil, api.Errorf(api.Corrupt, "index table: entry %d does not exist", number)
		}
		var r record
		if r.decode(items[at:]); r.id != id || r.kind() != kind {
			break
		}
		l, err := t.locate(&r)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

func (t *Table) locate(r *record) (l Location, err error) {
	l.Entry = pack.Entry{ID: r.id, Kind: r.kind(), Offset: r.offset, Length: r.length, Plain: r.plain}
	if err := l.Check(); err != nil {
		return Location{}, err
	}
	l.Pack, err = t.packName(r.number())
	return l, err
}

func (t *Table) search(id blob.ID, kind blob.Kind) (r record, number int64, ok bool, err error) {
	prefix := binary.BigEndian.Uint64(id[:])
	// The page before the first one that begins at or behind the prefix may have the blob, and every page that begins
	// with the prefix: almost always a single page.
	first := sort.Search(len(t.prefixes), func(i int) bool { return t.prefixes[i] >= prefix })
	page := pagePool.Get().(*[pageSize]byte)
	defer pagePool.Put(page)
	for i := max(first-1, 0); i < len(t.prefixes) && t.prefixes[i] <= prefix; i++ {
		items, err := t.readPage(page, t.records.first+int64(i))
		if err != nil {
			return r, 0, false, err
		}
		if r, at, ok := searchPage(items, id, kind); ok {
			return r, int64(i)*t.records.perPage() + int64(at), true, nil
		}
	}
	return r, 0, false, nil
}

// searchPage finds a blob among the items of a page.
func searchPage(items []byte, id blob.ID, kind blob.Kind) (r record, at int, ok bool) {
	n := len(items) / recordSize
	at = sort.Search(n, func(i int) bool { return bytes.Compare(items[i*recordSize:][:idSize], id[:]) >= 0 })
	for ; at < n; at++ {
		if r.decode(items[at*recordSize:]); r.id != id {
			return r, 0, false
		}
		if r.kind() == kind {
			return r, at, true
		}
	}
	return r, 0, false
}

func (t *Table) packName(number uint32) (id blob.ID, err error) {
	page := pagePool.Get().(*[pageSize]byte)
	defer pagePool.Put(page)
	items, err := t.readPage(page, t.packs.first+int64(number)/t.packs.perPage())
	if err != nil {
		return id, err
	}
	at := int(int64(number)%t.packs.perPage()) * idSize
	if int64(number) >= t.packs.count || at+idSize > len(items) {
		return id, api.Errorf(api.Corrupt, "index table: pack %d of %d does not exist", number, t.packs.count)
	}
	return blob.ID(items[at : at+idSize]), nil
}

// readPage reads a page and checks it. The result has the items, and room behind them.
func (t *Table) readPage(page *[pageSize]byte, number int64) (items []byte, err error) {
	if _, err := t.file.ReadAt(page[:], number*pageSize); err != nil {
		return nil, api.Errorf(api.Corrupt, "index table: page %d cannot be read: %w", number, err)
	}
	if crc32.Checksum(page[4:], castagnoli) != binary.LittleEndian.Uint32(page[:]) ||
		binary.LittleEndian.Uint64(page[8:]) != uint64(number) {
		return nil, api.Errorf(api.Corrupt, "index table: page %d is damaged", number)
	}
	n := binary.LittleEndian.Uint32(page[4:])
	return page[headerSize : headerSize+min(n, pageSize-headerSize)], nil
}

// each calls item with all items of a section.
func (t *Table) each(s section, item func([]byte) error) error {
	var page [pageSize]byte
	left := s.count
	for i := range s.pages() {
		items, err := t.readPage(&page, s.first+i)
		if err != nil {
			return err
		}
		n := min(left, s.perPage())
		if int64(len(items)) != n*s.size {
			return api.Errorf(api.Corrupt, "index table: page %d has %d bytes of items instead of %d", s.first+i, len(items),
				n*s.size)
		}
		for j := range n {
			if err := item(items[j*s.size : (j+1)*s.size]); err != nil {
				return err
			}
		}
		left -= n
	}
	return nil
}
