package stack

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// head.zero is the record of explicit zeros of a head: a header of 32 bytes, then records of 32 bytes, appended. Where
// head.data holds data, the data counts; so a record is never taken back. A record whose checksum or number is wrong
// ends the file: it was being written when the power went, and nothing that depends on it has happened.
const (
	zeroMagic  = "DROVERZ1"
	zeroRecord = 32
	recordZero = 1
	// compactAt is how many records a log may have before it is rewritten.
	compactAt = 1 << 15
	reserved  = 64 << 10 // bytes
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// zeroLog belongs to one goroutine at a time.
type zeroLog struct {
	fs    file.FS
	name  string
	h     file.Handle
	n     int64 // records in the file
	zeros index // 1: some record says zero
	dirty bool  // records written and not synced
	most  int64 // records before it is rewritten
	twice bool  // the file has a second name, in a layer: what is recorded belongs there too
}

func zeroHeader() []byte {
	b := make([]byte, zeroRecord)
	copy(b, zeroMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
	return b
}

func putZeroRecord(b []byte, seq, off, n int64) {
	binary.LittleEndian.PutUint32(b[0:], recordZero)
	binary.LittleEndian.PutUint64(b[4:], uint64(seq))
	binary.LittleEndian.PutUint64(b[12:], uint64(off))
	binary.LittleEndian.PutUint64(b[20:], uint64(n))
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
}

// parseZeroRecord reports whether b is record number seq.
func parseZeroRecord(b []byte, seq int64) (off, n int64, ok bool) {
	if crc32.Checksum(b[:28], castagnoli) != binary.LittleEndian.Uint32(b[28:]) ||
		binary.LittleEndian.Uint32(b) != recordZero || int64(binary.LittleEndian.Uint64(b[4:])) != seq {
		return 0, 0, false
	}
	off, n = int64(binary.LittleEndian.Uint64(b[12:])), int64(binary.LittleEndian.Uint64(b[20:]))
	if off < 0 || n <= 0 || off+n < off || (off|n)&(blockSize-1) != 0 {
		return 0, 0, false
	}
	return off, n, true
}

// readZeroLog calls each for every record and returns their number. Header damage is an error, a torn tail is not.
func readZeroLog(r io.Reader, each func(off, n int64)) (int64, error) {
	var b [zeroRecord]byte
	if _, err := io.ReadFull(r, b[:]); err != nil || string(b[:]) != string(zeroHeader()) {
		return 0, api.Errorf(api.Corrupt, "header of the record of zeros is damaged")
	}
	for seq := int64(0); ; seq++ {
		_, err := io.ReadFull(r, b[:])
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return seq, nil
		}
		if err != nil {
			return 0, err
		}
		off, n, ok := parseZeroRecord(b[:], seq)
		if !ok {
			return seq, nil
		}
		each(off, n)
	}
}

// openZeroLog reads the log and cuts a torn tail. Blocks is the size of the volume.
func openZeroLog(fsys file.FS, name string, blocks int64) (*zeroLog, error) {
	h, err := fsys.Open(name, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	l := &zeroLog{fs: fsys, name: name, h: h, zeros: newIndex(blocks, 0)}
	if err := l.load(); err != nil {
		h.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return l, nil
}

func (l *zeroLog) load() error {
	st, err := l.h.Stat()
	if err != nil {
		return err
	}
	r := io.NewSectionReader(l.h, 0, st.Size())
	l.n, err = readZeroLog(bufio.NewReaderSize(r, 1<<16), l.mark)
	if err != nil {
		return err
	}
	end := zeroRecord * (l.n + 1)
	if st.Size() != end {
		if err := l.h.Truncate(end); err != nil {
			return err
		}
		// Durable before anything is appended: a stale record must not reappear behind a new one.
		if err := l.h.Datasync(); err != nil {
			return err
		}
	}
	l.most = compactAt
	return l.shrink()
}

// reserve keeps room on the disk for some records, so that a discard works on a full disk too. Best effort.
func (l *zeroLog) reserve() {
	_ = unix.Fallocate(int(l.h.Fd()), unix.FALLOC_FL_KEEP_SIZE, zeroRecord*(l.n+1), reserved)
}

func (l *zeroLog) mark(off, n int64) {
	b, end := off>>blockBits, min((off+n)>>blockBits, l.zeros.blocks)
	if b < end {
		l.zeros.set(b, end, 1)
	}
}

// ranges calls each for every maximal range of recorded zeros.
func (l *zeroLog) ranges(each func(off, n int64)) {
	for b := int64(0); b < l.zeros.blocks; {
		v, n := l.zeros.run(b, l.zeros.blocks)
		if v == 1 {
			each(b<<blockBits, n<<blockBits)
		}
		b += n
	}
}

// shrink rewrites a log that has become long. All of it is durable before. After an error it is not known which of the
// two files the disk has.
func (l *zeroLog) shrink() error {
	if l.twice || l.n < l.most {
		return nil
	}
	replaced, err := l.compact()
	l.most = max(compactAt, 2*l.n)
	if err != nil && !replaced {
		slog.Warn("a record of zeros stays as long as it is", "name", l.name, "records", l.n, "error", err)
		return nil
	}
	return err
}

// compact rewrites the log with one record per range, where that makes it smaller. Replaced is whether the disk may
// have the new one.
func (l *zeroLog) compact() (replaced bool, err error) {
	ranges := int64(0)
	l.ranges(func(_, _ int64) { ranges++ })
	if ranges > l.n/2 {
		return false, nil
	}
	data := append(make([]byte, 0, zeroRecord*(ranges+1)), zeroHeader()...)
	seq := int64(0)
	l.ranges(func(off, n int64) {
		data = append(data, make([]byte, zeroRecord)...)
		putZeroRecord(data[len(data)-zeroRecord:], seq, off, n)
		seq++
	})
	if err := replaceFile(l.fs, l.name, data); err != nil {
		return errors.Is(err, errUnsure), err
	}
	h, err := l.fs.Open(l.name, os.O_RDWR, 0)
	if err != nil {
		return true, err
	}
	l.h.Close()
	l.h, l.n = h, seq
	l.reserve()
	return true, nil
}

// add appends records. They are durable after sync.
func (l *zeroLog) add(ranges []span) error {
	if len(ranges) == 0 {
		return nil
	}
	b := make([]byte, zeroRecord*len(ranges))
	for i, s := range ranges {
		putZeroRecord(b[i*zeroRecord:], l.n+int64(i), s.off, s.n)
	}
	l.dirty = true
	end := zeroRecord * (l.n + 1)
	if _, err := l.h.WriteAt(b, end); err != nil {
		// None of them may be found at the next open, as none counts now.
		return errors.Join(err, l.h.Truncate(end))
	}
	l.n += int64(len(ranges))
	for _, s := range ranges {
		l.mark(s.off, s.n)
	}
	return nil
}

func (l *zeroLog) sync() error {
	if !l.dirty {
		return nil
	}
	if err := l.h.Datasync(); err != nil {
		return err
	}
	l.dirty = false
	return nil
}

func (l *zeroLog) close() error { return l.h.Close() }

// span is a range in bytes.
type span struct{ off, n int64 }
