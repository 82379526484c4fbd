package vhd

import (
	"bytes"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/format/oracle"
)

// A small dynamic disk by hand, blocks of 8 KiB (16 sectors). Bytes of the file: 0 copy of the footer, 512 dynamic
// header, 1536 table, from 2048 on blocks with a bitmap of one sector each, then the footer. Blocks of the disk: 0 all
// data, 1 hole, 2 data in sectors 1, 2 and 15, the last (64) data and cut by the disk's end.
const (
	tinyBlock  = 8192
	tinySize   = 64*tinyBlock + 1536
	tinyHeader = 512
	tinyTable  = 1536
	tinyData   = 2048
	tinyStride = 512 + tinyBlock
)

type tiny struct{ b, want []byte }

func makeTiny() *tiny {
	m := &tiny{b: make([]byte, tinyData), want: make([]byte, tinySize)}
	f := make([]byte, footerSize)
	copy(f, cookie)
	be.PutUint32(f[12:], 1<<16)
	be.PutUint64(f[16:], tinyHeader)
	copy(f[28:], "win ")
	be.PutUint64(f[48:], tinySize)
	be.PutUint32(f[60:], kindDynamic)
	copy(m.b, f)
	h := m.b[tinyHeader:]
	copy(h, cookieDynamic)
	be.PutUint64(h[16:], tinyTable)
	be.PutUint32(h[24:], 1<<16)
	be.PutUint32(h[28:], 65)
	be.PutUint32(h[32:], tinyBlock)
	for i := range 128 {
		m.entry(i, unused)
	}
	for i, c := range []struct {
		block  int
		bitmap uint16
	}{{64, 0xe000}, {0, 0xffff}, {2, 0x6001}} {
		m.entry(c.block, uint32(tinyData+i*tinyStride)/sector)
		bitmap := make([]byte, 512)
		be.PutUint16(bitmap, c.bitmap)
		m.b = append(m.b, bitmap...)
		for s := range 16 {
			// A sector without a bit is garbage.
			b := bytes.Repeat([]byte{byte(c.block), byte(s), 1, 2}, sector/4)
			m.b = append(m.b, b...)
			if at := c.block*tinyBlock + s*sector; c.bitmap&(0x8000>>s) != 0 && at < tinySize {
				copy(m.want[at:], b)
			}
		}
	}
	m.b = append(m.b, f...)
	return m
}

func (m *tiny) entry(i int, v uint32) { be.PutUint32(m.b[tinyTable+4*i:], v) }

// signed sets all checksums.
func (m *tiny) signed() []byte {
	if len(m.b) >= tinyHeader+dynamicSize {
		sum(m.b[tinyHeader:][:dynamicSize], checksumDynamic)
	}
	if len(m.b) >= 512 {
		sum(m.b[:512], checksumFooter)
		sum(m.end(), checksumFooter)
	}
	return m.b
}

func (m *tiny) end() []byte { return m.b[len(m.b)-512:] }

// both edits the footer and the copy of the footer.
func both(edit func(f []byte)) func(m *tiny) {
	return func(m *tiny) {
		edit(m.b[:512])
		edit(m.end())
	}
}

func TestTiny(t *testing.T) {
	m := makeTiny()
	b := m.signed()
	src, err := opener(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	oracle.Same(t, src, m.want)
	const two = 2 * tinyBlock
	for _, want := range []block.Extent{{Off: 0, Len: tinyBlock, Kind: block.Data}, {Off: tinyBlock, Len: tinyBlock + 512},
		{Off: two + 700, Len: 1536 - 700, Kind: block.Data}, {Off: two + 1536, Len: 12 * 512},
		{Off: two + 15*512, Len: 512, Kind: block.Data}, {Off: two + tinyBlock, Len: 61 * tinyBlock},
		{Off: tinySize - 1, Len: 1, Kind: block.Data}} {
		if e, err := src.Next(want.Off); err != nil || e != want {
			t.Errorf("extent %+v, %v, want %+v", e, err, want)
		}
	}
	// Either footer is enough.
	for _, at := range []int{0, len(b) - 512} {
		damaged := bytes.Clone(b)
		damaged[at+100]++
		im, err := Open(bytes.NewReader(damaged), int64(len(b)), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if oracle.Same(t, im, m.want); im.Info().FrontCopy == (at == 0) {
			t.Fatalf("%+v", im.Info())
		}
	}
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
	oracle.ReaderFails(t, opener, b)
}

func TestZoo(t *testing.T) {
	header := func(edit func(h []byte)) func(m *tiny) { return func(m *tiny) { edit(m.b[tinyHeader:][:dynamicSize]) } }
	fixed := func(edit func(f []byte)) func(m *tiny) {
		return func(m *tiny) {
			f := bytes.Clone(m.end())
			be.PutUint32(f[60:], kindFixed)
			if edit(f); true {
				m.b = append(bytes.Clone(m.want), f...)
			}
		}
	}
	for _, c := range []struct {
		name string
		edit func(m *tiny)
		kind api.Kind
		says string
	}{
		{"nothing", func(m *tiny) { m.b = nil }, api.Invalid, "0 bytes"},
		{"short", func(m *tiny) { m.b = m.b[:511] }, api.Invalid, "511 bytes"},
		{"not VHD", both(func(f []byte) { f[0] = 'X' }), api.Invalid, "says conectix"},
		{"version 2", both(func(f []byte) { f[13] = 2 }), api.Unsupported, "format version 2.0"},
		{"type 0", both(func(f []byte) { f[63] = 0 }), api.Unsupported, "disk type 0"},
		{"type 5", both(func(f []byte) { f[63] = 5 }), api.Unsupported, "disk type 5"},
		{"huge", both(func(f []byte) { be.PutUint64(f[48:], 1<<63) }), api.OutOfRange, "virtual size"},
		{"size of 2^64-1", both(func(f []byte) { be.PutUint64(f[48:], 1<<64-1) }), api.OutOfRange, "virtual size"},
		{"above the format", both(func(f []byte) { be.PutUint64(f[48:], 3<<40) }), api.OutOfRange, "virtual size"},
		{"geometry above the table", both(func(f []byte) {
			copy(f[28:], "vpc ")
			copy(f[56:], "\xff\xff\xff\xff")
		}), api.Corrupt, "the virtual size of 2181843648000 bytes needs"},
		{"size above the table", both(func(f []byte) { be.PutUint64(f[48:], tinySize+tinyBlock) }), api.Corrupt, "has 65"},
		{"header outside", both(func(f []byte) { be.PutUint64(f[16:], 1<<40) }), api.Corrupt, "the dynamic header at"},
		{"header far outside", both(func(f []byte) { be.PutUint64(f[16:], 1<<64-1) }), api.Corrupt, "header's offset"},
		{"header elsewhere", both(func(f []byte) { be.PutUint64(f[16:], 1024) }), api.Corrupt, "start with cxsparse"},
		{"differencing", func(m *tiny) {
			both(func(f []byte) { f[63] = kindDifferencing })(m)
			for i, c := range "/etc/passwd" {
				m.b[tinyHeader+64+2*i+1] = byte(c)
			}
		}, api.Unsupported, `over the parent "/etc/passwd"`},
		{"header version 2", header(func(h []byte) { h[25] = 2 }), api.Unsupported, "header version 2.0"},
		{"block of 0", header(func(h []byte) { be.PutUint32(h[32:], 0) }), api.Corrupt, "block size"},
		{"block of 256 bytes", header(func(h []byte) { be.PutUint32(h[32:], 256) }), api.Corrupt, "block size"},
		{"block of 3 sectors", header(func(h []byte) { be.PutUint32(h[32:], 1536) }), api.Corrupt, "block size"},
		{"huge block", header(func(h []byte) { be.PutUint32(h[32:], 1<<31) }), api.OutOfRange, "block size"},
		{"huge table", func(m *tiny) {
			both(func(f []byte) { be.PutUint64(f[48:], 1<<40) })(m)
			header(func(h []byte) {
				be.PutUint32(h[28:], 1<<32-1)
				be.PutUint32(h[32:], 512)
			})(m)
		}, api.OutOfRange, "allocation table of 2147483648 entries"},
		{"table short", header(func(h []byte) { be.PutUint32(h[28:], 64) }), api.Corrupt, "has 64 entries"},
		{"table outside", header(func(h []byte) { be.PutUint64(h[16:], 1<<30) }), api.Corrupt, "the allocation table at"},
		{"table far outside", header(func(h []byte) { be.PutUint64(h[16:], 1<<63) }), api.Corrupt, "table's offset"},
		{"block outside", func(m *tiny) { m.entry(9, 1<<32-2) }, api.Corrupt, "block 9 at"},
		{"block beyond the end", func(m *tiny) { m.entry(9, uint32(len(m.b)/sector-8)) }, api.Corrupt, "block 9 at"},
		{"block in the footer's copy", func(m *tiny) { m.entry(9, 0) }, api.Corrupt, "lies in the image's headers"},
		{"block in the header", func(m *tiny) { m.entry(9, 2) }, api.Corrupt, "lies in the image's headers"},
		{"block in the table", func(m *tiny) { m.entry(9, 3) }, api.Corrupt, "lies in the image's headers"},
		{"block twice", func(m *tiny) { m.entry(9, tinyData/sector) }, api.Corrupt, "overlap"},
		{"blocks overlap", func(m *tiny) { m.entry(9, tinyData/sector+1) }, api.Corrupt, "overlap"},
		{"one block for all", func(m *tiny) {
			for i := range 65 {
				m.entry(i, tinyData/sector)
			}
		}, api.Corrupt, "65 blocks"},
		{"fixed, cut off", fixed(func(f []byte) { be.PutUint64(f[48:], tinySize+512) }), api.Corrupt, "cut off"},
		{"fixed, larger geometry", fixed(func(f []byte) {
			copy(f[28:], "vpc ")
			copy(f[56:], "\x10\x00\x10\x3f")
		}), api.Corrupt, "cut off"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny()
			c.edit(m)
			oracle.Refused(t, opener, m.signed(), c.kind, c.says)
		})
	}
}

// TestChecksums: wrong checksums, which signed would correct, are refused.
func TestChecksums(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		says string
	}{
		{"both footers", func(b []byte) []byte {
			b[200]++
			b[len(b)-200]++
			return b
		}, "the checksum of the header is wrong"},
		{"header", func(b []byte) []byte { b[tinyHeader+900]++; return b }, "dynamic header's checksum"},
		{"fixed", func(b []byte) []byte { b[0]++; b[len(b)-200]++; return b }, "the footer's checksum"},
		{"end lost", func(b []byte) []byte {
			be.PutUint32(b[60:], kindFixed)
			sum(b[:512], checksumFooter)
			return b[:len(b)-512]
		}, "its footer is not at the end"},
	} {
		t.Run(c.name, func(t *testing.T) {
			oracle.Refused(t, opener, c.edit(makeTiny().signed()), api.Corrupt, c.says)
		})
	}
	oracle.Refused(t, limited(Limits{VirtualSize: 1 << 10}), makeTiny().signed(), api.OutOfRange, "limit of 1024")
}

// TestMemory: the largest allowed table, with every block in the file, needs little memory.
func TestMemory(t *testing.T) {
	const size, block = maxSectors * sector, 512 << 10
	m := makeTiny()
	both(func(f []byte) { be.PutUint64(f[48:], size) })(m)
	be.PutUint32(m.b[tinyHeader+28:], 1<<32-1)
	be.PutUint32(m.b[tinyHeader+32:], block)
	b := m.signed()
	err := oracle.Frugal(t, opener, oracle.Func(func(p []byte, off int64) {
		if off >= tinyTable && off < tinyTable+size/block*4 {
			for i := range len(p) / 4 {
				be.PutUint32(p[i*4:], uint32(1<<20+((off-tinyTable)/4+int64(i))*(block/sector+1)))
			}
			return
		}
		copy(p, b[off%4096:])
	}), 1<<42)
	if err != nil {
		t.Fatal(err)
	}
}

// TestTruncated: a truncated file is refused, or reads in full without the footer. A truncated file never reads as
// other content.
func TestTruncated(t *testing.T) {
	suite.Slow(t)
	m := makeTiny()
	b := m.signed()
	for n := range len(b) {
		got, err := oracle.Read(opener, b[:n])
		switch {
		case n < 512 && api.Is(err, api.Invalid):
		case n >= 512 && api.Is(err, api.Corrupt):
		case err == nil && bytes.Equal(got, m.want) && n >= tinyData+3*tinyStride:
			// The footer is cut off; the copy remains.
		default:
			t.Fatalf("cut to %d of %d bytes: %v", n, len(b), err)
		}
	}
}
