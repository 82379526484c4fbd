package vhdx

import (
	"bytes"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/format/oracle"
)

// A small dynamic disk by hand, blocks of 1 MiB. MiB of the file: 0 headers, 1 log, 2 block allocation table, 3
// metadata, from 4 on blocks. Blocks of the disk: 0 and 5 data, in this order backwards in the file, 1 not present, 2
// zero, 3 undefined, 4 unmapped, 9 data, the last (10) data and cut by the disk's end.
const (
	tinySize  = 10*mib + 4096
	tinyLog   = 1 * mib
	tinyTable = 2 * mib
	tinyMeta  = 3 * mib
	tinyData  = 4 * mib
	tinyItems = tinyMeta + tableSize
)

type tiny struct{ b, want []byte }

func makeTiny(logical uint32) *tiny {
	m := &tiny{b: make([]byte, tinyData), want: make([]byte, tinySize)}
	copy(m.b, magic+"d\x00r\x00o\x00v\x00")
	for i := range 2 {
		h := m.header(i)
		copy(h, "head")
		le.PutUint64(h[8:], uint64(7+i))
		le.PutUint16(h[66:], 1)
		le.PutUint32(h[68:], mib)
		le.PutUint64(h[72:], tinyLog)
		r := m.region(i)
		copy(r, "regi")
		le.PutUint32(r[8:], 2)
		entry(r[16:], regionBAT, tinyTable, mib, 1)
		entry(r[48:], regionMetadata, tinyMeta, mib, 1)
	}
	copy(m.b[tinyMeta:], "metadata")
	le.PutUint16(m.b[tinyMeta+10:], 5)
	for i, it := range []struct {
		id    guid
		value []byte
	}{
		{itemFile, le.AppendUint64(nil, mib)},
		{itemSize, le.AppendUint64(nil, tinySize)},
		{itemID, make([]byte, 16)},
		{itemLogical, le.AppendUint32(nil, logical)},
		{itemPhysical, le.AppendUint32(nil, 4096)},
	} {
		e := m.item(i)
		copy(e, it.id[:])
		le.PutUint32(e[16:], uint32(tableSize+16*i))
		le.PutUint32(e[20:], uint32(len(it.value)))
		le.PutUint32(e[24:], 6)
		copy(m.b[tinyItems+16*i:], it.value)
	}
	m.block(2, stateZero)
	m.block(3, stateUndefined)
	m.block(4, tinyData|stateUnmapped)
	for i, n := range []int{5, 0, 10, 9} {
		m.block(n, uint64(tinyData+i*mib)|stateFullyPresent)
		m.b = append(m.b, bytes.Repeat([]byte{byte(n), byte(i), 1, 2, 3, 4, 5, 6}, mib/8)...)
		copy(m.want[n*mib:], m.b[tinyData+i*mib:])
	}
	return m
}

func entry(b []byte, id guid, off uint64, n, flags uint32) {
	copy(b, id[:])
	le.PutUint64(b[16:], off)
	le.PutUint32(b[24:], n)
	le.PutUint32(b[28:], flags)
}

func (m *tiny) header(i int) []byte   { return m.b[(1+i)*64*kib:][:headerSize] }
func (m *tiny) region(i int) []byte   { return m.b[(3+i)*64*kib:][:tableSize] }
func (m *tiny) item(i int) []byte     { return m.b[tinyMeta+32+32*i:][:32] }
func (m *tiny) value(i int) []byte    { return m.b[tinyItems+16*i:][:8] }
func (m *tiny) block(n int, e uint64) { le.PutUint64(m.b[tinyTable+8*n:], e) }

// signed sets the checksums of headers and region tables.
func (m *tiny) signed() []byte {
	for i := range 2 {
		if len(m.b) >= (4+i)*64*kib {
			le.PutUint32(m.header(i)[4:], checksum(m.header(i)))
			le.PutUint32(m.region(i)[4:], checksum(m.region(i)))
		}
	}
	return m.b
}

func TestTiny(t *testing.T) {
	for _, logical := range []uint32{512, 4096} {
		m := makeTiny(logical)
		b := m.signed()
		im, err := Open(bytes.NewReader(b), int64(len(b)), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		oracle.Same(t, im, m.want)
		for _, want := range []block.Extent{{Off: 7, Len: mib - 7, Kind: block.Data}, {Off: mib, Len: mib},
			{Off: 2 * mib, Len: mib, Kind: block.Zero}, {Off: 3*mib + 5, Len: 2*mib - 5},
			{Off: 5 * mib, Len: mib, Kind: block.Data}, {Off: 6 * mib, Len: 3 * mib},
			{Off: 9 * mib, Len: mib + 4096, Kind: block.Data}} {
			if e, err := im.Next(want.Off); err != nil || e != want {
				t.Errorf("extent %+v, %v, want %+v", e, err, want)
			}
		}
		if i := im.Info(); i.Creator != "drov" || i.Data != 3*mib+4096 || i.LogicalSectorSize != int64(logical) || i.Fixed {
			t.Fatalf("%+v", i)
		}
		// A single header and a single region table are enough; the newer header counts.
		for i := range 2 {
			damaged := &tiny{b: bytes.Clone(b)}
			damaged.header(i)[1000]++
			damaged.region(i)[1000]++
			if _, err := oracle.Read(opener, damaged.b); err != nil {
				t.Fatalf("header and region table %d are damaged: %v", i, err)
			}
		}
		if err := im.Close(); err != nil {
			t.Fatal(err)
		}
		oracle.ReaderFails(t, opener, b)
	}
}

// TestRatio: in large disks, an entry of a sector bitmap follows every group of blocks. The sector size determines the
// size of the group.
func TestRatio(t *testing.T) {
	for _, logical := range []uint32{512, 4096} {
		m := makeTiny(logical)
		ratio := int64(8 * logical) // blocks of 1 MiB
		le.PutUint64(m.value(1), uint64(3*ratio*mib))
		number := 2*ratio - 1
		m.block(int(number+1), uint64(len(m.b))|stateFullyPresent)
		m.block(int(ratio), uint64(len(m.b))|statePartly) // the entry of a sector bitmap
		m.b = append(m.b, bytes.Repeat([]byte{9}, mib)...)
		b := m.signed()
		im, err := Open(bytes.NewReader(b), int64(len(b)), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 3*mib)
		if _, err := im.ReadAt(p, (number-1)*mib); err != nil || bytes.Count(p, []byte{9}) != mib || p[mib] != 9 {
			t.Fatalf("%d bytes of the block are there, %v", bytes.Count(p, []byte{9}), err)
		}
		for off := int64(11 * mib); off < number*mib; {
			e, err := im.Next(off)
			if err != nil || e.Kind != block.Hole || e.Len < 512*mib && e.End() != number*mib {
				t.Fatalf("extent %+v, %v", e, err)
			}
			off = e.End()
		}
	}
}

func TestZoo(t *testing.T) {
	suite.Slow(t)
	headers := func(edit func(h []byte)) func(m *tiny) {
		return func(m *tiny) {
			edit(m.header(0))
			edit(m.header(1))
		}
	}
	regions := func(edit func(r []byte)) func(m *tiny) {
		return func(m *tiny) {
			edit(m.region(0))
			edit(m.region(1))
		}
	}
	for _, c := range []struct {
		name string
		edit func(m *tiny)
		kind api.Kind
		says string
	}{
		{"nothing", func(m *tiny) { m.b = nil }, api.Invalid, "does not start with vhdxfile"},
		{"not VHDX", func(m *tiny) { m.b[0] = 'V' }, api.Invalid, "does not start with vhdxfile"},
		{"identifier only", func(m *tiny) { m.b = m.b[:64*kib] }, api.Corrupt, "inside the headers"},
		{"no header", headers(func(h []byte) { h[0] = 'H' }), api.Corrupt, "neither of the two headers"},
		{"format version 2", headers(func(h []byte) { h[66] = 2 }), api.Unsupported, "format version 2"},
		{"log askew", headers(func(h []byte) { h[72] = 1 }), api.Corrupt, "the log's place"},
		{"log in the headers", headers(func(h []byte) { le.PutUint64(h[72:], 0) }), api.Corrupt, "the log's place"},
		{"log outside", headers(func(h []byte) { le.PutUint64(h[72:], 1<<63) }), api.Corrupt, "the log's place"},
		{"log beyond the end", headers(func(h []byte) { le.PutUint32(h[68:], 64*mib) }), api.Corrupt, "the log at"},
		{"log of no length", headers(func(h []byte) {
			h[50] = 1
			le.PutUint32(h[68:], 0)
		}), api.Corrupt, "length 0"},
		{"log version 1", headers(func(h []byte) { h[50], h[64] = 1, 1 }), api.Unsupported, "the log has version 1"},
		{"no region table", regions(func(r []byte) { r[0] = 'R' }), api.Corrupt, "neither of the two region tables"},
		{"endless regions", regions(func(r []byte) { le.PutUint32(r[8:], 1<<31) }), api.Corrupt, "2147483648 entries"},
		{"unknown region", regions(func(r []byte) {
			le.PutUint32(r[8:], 3)
			entry(r[80:], guid{1}, 7*mib, mib, 1)
		}), api.Unsupported, "unknown region 00000001-"},
		{"region twice", regions(func(r []byte) {
			le.PutUint32(r[8:], 3)
			entry(r[80:], regionBAT, 7*mib, mib, 1)
		}), api.Corrupt, "exists twice"},
		{"regions overlap", regions(func(r []byte) { le.PutUint64(r[16+16:], tinyMeta) }), api.Corrupt, "overlaps"},
		{"region in the log", regions(func(r []byte) { le.PutUint64(r[16+16:], tinyLog) }), api.Corrupt, "overlaps"},
		{"region in the headers", regions(func(r []byte) { le.PutUint64(r[16+16:], 0) }), api.Corrupt, "overlaps"},
		{"region askew", regions(func(r []byte) { r[16+16] = 8 }), api.Corrupt, "whole MiB"},
		{"region outside", regions(func(r []byte) { le.PutUint64(r[16+16:], 1<<62) }), api.Corrupt, "whole MiB"},
		{"region far outside", regions(func(r []byte) { le.PutUint64(r[16+16:], -mib&(1<<64-1)) }), api.Corrupt, "whole MiB"},
		{"empty region", regions(func(r []byte) { le.PutUint32(r[16+24:], 0) }), api.Corrupt, "whole MiB"},
		{"no metadata region", regions(func(r []byte) { le.PutUint32(r[8:], 1) }), api.Corrupt, "lacks"},
		{"metadata elsewhere", func(m *tiny) { m.b[tinyMeta] = 'M' }, api.Corrupt, "does not start with metadata"},
		{"endless metadata", func(m *tiny) { le.PutUint16(m.b[tinyMeta+10:], 1<<16-1) }, api.Corrupt, "65535 entries"},
		{"unknown item", func(m *tiny) { m.item(2)[0]++ }, api.Unsupported, "unknown item"},
		{"needed user item", func(m *tiny) { m.item(2)[24] = 5 }, api.Unsupported, "unknown item"},
		{"item twice", func(m *tiny) { copy(m.item(2), itemSize[:]) }, api.Corrupt, "twice"},
		{"item in the table", func(m *tiny) { le.PutUint32(m.item(0)[16:], 64) }, api.Corrupt, "is not within"},
		{"item outside", func(m *tiny) { le.PutUint32(m.item(0)[16:], mib-4) }, api.Corrupt, "is not within"},
		{"item that overflows", func(m *tiny) { le.PutUint32(m.item(0)[20:], 1<<32-1) }, api.Corrupt, "is not within"},
		{"item too short", func(m *tiny) { le.PutUint32(m.item(0)[20:], 4) }, api.Corrupt, "is not within"},
		{"no size", func(m *tiny) { clear(m.item(1)) }, api.Corrupt, "is missing"},
		{"block of 512 KiB", func(m *tiny) { le.PutUint32(m.value(0), mib/2) }, api.Corrupt, "block size"},
		{"block of 3 MiB", func(m *tiny) { le.PutUint32(m.value(0), 3*mib) }, api.Corrupt, "block size"},
		{"block of 512 MiB", func(m *tiny) { le.PutUint32(m.value(0), 512*mib) }, api.Corrupt, "block size"},
		{"differencing", func(m *tiny) { m.value(0)[4] = flagHasParent }, api.Unsupported, "differencing"},
		{"huge", func(m *tiny) { le.PutUint64(m.value(1), 1<<63) }, api.OutOfRange, "virtual size"},
		{"size askew", func(m *tiny) { le.PutUint64(m.value(1), 1000) }, api.Corrupt, "multiple of the sector size"},
		{"sector of 1000", func(m *tiny) { le.PutUint32(m.value(3), 1000) }, api.Corrupt, "sector size"},
		{"size above the table", func(m *tiny) { le.PutUint64(m.value(1), 1<<40) }, api.Corrupt, "too small"},
		{"unknown state", func(m *tiny) { m.block(6, 7*mib|4) }, api.Corrupt, "block 6 has the unknown state 4"},
		{"partly present", func(m *tiny) { m.block(6, 7*mib|statePartly) }, api.Corrupt, "no parent"},
		{"block outside", func(m *tiny) { m.block(6, 8*mib|stateFullyPresent) }, api.Corrupt, "block 6 at"},
		{"block far outside", func(m *tiny) { m.block(6, 1<<64-mib|stateFullyPresent) }, api.Corrupt, "block 6 at"},
		{"block in the headers", func(m *tiny) { m.block(6, stateFullyPresent) }, api.Corrupt, "headers, log or tables"},
		{"block in the log", func(m *tiny) { m.block(6, tinyLog|stateFullyPresent) }, api.Corrupt, "headers, log or tables"},
		{"block in the table", func(m *tiny) { m.block(6, tinyTable|stateFullyPresent) }, api.Corrupt, "headers, log or"},
		{"block in the metadata", func(m *tiny) { m.block(6, tinyMeta|stateFullyPresent) }, api.Corrupt, "headers, log or"},
		{"block twice", func(m *tiny) { m.block(6, tinyData|stateFullyPresent) }, api.Corrupt, "overlaps another block"},
		{"blocks overlap", func(m *tiny) {
			le.PutUint32(m.value(0), 2*mib)
			m.block(0, 4*mib|stateFullyPresent)
			m.block(1, 5*mib|stateFullyPresent)
		}, api.Corrupt, "overlaps another block"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny(512)
			c.edit(m)
			oracle.Refused(t, opener, m.signed(), c.kind, c.says)
		})
	}
	m := makeTiny(512)
	le.PutUint64(m.header(0)[8:], 8)
	m.header(0)[3000] = 1
	oracle.Refused(t, opener, m.signed(), api.Corrupt, "the same sequence number")
	oracle.Refused(t, limited(Limits{VirtualSize: mib}), makeTiny(512).signed(), api.OutOfRange, "limit of 1048576")
}

// TestTruncated: a truncated file is refused.
func TestTruncated(t *testing.T) {
	b := makeTiny(512).signed()
	for n := 0; n < len(b); n += 4096*5 + 1 {
		want := api.Corrupt
		if n < len(magic) {
			want = api.Invalid
		}
		if _, err := opener(bytes.NewReader(b[:n]), int64(n)); !api.Is(err, want) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(b), err)
		}
	}
	// A file needs the last block only up to the disk's end.
	m := makeTiny(512)
	m.block(9, stateZero)
	clear(m.want[9*mib : 10*mib])
	m.b = m.b[:tinyData+2*mib+4096]
	src, err := opener(bytes.NewReader(m.signed()), int64(len(m.b)))
	if err != nil {
		t.Fatal(err)
	}
	oracle.Same(t, src, m.want)
}
