package index

import (
	"bufio"
	"crypto/rand"
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
	runRecords  = 4 << 20 / recordSize
	fewRecords  = runRecords / 64 // a run that grows beyond gets the memory of a full one
	mergeMemory = 8 << 20
	marksLimit  = 1 << 18 // damaged packs: 8 TiB
)

// droppedFile is in place of the number of a vanished index file.
const droppedFile = noFile - 1

// droppedPack is in place of the number of a pack that the new table does not have.
const droppedPack = damagedBit

// TableBuilder collects entries in any order, sorts them in runs, and merges the runs into a table. The methods are
// safe for concurrent use.
type TableBuilder struct {
	folder     string
	repository blob.ID
	base       *Table
	basePacks  []uint32 // number in the new table, or droppedPack, of each pack of base
	runSize    int      // entries of a run
	withHidden bool

	mu    sync.Mutex
	run   []record
	runs  []int64 // where each run ends in spilled, in bytes
	spill *spillFile
	names *spillFile // packs, as in the table
	packs int64
	files []blob.ID
	marks map[mark]struct{}
}

// mark says that an index file marks a pack as damaged.
type mark struct {
	pack blob.ID
	file uint32
}

// NewTableBuilder builds a table of repository in folder. The table has all that base has, which may be nil, without
// the packs and marks of the index files in vanished. An error of kind Corrupt says that base is damaged. The caller
// closes the builder.
func NewTableBuilder(folder string, repository blob.ID, base *Table, vanished map[blob.ID]struct{}) (
	*TableBuilder, error) {
	b := &TableBuilder{folder: folder, repository: repository, base: base, runSize: runRecords,
		marks: map[mark]struct{}{}}
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
		if err := b.takeBase(vanished); err != nil {
			return nil, errors.Join(err, b.Close())
		}
	}
	return b, nil
}

// takeBase takes the packs and marks of base over, except those of vanished index files: a sweep removed the files, and
// may have removed the packs, too. The new index files of the sweep have the marks that still count.
func (b *TableBuilder) takeBase(vanished map[blob.ID]struct{}) error {
	numbers := make([]uint32, len(b.base.files)) // of the files in the new table
	for i, id := range b.base.files {
		if _, ok := vanished[id]; ok {
			numbers[i] = droppedFile
			continue
		}
		numbers[i] = uint32(len(b.files))
		b.files = append(b.files, id)
	}
	newFile := func(item []byte) (uint32, error) {
		file := binary.LittleEndian.Uint32(item[idSize:])
		if file == noFile {
			return noFile, nil
		}
		if int64(file) >= int64(len(numbers)) {
			return 0, api.Errorf(api.Corrupt, "index table: index file %d of %d does not exist", file, len(numbers))
		}
		return numbers[file], nil
	}
	b.basePacks = make([]uint32, 0, b.base.packs.count)
	if err := b.base.each(b.base.packs, func(item []byte) error {
		file, err := newFile(item)
		if err != nil {
			return err
		}
		if file == droppedFile {
			b.basePacks = append(b.basePacks, droppedPack)
			return nil
		}
		b.basePacks = append(b.basePacks, uint32(b.packs))
		return b.addPackName(blob.ID(item[:idSize]), file)
	}); err != nil {
		return err
	}
	return b.base.each(b.base.marks, func(item []byte) error {
		file, err := newFile(item)
		if err != nil || file == droppedFile {
			return err
		}
		return b.addMark(mark{blob.ID(item[:idSize]), file})
	})
}

// addPackName gives a pack the next number.
func (b *TableBuilder) addPackName(id blob.ID, file uint32) error {
	b.packs++
	_, err := b.names.Write(packItem(id, file))
	return err
}

// packItem is a pack, or a mark, and its index file as bytes of a table.
func packItem(id blob.ID, file uint32) []byte {
	return binary.LittleEndian.AppendUint32(append(make([]byte, 0, packSize), id[:]...), file)
}

// Close removes the temporary files.
func (b *TableBuilder) Close() error { return errors.Join(b.spill.close(), b.names.close()) }

// WithHidden makes a table that has the blobs of hidden packs, too, for a sweep or a reader alone. Such a table has no
// base and no name.
func (b *TableBuilder) WithHidden() { b.withHidden = true }

// Add adds the blobs of a pack that no index file names, or that stays whatever becomes of the file, or such a mark. A
// hidden pack adds none, except WithHidden.
func (b *TableBuilder) Add(p Pack) error { return b.add(p, noFile) }

// AddFile notes that the table covers an index file, and returns the function that adds the packs and marks of
// the file.
func (b *TableBuilder) AddFile(id blob.ID) (add func(Pack) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	file := uint32(len(b.files))
	b.files = append(b.files, id)
	return func(p Pack) error { return b.add(p, file) }
}

func (b *TableBuilder) add(p Pack, file uint32) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.Damaged {
		return b.addMark(mark{p.ID, file})
	}
	if p.Hidden && !b.withHidden || len(p.Entries) == 0 && !b.withHidden {
		return nil
	}
	if b.packs >= droppedPack {
		return api.Errorf(api.Full, "index table: %d packs are too many; prune the repository", b.packs)
	}
	pack := uint32(b.packs)
	if err := b.addPackName(p.ID, file); err != nil {
		return err
	}
	for _, e := range p.Entries {
		if len(b.run) == b.runSize {
			if err := b.spillRun(); err != nil {
				return err
			}
		}
		if n := len(b.run); n == cap(b.run) && n >= fewRecords {
			b.run = slices.Grow(b.run, b.runSize-n)
		}
		number := pack | uint32(e.Kind)*treeBit
		if p.Hidden {
			number |= hiddenBit
		}
		b.run = append(b.run, record{e.ID, number, e.Offset, e.Length, e.Plain})
	}
	return nil
}

func (b *TableBuilder) addMark(m mark) error {
	if b.marks[m] = struct{}{}; len(b.marks) > marksLimit {
		return api.Errorf(api.Unsupported, "index table: more than %d packs are damaged; restore the store from a copy",
			marksLimit)
	}
	return nil
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
	t := newTable(f)
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails
	t.tag = binary.LittleEndian.Uint32(random[:])
	w := &pageWriter{to: bufio.NewWriterSize(&offsetWriter{f, pageSize}, 256<<10), tag: t.tag, number: 1}
	var prefixes []uint64
	records, err := b.merge(w, &prefixes)
	if err == nil {
		err = b.writePackNames(w)
	}
	if err != nil {
		return nil, err
	}
	for _, id := range b.files {
		w.add(id[:])
	}
	w.flush()
	for m := range b.marks {
		w.add(packItem(m.pack, m.file))
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
	head := &pageWriter{to: bufio.NewWriter(&offsetWriter{f, 0}), tag: t.tag}
	item := append([]byte(tableMagic), b.repository[:]...)
	for _, n := range []int64{records, b.packs, int64(len(b.files)), int64(len(b.marks))} {
		item = binary.LittleEndian.AppendUint64(item, uint64(n))
	}
	head.add(item)
	head.flush()
	if err := errors.Join(head.err, head.to.Flush()); err != nil {
		return nil, err
	}
	l := layout(records, b.packs, int64(len(b.files)), int64(len(b.marks)))
	t.records, t.packs, t.marks, t.prefixes, t.files = l.records, l.packs, l.marks, prefixes, b.files
	return t, nil
}

func (b *TableBuilder) writePackNames(w *pageWriter) error {
	err := b.eachPack(func(item []byte) { w.add(item) })
	w.flush()
	return errors.Join(err, w.err)
}

// eachPack calls each with all packs in the order of their numbers.
func (b *TableBuilder) eachPack(each func(item []byte)) error {
	from, err := b.names.reader(0, 64<<10)
	if err != nil {
		return err
	}
	for {
		var item [packSize]byte
		if _, err := io.ReadFull(from, item[:]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		each(item[:])
	}
}

// damagedPacks tells of each pack whether an index file marks the pack. The result is nil without marks. Any index file
// may mark any pack, also one that an older table has.
func (b *TableBuilder) damagedPacks() (damaged []bool, err error) {
	if len(b.marks) == 0 {
		return nil, nil
	}
	marked := map[blob.ID]bool{}
	for m := range b.marks {
		marked[m.pack] = true
	}
	damaged = make([]bool, 0, b.packs)
	return damaged, b.eachPack(func(item []byte) { damaged = append(damaged, marked[blob.ID(item[:idSize])]) })
}

// pageWriter packs items into pages.
type pageWriter struct {
	to     *bufio.Writer
	tag    uint32
	number uint32
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
	binary.LittleEndian.PutUint32(w.page[8:], w.number)
	binary.LittleEndian.PutUint32(w.page[12:], w.tag)
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
