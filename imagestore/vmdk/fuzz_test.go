package vmdk

import (
	"bytes"
	"testing"

	"drover.io/drover/imagestore/oracle"
)

// FuzzOpen: whatever the bytes, there is an image that reads the same in every way, or an error of a known kind.
// Next to the images by hand, testdata/fuzz/FuzzOpen has small ones of qemu-img.
func FuzzOpen(f *testing.F) {
	for _, compressed := range []bool{false, true} {
		m := makeTiny(compressed)
		f.Add(m.b)
		f.Add(withFooter(bytes.Clone(m.b)))
	}
	open := limited(Limits{VirtualSize: 1 << 40})
	f.Fuzz(func(t *testing.T, b []byte) {
		oracle.Sound(t, open, bytes.NewReader(b), int64(len(b)))
	})
}
