package index

import (
	"bufio"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// Memory of a TableBuilder: one run of entries, and the buffers of the merge.
const (
	runRecords  = 8 << 20 / recordSize
	mergeMemory = 8 << 20
	marksLimit  = 1 << 18 // damaged packs: 8 TiB
)

// TableBuilder collects entries in any order, sorts them in runs, and merges the runs into a table. The methods are
// safe for concurrent use.
type TableBuilder struct {
	folder     string
	repository blob.ID
	base       *Table
	runSize    int // entries of a run
	withHidden bool

	mu    sync.Mutex
	run   []record
	runs  []int64 // where each run ends in spilled, in bytes
	spill *spillFile
	names *spillFile // of packs
	packs int64
	files []blob.ID
	marks map[blob.ID]struct{} // damaged packs
}

// NewTableBuilder builds a table of repository in folder. The table has all that base has, which may be nil. The caller
// closes the builder.
func NewTableBuilder(folder string, repository blob.ID, base *Table) (*TableBuilder, error) {
	b := &TableBuilder{folder: folder, repository: repository, base: base, runSize: runRecords,
		marks: map[blob.ID]struct{}{}}
	err := os.MkdirAll(folder, 0o700) // an administrator may delete a cache at any time
	if err != nil {
		return nil, err
	}
	if b.spill, err = newSpillFile(folder); err != nil {
		return nil, err
	}
	if b.names, err = newSpillFile(folder); err != nil {
		return nil, errors.Join(err, b.spill.close())
	}
	if base != nil {
		b.packs, b.files = base.packs.count, slices.Clone(base.files)
	}
	return b, nil
}

// Close removes the temporary files.
func (b *TableBuilder) Close() error { return errors.Join(b.spill.close(), b.names.close()) }

// WithHidden makes a table that has the blobs of hidden packs, too, as far as no other pack has them. Such a table is
// for a sweep alone: it has no base and no name.
func (b *TableBuilder) WithHidden() { b.withHidden = true }

// Add adds the blobs of a pack, or a mark. A hidden pack adds none, except WithHidden.
func (b *TableBuilder) Add(p Pack) error {
	if p.Damaged {
		return b.addMark(p.ID)
	}
	if p.Hidden && !b.withHidden || len(p.Entries) == 0 && !b.withHidden {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.packs >= damagedBit {
		return api.Errorf(api.Full, "index table: %d packs are too many; prune the repository", b.packs)
	}
	if _, err := b.names.Write(p.ID[:]); err != nil {
		return err
	}
	for _, e := range p.Entries {
		if len(b.run) == b.runSize {
			if err := b.spillRun(); err != nil {
				return err
			}
		}
		number := uint32(b.packs) | uint32(e.Kind)*treeBit
		if p.Hidden {
			number |= hiddenBit
		}
		b.run = append(b.run, record{e.ID, number, e.Offset, e.Length, e.Plain})
	}
	b.packs++
	return nil
}

func (b *TableBuilder) addMark(id blob.ID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.marks[id] = struct{}{}; len(b.marks) > marksLimit {
		return api.Errorf(api.Unsupported, "index table: more than %d packs are damaged; restore the store from a copy",
			marksLimit)
	}
	return nil
}

// AddFile notes that the table covers an index file.
func (b *TableBuilder) AddFile(id blob.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.files = append(b.files, id)
}

func (b *TableBuilder) sortRun() {
	slices.SortFunc(b.run, func(x, y record) int { return x.order(&y) })
}

func (b *TableBuilder) spillRun() error {
	b.sortRun()
	var item [recordSize]byte
	for i := range b.run {
		b.run[i].encode(item[:])
		if _, err := b.spill.Write(item[:]); err != nil {
			return err
		}
	}
	end := int64(len(b.run)) * recordSize
	if n := len(b.runs); n > 0 {
		end += b.runs[n-1]
	}
	b.runs, b.run = append(b.runs, end), b.run[:0]
	return nil
}

// Finish makes the table. With a name, the table appears under this name in the folder, unless another process is
// making one just now; without, nobody else sees the table, and its space is free after Close.
func (b *TableBuilder) Finish(name string) (*Table, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f, publish, err := createTable(b.folder, name)
	if err != nil {
		return nil, err
	}
	t, err := b.write(f)
	if err == nil {
		err = publish()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return t, nil
}

// createTable creates the file of a table; publish gives the file its name.
func createTable(folder, name string) (f *os.File, publish func() error, err error) {
	if name != "" {
		path := filepath.Join(folder, name)
		if f, err = lockedFile(path + ".new"); err != nil {
			return nil, nil, err
		}
		if f != nil {
			return f, func() error { return os.Rename(path+".new", path) }, nil
		}
	}
	f, err = temporaryFile(folder)
	return f, func() error { return nil }, err
}

// lockedFile creates an empty file that this process alone writes, or returns nil while another process holds the file.
// A file that a dead process left is taken over.
func lockedFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if lockNamed(f, path) && f.Truncate(0) == nil {
		return f, nil
	}
	return nil, f.Close()
}

// lockNamed locks f if path still names f: another builder may have renamed the file since this process opened the
// file, and the file is a table in use then.
func lockNamed(f *os.File, path string) bool {
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return false
	}
	mine, err := f.Stat()
	named, nameErr := os.Stat(path)
	return err == nil && nameErr == nil && os.SameFile(mine, named)
}

// temporaryFile creates a file without a name.
func temporaryFile(folder string) (*os.File, error) {
	f, err := os.CreateTemp(folder, "index-*.tmp")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// write writes the sections, and page 0 in the end, so that an unfinished file is no table. No fsync: after a loss of
// power the checksums tell.
func (b *TableBuilder) write(f *os.File) (*Table, error) {
	w := &pageWriter{to: bufio.NewWriterSize(&offsetWriter{f, pageSize}, 256<<10), number: 1}
	var prefixes []uint64
	records, err := b.merge(w, &prefixes)
	if err == nil {
		err = b.writePackNames(w)
	}
	if err != nil {
		return nil, err
	}
	slices.SortFunc(b.files, func(x, y blob.ID) int { return slices.Compare(x[:], y[:]) })
	b.files = slices.Compact(b.files)
	for _, id := range b.files {
		w.add(id[:])
	}
	w.flush()
	for _, p := range prefixes {
		w.add(binary.BigEndian.AppendUint64(nil, p))
	}
	w.flush()
	if w.err == nil {
		w.err = w.to.Flush()
	}
	if w.err != nil {
		return nil, w.err
	}
	head := &pageWriter{to: bufio.NewWriter(&offsetWriter{f, 0})}
	item := append([]byte(tableMagic), b.repository[:]...)
	for _, n := range []int64{records, b.packs, int64(len(b.files))} {
		item = binary.LittleEndian.AppendUint64(item, uint64(n))
	}
	head.add(item)
	head.flush()
	if err := errors.Join(head.err, head.to.Flush()); err != nil {
		return nil, err
	}
	l := layout(records, b.packs, int64(len(b.files)))
	return &Table{file: f, records: l.records, packs: l.packs, prefixes: prefixes, files: b.files}, nil
}

func (b *TableBuilder) writePackNames(w *pageWriter) error {
	err := b.eachPack(func(_ uint32, id []byte) error { w.add(id); return w.err })
	if err != nil {
		return err
	}
	w.flush()
	return w.err
}

// eachPack calls each with the number and the name of every pack.
func (b *TableBuilder) eachPack(each func(number uint32, id []byte) error) error {
	number := uint32(0)
	if b.base != nil {
		if err := b.base.each(b.base.packs, func(item []byte) error {
			number++
			return each(number-1, item)
		}); err != nil {
			return err
		}
	}
	from, err := b.names.reader(0, 64<<10)
	if err != nil {
		return err
	}
	for ; ; number++ {
		var id blob.ID
		if _, err := io.ReadFull(from, id[:]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := each(number, id[:]); err != nil {
			return err
		}
	}
}

// damagedNumbers are the numbers of the marked packs.
func (b *TableBuilder) damagedNumbers() (map[uint32]struct{}, error) {
	if len(b.marks) == 0 {
		return nil, nil
	}
	damaged := map[uint32]struct{}{}
	return damaged, b.eachPack(func(number uint32, id []byte) error {
		if _, is := b.marks[blob.ID(id)]; is {
			damaged[number] = struct{}{}
		}
		return nil
	})
}

// pageWriter packs items into pages.
type pageWriter struct {
	to     *bufio.Writer
	number uint64
	page   [pageSize]byte
	used   int
	err    error
}

// add appends an item, and reports whether the item is the first one of a page.
func (w *pageWriter) add(item []byte) (first bool) {
	if headerSize+w.used+len(item) > pageSize {
		w.flush()
	}
	first = w.used == 0
	w.used += copy(w.page[headerSize+w.used:], item)
	return first
}

// flush ends the page; the next item begins a new one.
func (w *pageWriter) flush() {
	if w.used == 0 || w.err != nil {
		return
	}
	clear(w.page[headerSize+w.used:])
	binary.LittleEndian.PutUint32(w.page[4:], uint32(w.used))
	binary.LittleEndian.PutUint64(w.page[8:], w.number)
	binary.LittleEndian.PutUint32(w.page[:], crc32.Checksum(w.page[4:], castagnoli))
	_, w.err = w.to.Write(w.page[:])
	w.number++
	w.used = 0
}

type offsetWriter struct {
	file *os.File
	at   int64
}

func (w *offsetWriter) Write(b []byte) (int, error) {
	n, err := w.file.WriteAt(b, w.at)
	w.at += int64(n)
	return n, err
}

// spillFile is a temporary file that is written once and then read.
type spillFile struct {
	file *os.File
	*bufio.Writer
}

func newSpillFile(folder string) (*spillFile, error) {
	f, err := temporaryFile(folder)
	if err != nil {
		return nil, err
	}
	return &spillFile{f, bufio.NewWriterSize(f, 256<<10)}, nil
}

func (s *spillFile) close() error { return s.file.Close() }

// reader reads from an offset to the end.
func (s *spillFile) reader(off int64, memory int) (*bufio.Reader, error) {
	if err := s.Flush(); err != nil {
		return nil, err
	}
	return bufio.NewReaderSize(io.NewSectionReader(s.file, off, 1<<62-off), memory), nil
}
