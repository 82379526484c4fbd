package stack

import (
	"bytes"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// The parsers of what is on the disk: nothing may make them panic, run away, or accept what makes no sense.

func FuzzStack(f *testing.F) {
	uid := string(api.NewUID())
	m := Meta{UID: uid, Volume: "v", VolumeUID: uid, Size: 1 << 30, Epoch: 3, Incarnation: 9, Members: []string{uid},
		Dirty: true, Layers: []string{uid}, Head: "head", Created: time.Unix(1, 0).UTC(),
		Snapshots: []Snapshot{{UID: uid, Name: "s", Layer: uid}}}
	good, err := encodeMeta(formatStack, m.record())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(bytes.Replace(good, []byte(`"epoch": 3`), []byte(`"epoch": 4`), 1))
	f.Add(bytes.Replace(good, []byte(`"version": 1`), []byte(`"version": 2`), 1))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var rec stackRecord
		if err := decodeMeta(data, formatStack, &rec); err != nil {
			if k := api.KindOf(err); k != api.Corrupt && k != api.Unsupported {
				t.Fatalf("kind %v: %v", k, err)
			}
			return
		}
		if err := rec.meta().validate(); err != nil {
			return
		}
		again, err := encodeMeta(formatStack, rec)
		if err != nil {
			t.Fatal(err)
		}
		var other stackRecord
		if err := decodeMeta(again, formatStack, &other); err != nil {
			t.Fatalf("what was read cannot be written and read: %v", err)
		}
	})
}

func FuzzZeroLog(f *testing.F) {
	good := zeroHeader()
	for i := range int64(3) {
		var b [zeroRecord]byte
		putZeroRecord(b[:], i, i<<20, 1<<20)
		good = append(good, b[:]...)
	}
	f.Add(good)
	f.Add(good[:len(good)-5])
	torn := bytes.Clone(good)
	torn[2*zeroRecord+3] ^= 0x40
	f.Add(torn)
	f.Fuzz(func(t *testing.T, data []byte) {
		l := &zeroLog{zeros: newIndex(4096, 0)}
		n, err := readZeroLog(bytes.NewReader(data), func(off, n int64) {
			if off < 0 || n <= 0 || (off|n)%blockSize != 0 {
				t.Fatalf("record of %d+%d", off, n)
			}
			l.mark(off, n)
		})
		if err != nil {
			return
		}
		if n < 0 || (n+1)*zeroRecord > int64(len(data)) {
			t.Fatalf("%d records in %d bytes", n, len(data))
		}
		m, err := readZeroLog(bytes.NewReader(data[:(n+1)*zeroRecord]), func(off, n int64) {})
		if err != nil || m != n {
			t.Fatalf("cut at record %d it holds %d, %v", n, m, err)
		}
	})
}

func FuzzLayerMap(f *testing.F) {
	x := newIndex(2*pageBlocks+100, 0)
	x.set(5, 900, uint16(block.Data))
	x.set(7, 9, uint16(block.Zero))
	x.set(pageBlocks, 2*pageBlocks, uint16(block.Data))
	size := x.blocks << blockBits
	f.Add(encodeMap(&x), size)
	f.Add(encodeMap(&x)[:100], size)
	f.Fuzz(func(t *testing.T, data []byte, size int64) {
		if size <= 0 || size > 1<<36 {
			return
		}
		m, err := openMap(bytes.NewReader(data), int64(len(data)), size)
		if err != nil {
			return
		}
		if _, err := indexOf(m); err != nil && !api.Is(err, api.Corrupt) {
			t.Fatal(err)
		}
	})
}

func FuzzIntents(f *testing.F) {
	n := newIntents(3 << 40)
	n.mark(5<<30, 1<<30)
	good := encodeIntents(n)
	f.Add(good)
	torn := bytes.Clone(good)
	torn[2*intentsPage+100] ^= 1
	f.Add(torn)
	f.Add(good[:intentsPage+10])
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := decodeIntents(data)
		if err != nil {
			return
		}
		m, err := decodeIntents(encodeIntents(n))
		if err != nil {
			t.Fatal(err)
		}
		for g := range n.regions() {
			if n.dirty(g) != m.dirty(g) {
				t.Fatalf("region %d was lost", g)
			}
		}
	})
}

// TestIntentsErrOnTheSafeSide damages single pages: their regions are dirty then, the others stay as they were.
func TestIntentsErrOnTheSafeSide(t *testing.T) {
	n := newIntents(3 * intentsBits * intentsRegion)
	if !n.mark(0, 1) || n.mark(5, 1) || !n.mark(intentsBits*intentsRegion, intentsRegion+1) {
		t.Fatal("mark")
	}
	data := encodeIntents(n)
	data[2*intentsPage+4000] ^= 1
	m, err := decodeIntents(data)
	if err != nil {
		t.Fatal(err)
	}
	for g := range m.regions() {
		want := n.dirty(g) || g/intentsBits == 1
		if m.dirty(g) != want {
			t.Fatalf("region %d: dirty is %v", g, m.dirty(g))
		}
	}
}
