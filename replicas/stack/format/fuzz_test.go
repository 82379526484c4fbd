package format

import (
	"bytes"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// The parsers of files on the disk: no input makes a parser panic, run away, or accept nonsense.

func FuzzZeroLog(f *testing.F) {
	good := ZeroHeader()
	for i := range int64(3) {
		var b [ZeroRecordSize]byte
		PutZeroRecord(b[:], i, i<<20, 1<<20)
		good = append(good, b[:]...)
	}
	f.Add(good)
	f.Add(good[:len(good)-5])
	torn := bytes.Clone(good)
	torn[2*ZeroRecordSize+3] ^= 0x40
	f.Add(torn)
	f.Fuzz(func(t *testing.T, data []byte) {
		l := &ZeroLog{Zeros: NewIndex(4096, 0)}
		n, err := ReadZeroLog(bytes.NewReader(data), func(off, n int64) {
			if off < 0 || n <= 0 || (off|n)%BlockSize != 0 {
				t.Fatalf("record of %d+%d", off, n)
			}
			l.Mark(off, n)
		})
		if err != nil {
			return
		}
		if n < 0 || (n+1)*ZeroRecordSize > int64(len(data)) {
			t.Fatalf("%d records in %d bytes", n, len(data))
		}
		m, err := ReadZeroLog(bytes.NewReader(data[:(n+1)*ZeroRecordSize]), func(off, n int64) {})
		if err != nil || m != n {
			t.Fatalf("cut at record %d it holds %d, %v", n, m, err)
		}
	})
}

func FuzzLayerMap(f *testing.F) {
	x := NewIndex(2*PageBlocks+100, 0)
	x.Set(5, 900, uint16(block.Data))
	x.Set(7, 9, uint16(block.Zero))
	x.Set(PageBlocks, 2*PageBlocks, uint16(block.Data))
	size := x.Blocks << BlockBits
	f.Add(EncodeMap(&x), size)
	f.Add(EncodeMap(&x)[:100], size)
	f.Fuzz(func(t *testing.T, data []byte, size int64) {
		if size <= 0 || size > 1<<36 {
			return
		}
		m, err := OpenMap(bytes.NewReader(data), int64(len(data)), size)
		if err != nil {
			return
		}
		if _, err := IndexOf(m); err != nil && !api.Is(err, api.Corrupt) {
			t.Fatal(err)
		}
	})
}

func FuzzIntents(f *testing.F) {
	n := NewIntents(3 << 40)
	n.mark(5<<30, 1<<30)
	good := EncodeIntents(n)
	f.Add(good)
	torn := bytes.Clone(good)
	torn[2*IntentsPageSize+100] ^= 1
	f.Add(torn)
	f.Add(good[:IntentsPageSize+10])
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := DecodeIntents(data)
		if err != nil {
			return
		}
		m, err := DecodeIntents(EncodeIntents(n))
		if err != nil {
			t.Fatal(err)
		}
		for g := range n.Regions() {
			if n.Dirty(g) != m.Dirty(g) {
				t.Fatalf("region %d was lost", g)
			}
		}
	})
}
