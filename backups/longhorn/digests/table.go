// Package digests remembers the SHA-256 of chunks by another name of the same bytes: the checksum that a foreign store
// has of them.
//
// A Table is a local file of pages, each with entries and a checksum over all of the page. The name of a chunk decides
// its page. A full page makes the file twice as large; at the largest size the entry that was written longest ago goes.
//
// Invariants: the table is a cache. An entry is whole or unknown: a page that was cut, changed, or moved has no
// entries, and is written again by the next Put. Nothing is synced. An administrator may delete the file at any time.
// No method but Open returns an error: a table that does not work costs time alone.
//
// The package has no goroutines. Table.mu is a leaf, and is held over reads and writes of the local file.
package digests

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Size is the size of a name and of a digest, in bytes.
const Size = sha256.Size

// A page has a header (the first half of the SHA-256 of the rest of the page, tag of the table, number of the page and
// of its entries) and the entries. Page 0 has the magic in place of entries. The tag is random: a page that another
// table left has no entries.
const (
	pageSize   = 4096
	sumSize    = sha256.Size / 2
	headerSize = sumSize + 8 + 4 + 4
	entrySize  = Size + Size + 8 + 4 + 4
	perPage    = (pageSize - headerSize) / entrySize
	magic      = "drover digests 1"

	// leastLoad is the part of all places, as a divisor, that entries take before the file grows: names that somebody
	// chose to fill one page do not make the file large.
	leastLoad = 4
)

var pagePool = sync.Pool{New: func() any { return new([pageSize]byte) }}

// Key names a chunk: a part of the bytes with a name. All parts have the same size.
type Key struct {
	Name [Size]byte
	Part uint32
}

// place is the place of a key among 2^64.
func (k *Key) place() uint64 {
	return binary.BigEndian.Uint64(k.Name[:]) + uint64(k.Part)*0x9e3779b97f4a7c15
}

// Entry is what a table knows of a chunk.
type Entry struct {
	Digest [Size]byte
	// Mark is what the last Put with a mark left; 0: none did.
	Mark uint64
}

// entry is an Entry in a page.
type entry struct {
	key Key
	Entry
	written uint32 // hours since 1970
}

func (e *entry) encode(b []byte) {
	copy(b, e.key.Name[:])
	copy(b[Size:], e.Digest[:])
	binary.LittleEndian.PutUint64(b[2*Size:], e.Mark)
	binary.LittleEndian.PutUint32(b[2*Size+8:], e.key.Part)
	binary.LittleEndian.PutUint32(b[2*Size+12:], e.written)
}

func (e *entry) decode(b []byte) {
	e.key = Key{[Size]byte(b), binary.LittleEndian.Uint32(b[2*Size+8:])}
	e.Entry = Entry{[Size]byte(b[Size:]), binary.LittleEndian.Uint64(b[2*Size:])}
	e.written = binary.LittleEndian.Uint32(b[2*Size+12:])
}

// Table is a table of digests. Methods are safe for concurrent use. A nil Table knows nothing.
type Table struct {
	path string
	most uint // bits of the largest number of pages
	now  func() time.Time

	mu    sync.RWMutex
	file  *os.File
	tag   uint64
	bits  uint  // 2^bits pages with entries
	count int64 // of entries; -1: not counted yet
}

// mostBits makes the largest file 1 GiB: 13 million chunks, which is 25 TiB of chunks of 2 MiB.
const mostBits = 18

// Open opens the table at path, or makes it. A file that is no table is replaced.
func Open(path string) (*Table, error) { return open(path, mostBits) }

func open(path string, most uint) (*Table, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	t := &Table{path: path, most: most, now: time.Now, count: -1}
	file, err := os.OpenFile(path, os.O_RDWR, 0o600)
	if err == nil {
		if t.file = file; t.readHead() {
			return t, nil
		}
		err = file.Close()
	}
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	return t, t.create(0, func(uint32) []entry { return nil })
}

// readHead reads page 0, and reports whether the file is a table.
func (t *Table) readHead() bool {
	info, err := t.file.Stat()
	if err != nil {
		return false
	}
	pages := info.Size()/pageSize - 1
	for t.bits = 0; int64(1)<<t.bits < pages && t.bits < t.most; t.bits++ {
	}
	var page [pageSize]byte
	if _, err := t.file.ReadAt(page[:], 0); err != nil {
		return false
	}
	t.tag = binary.LittleEndian.Uint64(page[sumSize:])
	_, ok := checkPage(&page, t.tag, 0)
	return ok && int64(1)<<t.bits == pages && info.Size()%pageSize == 0 &&
		string(page[headerSize:headerSize+len(magic)]) == magic
}

// checkPage returns the number of a page's entries; false: the page is damaged, or of another place.
func checkPage(page *[pageSize]byte, tag uint64, number uint32) (count int, ok bool) {
	sum := sha256.Sum256(page[sumSize:])
	n := binary.LittleEndian.Uint32(page[sumSize+12:])
	return int(min(n, perPage)), bytes.Equal(sum[:sumSize], page[:sumSize]) && n <= perPage &&
		binary.LittleEndian.Uint64(page[sumSize:]) == tag && binary.LittleEndian.Uint32(page[sumSize+8:]) == number
}

// sealPage writes the header of a page.
func sealPage(page *[pageSize]byte, tag uint64, number uint32, count int) {
	binary.LittleEndian.PutUint64(page[sumSize:], tag)
	binary.LittleEndian.PutUint32(page[sumSize+8:], number)
	binary.LittleEndian.PutUint32(page[sumSize+12:], uint32(count)) //nolint:gosec // at most perPage
	sum := sha256.Sum256(page[sumSize:])
	copy(page[:sumSize], sum[:])
}

// create replaces the file by one with 2^bits pages. The caller has mu, or the only reference.
func (t *Table) create(bits uint, entries func(number uint32) []entry) error {
	next := t.path + ".new"
	file, err := os.OpenFile(next, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	tag := binary.LittleEndian.Uint64(random[:])
	var page [pageSize]byte
	copy(page[headerSize:], magic)
	sealPage(&page, tag, 0, 0)
	_, err = file.WriteAt(page[:], 0)
	for number := uint32(1); err == nil && number <= 1<<bits; number++ {
		err = writePage(file, tag, number, entries(number))
	}
	if err == nil {
		err = os.Rename(next, t.path)
	}
	if err != nil {
		_ = os.Remove(next)
		return errors.Join(err, file.Close())
	}
	if t.file != nil {
		_ = t.file.Close() // nothing of it is needed any more
	}
	t.file, t.tag, t.bits = file, tag, bits
	return nil
}

func writePage(file *os.File, tag uint64, number uint32, entries []entry) error {
	var page [pageSize]byte
	for i := range entries {
		entries[i].encode(page[headerSize+i*entrySize:])
	}
	sealPage(&page, tag, number, len(entries))
	_, err := file.WriteAt(page[:], int64(number)*pageSize)
	return err
}

// loadPage reads a page, and returns the number of its entries; 0: the page is empty or damaged.
func (t *Table) loadPage(page *[pageSize]byte, number uint32) int {
	if _, err := t.file.ReadAt(page[:], int64(number)*pageSize); err != nil {
		return 0
	}
	count, ok := checkPage(page, t.tag, number)
	if !ok {
		return 0
	}
	return count
}

// readPage returns the entries of a page.
func (t *Table) readPage(number uint32) []entry {
	page := pagePool.Get().(*[pageSize]byte)
	defer pagePool.Put(page)
	entries := make([]entry, t.loadPage(page, number), perPage)
	for i := range entries {
		entries[i].decode(page[headerSize+i*entrySize:])
	}
	return entries
}

// pageOf is the number of a key's page.
func (t *Table) pageOf(k Key) uint32 { return uint32(k.place()>>(64-t.bits)) + 1 } //nolint:gosec // at most mostBits

// Close closes the file.
func (t *Table) Close() error {
	if t == nil {
		return nil
	}
	return t.file.Close()
}

// Find returns what the table knows of a chunk.
func (t *Table) Find(k Key) (e Entry, known bool) {
	if t == nil {
		return e, false
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	page := pagePool.Get().(*[pageSize]byte)
	defer pagePool.Put(page)
	items := page[headerSize:]
	for range t.loadPage(page, t.pageOf(k)) { // without a copy of all entries: a backup of a TiB has half a million
		if bytes.Equal(items[:Size], k.Name[:]) {
			var found entry
			if found.decode(items); found.key == k {
				return found.Entry, true
			}
		}
		items = items[entrySize:]
	}
	return e, false
}

func find(entries []entry, k Key) int {
	return slices.IndexFunc(entries, func(e entry) bool { return e.key == k })
}

// Put notes the digest of a chunk whose bytes the caller has just compared with the name. A mark of 0 leaves the mark
// of before. Put reports whether the table had another digest, which cannot be of the same bytes.
func (t *Table) Put(k Key, digest [Size]byte, mark uint64) (contradicts bool) {
	if t == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	number := t.pageOf(k)
	entries := t.readPage(number)
	i := find(entries, k)
	if i < 0 && len(entries) == perPage && t.grow() {
		number = t.pageOf(k)
		entries = t.readPage(number)
	}
	switch {
	case i >= 0:
		contradicts = entries[i].Digest != digest
		if !contradicts && (mark == 0 || mark == entries[i].Mark) {
			return false
		}
	case len(entries) < perPage:
		i, entries = len(entries), append(entries, entry{})
		if t.count >= 0 {
			t.count++
		}
	default:
		oldest := slices.MinFunc(entries, func(a, b entry) int { return cmp.Compare(a.written, b.written) })
		i = find(entries, oldest.key)
		entries[i] = entry{}
	}
	e := &entries[i]
	if e.key, e.Digest = k, digest; mark != 0 {
		e.Mark = mark
	}
	e.written = uint32(t.now().Unix() / 3600) //nolint:gosec // until the year 491936
	_ = writePage(t.file, t.tag, number, entries)
	return contradicts
}

// grow makes the file twice as large, if enough of it is in use. The caller has mu.
func (t *Table) grow() bool {
	if t.bits >= t.most {
		return false
	}
	if t.count < 0 {
		t.count = 0
		for number := uint32(1); number <= 1<<t.bits; number++ {
			t.count += int64(len(t.readPage(number)))
		}
	}
	if t.count < perPage<<t.bits/leastLoad {
		return false
	}
	bits := t.bits + 1
	t.count = 0
	return t.create(bits, func(number uint32) []entry {
		half := slices.DeleteFunc(t.readPage((number-1)/2+1), func(e entry) bool {
			return uint32(e.key.place()>>(64-bits))+1 != number //nolint:gosec // at most mostBits
		})
		t.count += int64(len(half))
		return half
	}) == nil
}
