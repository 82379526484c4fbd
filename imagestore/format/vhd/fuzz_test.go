package vhd

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/imagestore/format/oracle"
)

// FuzzOpen: for arbitrary bytes, Open returns an image which reads the same in every way, or an error of a known kind.
// The seeds are a handmade image and small images of qemu-img. With mend, the test sets the right checksums.
func FuzzOpen(f *testing.F) {
	m := makeTiny()
	f.Add(m.signed(), true)
	fixed := append(make([]byte, tinySize), m.end()...)
	be.PutUint32(fixed[tinySize+60:], kindFixed)
	f.Add(fixed, true)
	for _, o := range options {
		path := filepath.Join(f.TempDir(), "i.vhd")
		oracle.Create(f, "vpc", o, path, 20<<10)
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, false)
	}
	open := limited(Limits{VirtualSize: 1 << 40})
	f.Fuzz(func(t *testing.T, b []byte, mend bool) {
		if mend {
			m := &tiny{b: bytes.Clone(b)}
			b = m.signed()
		}
		oracle.Sound(t, open, bytes.NewReader(b), int64(len(b)))
		// An image accepted as a stream is accepted as a file, and is the same disk.
		lim := Limits{VirtualSize: 1 << 40, Stream: true}
		s, err := Open(bytes.NewReader(b), int64(len(b)), lim)
		if err != nil || s.Settled() != nil {
			return
		}
		lim.Stream = false
		whole, err := Open(bytes.NewReader(b), int64(len(b)), lim)
		if err != nil || s.Size() != whole.Size() || s.Info() != whole.Info() {
			t.Fatalf("as a stream %+v, as a file %+v, %v", s.Info(), whole, err)
		}
	})
}
