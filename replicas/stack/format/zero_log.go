package format

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
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// head.zero is the record of explicit zeros of a head: a header of 32 bytes, then records of 32 bytes, appended. Data
// in head.data overrides a zero record, so the log never takes a record back. A record with a wrong checksum or number
// ends the file: the loss of power interrupted its write, and nothing that depends on the record has happened.
const (
	zeroMagic      = "DROVERZ1"
	ZeroRecordSize = 32
	recordZero     = 1
	// CompactAt is how many records a log may have before Shrink rewrites the log.
	CompactAt = 1 << 15
	reserved  = 64 << 10 // bytes
)

// ZeroLog is the open log of zero records of a head.
type ZeroLog struct {
	fs      file.FS
	name    string
	File    file.Handle
	Records int64 // records in the file
	Zeros   Index // 1: some record says zero
	dirty   bool  // records written and not synced
	most    int64 // records before it is rewritten
	Linked  bool  // the file has a second name, in a layer: new records belong to the layer, too
}

// ZeroHeader is the header of a zero log.
func ZeroHeader() []byte {
	b := make([]byte, ZeroRecordSize)
	copy(b, zeroMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
	return b
}

// PutZeroRecord encodes record number seq into b.
func PutZeroRecord(b []byte, seq, off, n int64) {
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
	if off < 0 || n <= 0 || off+n < off || (off|n)&(BlockSize-1) != 0 {
		return 0, 0, false
	}
	return off, n, true
}

// ReadZeroLog calls each for every record and returns their number. Header damage is an error, a torn tail is not.
func ReadZeroLog(r io.Reader, each func(off, n int64)) (int64, error) {
	var b [ZeroRecordSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil || string(b[:]) != string(ZeroHeader()) {
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

// OpenZeroLog reads the log and cuts a torn tail. Blocks is the size of the volume.
func OpenZeroLog(fsys file.FS, name string, blocks int64) (*ZeroLog, error) {
	h, err := fsys.Open(name, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	l := &ZeroLog{fs: fsys, name: name, File: h, Zeros: NewIndex(blocks, 0)}
	if err := l.loadRecords(); err != nil {
		h.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return l, nil
}

func (l *ZeroLog) loadRecords() error {
	st, err := l.File.Stat()
	if err != nil {
		return err
	}
	r := io.NewSectionReader(l.File, 0, st.Size())
	l.Records, err = ReadZeroLog(bufio.NewReaderSize(r, 1<<16), l.Mark)
	if err != nil {
		return err
	}
	end := ZeroRecordSize * (l.Records + 1)
	if st.Size() != end {
		if err := l.File.Truncate(end); err != nil {
			return err
		}
		// Durable before anything is appended: a stale record must not reappear behind a new one.
		if err := l.File.Datasync(); err != nil {
			return err
		}
	}
	l.most = CompactAt
	return l.Shrink()
}

// Reserve keeps room on the disk for some records, so that a discard works on a full disk too. Best effort.
func (l *ZeroLog) Reserve() {
	_ = unix.Fallocate(int(l.File.Fd()), unix.FALLOC_FL_KEEP_SIZE, ZeroRecordSize*(l.Records+1), reserved)
}

// Mark adds a range to Zeros, without a record.
func (l *ZeroLog) Mark(off, n int64) {
	b, end := off>>BlockBits, min((off+n)>>BlockBits, l.Zeros.Blocks)
	if b < end {
		l.Zeros.Set(b, end, 1)
	}
}

// Ranges calls each for every maximal range of recorded zeros.
func (l *ZeroLog) Ranges(each func(off, n int64)) {
	for b := int64(0); b < l.Zeros.Blocks; {
		v, n := l.Zeros.Run(b, l.Zeros.Blocks)
		if v == 1 {
			each(b<<BlockBits, n<<BlockBits)
		}
		b += n
	}
}

// Shrink rewrites a log that has become long. All records are durable before. After an error the disk may have either
// of the two files.
func (l *ZeroLog) Shrink() error {
	if l.Linked || l.Records < l.most {
		return nil
	}
	replaced, err := l.compact()
	l.most = max(CompactAt, 2*l.Records)
	if err != nil && !replaced {
		slog.Warn("a record of zeros stays as long as it is", "name", l.name, "records", l.Records, "error", err)
		return nil
	}
	return err
}

// compact rewrites the log with one record per range, where the result is smaller. Replaced is whether the disk may
// have the new file.
func (l *ZeroLog) compact() (replaced bool, err error) {
	ranges := int64(0)
	l.Ranges(func(_, _ int64) { ranges++ })
	if ranges > l.Records/2 {
		return false, nil
	}
	data := append(make([]byte, 0, ZeroRecordSize*(ranges+1)), ZeroHeader()...)
	seq := int64(0)
	l.Ranges(func(off, n int64) {
		data = append(data, make([]byte, ZeroRecordSize)...)
		PutZeroRecord(data[len(data)-ZeroRecordSize:], seq, off, n)
		seq++
	})
	if err := ReplaceFile(l.fs, l.name, data); err != nil {
		return errors.Is(err, ErrUnsure), err
	}
	h, err := l.fs.Open(l.name, os.O_RDWR, 0)
	if err != nil {
		return true, err
	}
	l.File.Close()
	l.File, l.Records = h, seq
	l.Reserve()
	return true, nil
}

// Add appends records. The records are durable after Sync.
func (l *ZeroLog) Add(ranges []block.Span) error {
	if len(ranges) == 0 {
		return nil
	}
	b := make([]byte, ZeroRecordSize*len(ranges))
	for i, s := range ranges {
		PutZeroRecord(b[i*ZeroRecordSize:], l.Records+int64(i), s.Off, s.Len)
	}
	l.dirty = true
	end := ZeroRecordSize * (l.Records + 1)
	if _, err := l.File.WriteAt(b, end); err != nil {
		// The next open must find no record of this call, as none counts now.
		return errors.Join(err, l.File.Truncate(end))
	}
	l.Records += int64(len(ranges))
	for _, s := range ranges {
		l.Mark(s.Off, s.Len)
	}
	return nil
}

// Sync makes all records durable.
func (l *ZeroLog) Sync() error {
	if !l.dirty {
		return nil
	}
	if err := l.File.Datasync(); err != nil {
		return err
	}
	l.dirty = false
	return nil
}

// Close closes the file without a sync.
func (l *ZeroLog) Close() error { return l.File.Close() }
