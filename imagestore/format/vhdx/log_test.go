package vhdx

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/format/oracle"
)

// write is the effect of a log's entry: data of 4 KiB, or zeros.
type write struct {
	off  int64
	data []byte
	zero int64
}

var tinyLogID = guid{1, 2, 3}

// log puts an entry into the log at a place in the ring, and returns the next entry's place. tail is the sequence's
// tail.
func (m *tiny) log(at, tail int64, sequence uint64, writes ...write) int64 {
	for i := range 2 {
		copy(m.header(i)[48:], tinyLogID[:])
	}
	head := headLen(int64(len(writes)))
	b := make([]byte, head)
	copy(b, "loge")
	le.PutUint32(b[12:], uint32(tail))
	le.PutUint64(b[16:], sequence)
	le.PutUint32(b[24:], uint32(len(writes)))
	copy(b[32:], tinyLogID[:])
	le.PutUint64(b[48:], uint64(len(m.b)))
	le.PutUint64(b[56:], uint64(len(m.b)))
	for i, w := range writes {
		d := b[entryHead+i*descSize:]
		le.PutUint64(d[16:], uint64(w.off))
		le.PutUint64(d[24:], sequence)
		if w.data == nil {
			copy(d, "zero")
			le.PutUint64(d[8:], uint64(w.zero))
			continue
		}
		copy(d, "desc")
		copy(d[8:16], w.data[:8])
		copy(d[4:8], w.data[4092:])
		s := make([]byte, logSector)
		copy(s, "data")
		le.PutUint32(s[4:], uint32(sequence>>32))
		copy(s[8:4092], w.data[8:4092])
		le.PutUint32(s[4092:], uint32(sequence))
		b = append(b, s...)
	}
	le.PutUint32(b[8:], uint32(len(b)))
	m.ring(at, b)
	return (at + int64(len(b))) % mib
}

// ring puts a whole entry into the log, with the right checksum.
func (m *tiny) ring(at int64, b []byte) {
	le.PutUint32(b[4:], checksum(b))
	n := copy(m.b[tinyLog+at:tinyLog+mib], b)
	copy(m.b[tinyLog:], b[n:])
}

// table is the used piece of the table.
func (m *tiny) table() []byte { return bytes.Clone(m.b[tinyTable : tinyTable+logSector]) }

const high = 5 << 32 // sequence numbers have 64 bits

// replays are logs; after the replay, the disk reads as want.
var replays = []struct {
	name    string
	entries int
	foreign bool // qemu-img 7.2 does not read the log
	edit    func(m *tiny)
}{
	{"none", 0, false, func(*tiny) {}},
	{"empty", 0, false, func(m *tiny) { copy(m.header(1)[48:], tinyLogID[:]) }},
	{"one entry", 1, false, func(m *tiny) {
		m.log(8192, 8192, high+1, write{off: tinyTable, data: m.table()})
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"the old header", 1, false, func(m *tiny) {
		m.log(0, 0, high+1, write{off: tinyTable, data: m.table()})
		clear(m.header(0))
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"later entries win", 3, false, func(m *tiny) {
		junk := bytes.Repeat([]byte{0xff}, logSector)
		at := m.log(0, 0, 7, write{off: tinyTable, data: junk}, write{off: tinyMeta, data: junk})
		at = m.log(at, 0, 8, write{off: tinyMeta, zero: 2 * logSector}, write{off: tinyTable, data: m.table()})
		m.log(at, 0, 9, write{off: tinyMeta, data: bytes.Clone(m.b[tinyMeta : tinyMeta+logSector])})
		clear(m.b[tinyTable : tinyTable+logSector])
		clear(m.b[tinyMeta : tinyMeta+logSector])
	}},
	{"zeros in the middle of data", 1, false, func(m *tiny) {
		m.log(0, 0, 7, write{off: tinyData + mib + 8192, zero: 3 * logSector})
		clear(m.want[8192 : 8192+3*logSector])
	}},
	{"around the end of the ring", 2, false, func(m *tiny) {
		t := m.table()
		at := m.log(mib-3*logSector, mib-3*logSector, high+3, write{off: tinyTable, data: make([]byte, logSector)})
		m.log(at, mib-3*logSector, high+4, write{off: tinyTable, data: t},
			write{off: tinyData, data: m.b[tinyData:][:logSector]})
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"a torn entry", 1, false, func(m *tiny) {
		at := m.log(0, 0, 7, write{off: tinyTable, data: m.table()})
		m.log(at, 0, 8, write{off: tinyTable, data: make([]byte, logSector)})
		m.b[tinyLog+at+5000]++
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"an entry behind a torn one", 1, true, func(m *tiny) {
		at := m.log(0, 0, 7, write{off: tinyTable, data: m.table()})
		next := m.log(at, 0, 8, write{off: tinyTable, data: make([]byte, logSector)})
		m.log(next, 0, 9, write{off: tinyMeta, data: make([]byte, logSector)})
		m.b[tinyLog+at+5000]++
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"entries of another log", 1, false, func(m *tiny) {
		m.log(0, 0, high+100, write{off: tinyTable, data: make([]byte, logSector)})
		m.b[tinyLog+40]++
		m.ring(0, bytes.Clone(m.b[tinyLog:tinyLog+2*logSector]))
		m.log(mib/2, mib/2, 3, write{off: tinyTable, data: m.table()})
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"entries that were flushed", 1, false, func(m *tiny) {
		at := m.log(0, 0, 7, write{off: tinyTable, data: make([]byte, logSector)})
		m.log(at, at, 8, write{off: tinyTable, data: m.table()})
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"an old sequence", 1, false, func(m *tiny) {
		m.log(0, 0, 7, write{off: tinyTable, data: make([]byte, logSector)})
		m.log(mib/2, mib/2, 70, write{off: tinyTable, data: m.table()})
		clear(m.b[tinyTable : tinyTable+logSector])
	}},
	{"more than a sector of descriptors", 1, true, func(m *tiny) {
		var writes []write
		for i := range 200 {
			at := tinyData + int64(i)*3*logSector
			writes = append(writes, write{off: at, data: bytes.Clone(m.b[at : at+logSector])})
			clear(m.b[at : at+logSector])
		}
		m.log(logSector, logSector, 7, writes...)
	}},
	{"a sector of descriptors", 1, false, func(m *tiny) {
		var writes []write
		for i := range 126 {
			at := tinyData + int64(i)*5*logSector
			writes = append(writes, write{off: at, data: bytes.Clone(m.b[at : at+logSector])})
			clear(m.b[at : at+logSector])
		}
		m.log(logSector, logSector, 7, writes...)
	}},
	{"a file that is to grow", 1, true, func(m *tiny) {
		n := len(m.b) - mib // block 9 is last in the file
		m.b = m.b[:n]
		m.log(0, 0, 7, write{off: int64(n) + 8192, zero: logSector})
		e := m.b[tinyLog : tinyLog+logSector]
		le.PutUint64(e[56:], uint64(n+mib))
		m.ring(0, bytes.Clone(e))
		clear(m.want[9*mib : 10*mib])
	}},
}

func TestLogZoo(t *testing.T) {
	table := func(m *tiny) write { return write{off: tinyTable, data: m.table()} }
	resign := func(m *tiny, edit func(e []byte)) {
		m.log(0, 0, 7, table(m))
		e := bytes.Clone(m.b[tinyLog : tinyLog+2*logSector])
		edit(e)
		m.ring(0, e)
	}
	for _, c := range []struct {
		name string
		edit func(m *tiny)
		kind api.Kind
		says string
	}{
		{"file cut off", func(m *tiny) {
			resign(m, func(e []byte) { le.PutUint64(e[48:], uint64(len(m.b)+mib)) })
		}, api.Corrupt, "it was cut off"},
		{"negative size", func(m *tiny) {
			resign(m, func(e []byte) { le.PutUint64(e[48:], 1<<63) })
		}, api.Corrupt, "it was cut off"},
		{"endless file", func(m *tiny) {
			resign(m, func(e []byte) { le.PutUint64(e[56:], 1<<60) })
		}, api.Corrupt, "says that the file has"},
		{"descriptor of another entry", func(m *tiny) {
			resign(m, func(e []byte) { e[entryHead+24]++ })
		}, api.Corrupt, "entry 7: a descriptor is that of entry 8"},
		{"data of another entry", func(m *tiny) {
			resign(m, func(e []byte) { e[logSector+4092]++ })
		}, api.Corrupt, "belongs to another entry"},
		{"no data", func(m *tiny) {
			resign(m, func(e []byte) {
				e[24] = 2
				copy(e[entryHead+descSize:], e[entryHead:][:descSize])
			})
		}, api.Corrupt, "is missing"},
		{"unknown descriptor", func(m *tiny) { resign(m, func(e []byte) { e[entryHead] = 'x' }) }, api.Corrupt, "of unknown"},
		{"askew", func(m *tiny) { m.log(0, 0, 7, write{off: 512, zero: 4096}) }, api.Corrupt, "whole 4 KiB"},
		{"zeros of no length", func(m *tiny) { m.log(0, 0, 7, write{off: tinyTable}) }, api.Corrupt, "whole 4 KiB"},
		{"zeros that overflow", func(m *tiny) {
			m.log(0, 0, 7, write{off: 1<<63 - 4096, zero: 1<<63 - 4096})
		}, api.Corrupt, "whole 4 KiB"},
		{"changes the headers", func(m *tiny) {
			m.log(0, 0, 7, write{off: 64 * kib, data: make([]byte, logSector)})
		}, api.Corrupt, "changes the headers"},
		{"changes itself", func(m *tiny) {
			m.log(0, 0, 7, write{off: 0x7f000 + mib, zero: mib})
		}, api.Corrupt, "the log itself"},
		{"breaks the metadata", func(m *tiny) { m.log(0, 0, 7, write{off: tinyMeta, zero: mib}) }, api.Corrupt, "metadata"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny(512)
			c.edit(m)
			oracle.Refused(t, opener, m.signed(), c.kind, c.says)
		})
	}
	m := makeTiny(512)
	m.log(0, 0, 7, table(m))
	oracle.Refused(t, limited(Limits{Log: mib / 2}), m.signed(), api.OutOfRange, "exceeds the limit of 524288")
	// A log of incomplete entries which claim the length of the log.
	m = makeTiny(512)
	for at := int64(0); at < mib; at += logSector {
		m.log(at, at, 7)
		le.PutUint32(m.b[tinyLog+at+8:], mib)
	}
	oracle.Refused(t, opener, m.signed(), api.Corrupt, "full of incomplete entries")
}

// TestMemory: the largest allowed log, in an entry which continues at the start of the ring, needs little memory, also
// for a file growing to the largest allowed size.
func TestMemory(t *testing.T) {
	const ring = 32 * mib
	m := makeTiny(512)
	for i := range 2 {
		h := m.header(i)
		copy(h[48:], tinyLogID[:])
		le.PutUint32(h[68:], ring)
		le.PutUint64(h[72:], uint64(len(m.b)))
	}
	descs := int64(ring/logSector) - 65
	e := make([]byte, headLen(descs)+descs*logSector)
	copy(e, "loge")
	le.PutUint32(e[8:], uint32(len(e)))
	le.PutUint32(e[12:], ring-logSector)
	le.PutUint64(e[16:], 7)
	le.PutUint32(e[24:], uint32(descs))
	copy(e[32:], tinyLogID[:])
	le.PutUint64(e[56:], maxEffective)
	for i := range descs {
		d := e[entryHead+i*descSize:]
		copy(d, "desc")
		le.PutUint64(d[16:], uint64(1<<40+i*logSector))
		le.PutUint64(d[24:], 7)
		s := e[headLen(descs)+i*logSector:]
		copy(s, "data")
		le.PutUint32(s[4092:], 7)
	}
	le.PutUint32(e[4:], checksum(e))
	log := make([]byte, ring)
	copy(log[ring-logSector:], e)
	copy(log, e[logSector:])
	b := append(m.signed(), log...)
	if err := oracle.Frugal(t, opener, bytes.NewReader(b), int64(len(b))); err != nil {
		t.Fatal(err)
	}
}

// TestChanges compares the list of changes with plain memory.
func TestChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		im := &Image{}
		want := bytes.Repeat([]byte{0xAA}, 400)
		plain := bytes.Clone(want)
		for i := range 40 {
			c := change{off: rng.Int64N(300), n: 1 + rng.Int64N(99)}
			if rng.IntN(2) == 0 {
				c.data = bytes.Repeat([]byte{byte(i + 1)}, int(c.n))
				copy(want[c.off:], c.data)
			} else {
				clear(want[c.off:c.end()])
			}
			im.addChange(c)
			for range 5 {
				off := rng.IntN(400)
				p := bytes.Clone(plain[off : off+rng.IntN(400-off)])
				if im.patchBytes(p, int64(off)); !bytes.Equal(p, want[off:off+len(p)]) {
					t.Fatalf("%d bytes at %d differ after %d changes", len(p), off, i+1)
				}
			}
		}
	}
}
