package vhd

import (
	"bytes"
	"testing"

	"drover.io/drover/imagestore/oracle"
)

// FuzzOpen: whatever the bytes, there is an image that reads the same in every way, or an error of a known kind.
// Next to the image by hand, testdata/fuzz/FuzzOpen has small ones of qemu-img. With mend, checksums are made right.
func FuzzOpen(f *testing.F) {
	m := makeTiny()
	f.Add(m.signed(), true)
	fixed := append(make([]byte, tinySize), m.end()...)
	be.PutUint32(fixed[tinySize+60:], kindFixed)
	f.Add(fixed, true)
	open := limited(Limits{VirtualSize: 1 << 40})
	f.Fuzz(func(t *testing.T, b []byte, mend bool) {
		if mend {
			m := &tiny{b: bytes.Clone(b)}
			b = m.signed()
		}
		oracle.Sound(t, open, bytes.NewReader(b), int64(len(b)))
	})
}
