package index

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"hash/crc32"
	"math"
	"os"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
)

// A table is a file of pages. Page 0 has the counts; then follow the sections: entries in the order of their ids, packs
// with the number of the index file that names the pack, names of the index files that the table covers, damaged packs
// with the number of the index file that marks the pack, and the first eight bytes of each page of entries. A page has
// a header (CRC32C of the rest of the page, bytes of the items, number of the page, tag of the table) and items of
// equal size. The tag is random: a page that another table left is damage.
const (
	pageSize   = 4096
	headerSize = 16
	tableMagic = "drover index 3\n\x00"

	recordSize = 32 + 4*4
	prefixSize = 8
	idSize     = len(blob.ID{})
	packSize   = idSize + 4

	noFile = math.MaxUint32 // number of the index file of a pack or mark that no index file has yet
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

// copiesLimit is how many locations of one blob FindAll returns: the best ones.
const copiesLimit = 8

func (r *record) kind() blob.Kind { return blob.Kind(r.pack / treeBit) }
func (r *record) number() uint32  { return r.pack &^ (treeBit | hiddenBit | damagedBit) }
func (r *record) hidden() bool    { return r.pack&hiddenBit != 0 }
func (r *record) damaged() bool   { return r.pack&damagedBit != 0 }

// order compares ids, then kinds; among the entries of a blob, those of hidden packs come after the others, and those
// of damaged packs last.
func (r *record) order(o *record) int {
	return cmp.Or(bytes.Compare(r.id[:], o.id[:]), int(r.kind())-int(o.kind()),
		int(r.pack&damagedBit)-int(o.pack&damagedBit), int(r.pack&hiddenBit)-int(o.pack&hiddenBit))
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
func layout(records, packs, files, marks int64) (l struct{ records, packs, files, marks, prefixes section }) {
	l.records = section{1, records, recordSize}
	l.packs = section{l.records.first + l.records.pages(), packs, int64(packSize)}
	l.files = section{l.packs.first + l.packs.pages(), files, int64(idSize)}
	l.marks = section{l.files.first + l.files.pages(), marks, int64(packSize)}
	l.prefixes = section{l.marks.first + l.marks.pages(), l.records.pages(), prefixSize}
	return l
}

// Table finds blobs.
type Table struct {
	users atomic.Int32 // Close by the last one closes the file

	file                  *os.File
	tag                   uint32
	records, packs, marks section
	prefixes              []uint64 // of the first entry of each page
	files                 []blob.ID
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

func newTable(f *os.File) *Table {
	t := &Table{file: f}
	t.users.Store(1)
	return t
}

func readTable(f *os.File, repository blob.ID) (*Table, error) {
	t := newTable(f)
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var page [pageSize]byte
	if _, err := f.ReadAt(page[12:headerSize], 12); err != nil {
		return nil, api.Errorf(api.Corrupt, "page 0 cannot be read: %w", err)
	}
	t.tag = binary.LittleEndian.Uint32(page[12:])
	if _, err := t.readPage(&page, 0); err != nil {
		return nil, err
	}
	head := page[headerSize:]
	counts := head[len(tableMagic)+idSize:]
	if string(head[:len(tableMagic)]) != tableMagic || blob.ID(head[len(tableMagic):][:idSize]) != repository {
		return nil, api.Errorf(api.Corrupt, "the file is no table of repository %s", repository)
	}
	most := uint64(info.Size())
	records, packs := binary.LittleEndian.Uint64(counts), binary.LittleEndian.Uint64(counts[8:])
	files, marks := binary.LittleEndian.Uint64(counts[16:]), binary.LittleEndian.Uint64(counts[24:])
	if max(records, packs, files, marks) > most {
		return nil, api.Errorf(api.Corrupt, "the file has %d bytes for %d blobs", most, records)
	}
	l := layout(int64(records), int64(packs), int64(files), int64(marks))
	if end := l.prefixes.first + l.prefixes.pages(); info.Size() != end*pageSize {
		return nil, api.Errorf(api.Corrupt, "the file has %d bytes instead of %d", info.Size(), end*pageSize)
	}
	t.records, t.packs, t.marks = l.records, l.packs, l.marks
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

// HasMarks reports whether an index file marks a pack as damaged.
func (t *Table) HasMarks() bool { return t.marks.count > 0 }

// Marks are the packs that an index file marks as damaged, without marks of Add. Errors are those of Has.
func (t *Table) Marks() (marks map[blob.ID]bool, err error) {
	marks = map[blob.ID]bool{}
	return marks, t.each(t.marks, func(item []byte) error {
		if binary.LittleEndian.Uint32(item[idSize:]) != noFile {
			marks[blob.ID(item[:idSize])] = true
		}
		return nil
	})
}

// Len is the number of entries.
func (t *Table) Len() int64 { return t.records.count }

// Share adds a user, who closes the table, too. Share returns false if the last user has closed the table.
func (t *Table) Share() bool {
	for n := t.users.Load(); n > 0; n = t.users.Load() {
		if t.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// Close ends the use of the table.
func (t *Table) Close() error {
	if t.users.Add(-1) > 0 {
		return nil
	}
	return t.file.Close()
}

// Has reports whether the table has a blob, and not only in damaged packs. An error of kind Corrupt says that the table
// is damaged.
func (t *Table) Has(id blob.ID, kind blob.Kind) (bool, error) {
	r, _, ok, err := t.search(id, kind)
	return ok && !r.damaged(), err
}

// Number returns the place of a blob's best entry, in the order of Each. Errors are those of Has.
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

// Each calls row with all entries, in the order of the ids. A blob that several packs have has as many entries, those
// of hidden packs behind the others, those of damaged packs last. Errors are those of Has and row.
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

// Packs are the names of all packs, as EachPack has them.
func (t *Table) Packs() (names []blob.ID, err error) {
	return names, t.EachPack(func(id blob.ID) { names = append(names, id) })
}

// EachPack calls pack with the names of all packs, in the order of their numbers. A pack that two index files name is
// there twice. Errors are those of Has.
func (t *Table) EachPack(pack func(blob.ID)) error {
	return t.each(t.packs, func(item []byte) error {
		pack(blob.ID(item[:idSize]))
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

// FindAll returns the locations of a blob, the best first, and not more than copiesLimit. Errors are those of Has.
func (t *Table) FindAll(id blob.ID, kind blob.Kind) (all []Location, err error) {
	_, number, ok, err := t.search(id, kind)
	if err != nil || !ok {
		return nil, err
	}
	page := pagePool.Get().(*[pageSize]byte)
	defer pagePool.Put(page)
	for ; number < t.records.count && len(all) < copiesLimit; number++ {
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
		if !slices.Contains(all, l) { // two index files may name the pack
			all = append(all, l)
		}
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
	at := int(int64(number)%t.packs.perPage()) * packSize
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
		binary.LittleEndian.Uint32(page[8:]) != uint32(number) || binary.LittleEndian.Uint32(page[12:]) != t.tag {
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
