package vhd

import (
	"bytes"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/format/oracle"
)

// arriving is an image with only the first bytes so far. arriving notes dropped bytes.
type arriving struct {
	t       *testing.T
	b       []byte
	have    int
	dropped []bool
}

func (a *arriving) ReadAt(p []byte, off int64) (int, error) {
	if int(off)+len(p) > a.have {
		a.t.Fatalf("[%d, %d) is asked for when %d bytes have come", off, int(off)+len(p), a.have)
	}
	return bytes.NewReader(a.b).ReadAt(p, off)
}

func (a *arriving) Drop(off, n int64) {
	for i := off; i < off+n; i++ {
		if a.dropped[i] {
			a.t.Fatalf("byte %d is dropped twice", i)
		}
		a.dropped[i] = true
	}
}

// TestStream: a stream can be read from the first blocks on, needs no bytes of the file beyond Reach, and drops all
// bytes of a block read as a whole.
func TestStream(t *testing.T) {
	m := makeTiny()
	m.entry(0, uint32(tinyData)/sector) // the blocks in the order of the disk: 0, 64, 2
	m.entry(64, uint32(tinyData+2*tinyStride)/sector)
	m.entry(2, uint32(tinyData+tinyStride)/sector)
	a := &arriving{t: t, b: m.signed(), have: tinyData, dropped: make([]bool, len(m.b))}
	im, err := Open(a, int64(len(a.b)), Limits{Stream: true})
	if err != nil {
		t.Fatal(err)
	}
	a.have += sector // the first bitmap
	e, err := im.Next(0)
	if err != nil {
		t.Fatal(err)
	}
	end, err := im.Reach(0, tinyBlock)
	if err != nil || end != tinyData+4*sector { // the bits are the last block's: three sectors
		t.Fatalf("reaches to %d, %v", end, err)
	}
	if e.Len != 3*sector {
		t.Fatalf("extent %+v", e)
	}
	a.have = int(end)
	b := make([]byte, tinyBlock)
	if _, err := im.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	for i := range tinyStride {
		if !a.dropped[tinyData+i] {
			t.Fatalf("byte %d of the block is kept", i)
		}
	}
	a.have = len(a.b)
	if err := im.Settled(); err != nil || im.Info().FrontCopy {
		t.Fatal(err)
	}
	whole, err := Open(bytes.NewReader(a.b), int64(len(a.b)), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, tinySize)
	if _, err := whole.ReadAt(want, 0); err != nil {
		t.Fatal(err)
	}
	again, err := Open(struct{ *bytes.Reader }{bytes.NewReader(a.b)}, int64(len(a.b)), Limits{Stream: true})
	if err != nil {
		t.Fatal(err)
	}
	oracle.Same(t, again, want)
}

// TestStreamWithTwoFooters: the footer at the end counts. A stream read by a different footer is refused.
func TestStreamWithTwoFooters(t *testing.T) {
	for _, c := range []struct {
		name  string
		edit  func(m *tiny)
		sign  bool
		want  string
		front bool
	}{
		{"as they should be", func(*tiny) {}, true, "", false},
		{"another size", func(m *tiny) { be.PutUint64(m.end()[48:], tinySize-tinyBlock) }, true, "at the end", false},
		{"another kind", func(m *tiny) { be.PutUint32(m.end()[60:], kindFixed) }, true, "at the end", false},
		{"an unknown kind", func(m *tiny) { be.PutUint32(m.end()[60:], 9) }, true, "disk type 9", false},
		{"a damaged one", func(m *tiny) { m.end()[100]++ }, false, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny()
			m.signed()
			c.edit(m)
			if c.sign {
				m.signed()
			}
			im, err := Open(bytes.NewReader(m.b), int64(len(m.b)), Limits{Stream: true})
			if err != nil {
				t.Fatal(err)
			}
			switch err := im.Settled(); {
			case (err == nil) != (c.want == ""):
				t.Fatal(err)
			case err != nil && (!strings.Contains(err.Error(), c.want) || api.KindOf(err) == api.Other):
				t.Fatal(err)
			}
			if im.Info().FrontCopy != c.front {
				t.Fatalf("%+v", im.Info())
			}
		})
	}
	// A damaged copy at the start does not count.
	m := makeTiny()
	b := m.signed()
	b[100]++
	im, err := Open(bytes.NewReader(b), int64(len(b)), Limits{Stream: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := im.Settled(); err != nil {
		t.Fatal(err)
	}
	oracle.Same(t, im, m.want)
}
