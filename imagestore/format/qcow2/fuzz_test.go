package qcow2

import (
	"bytes"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/format/oracle"
)

// FuzzOpen: for arbitrary bytes, Open returns an image which reads the same in every way, or an error of a known kind.
// testdata/fuzz/FuzzOpen adds small images of qemu-img to the handmade images.
func FuzzOpen(f *testing.F) {
	for _, extended := range []bool{false, true} {
		for _, z := range []bool{false, true} {
			bits := 9
			if extended {
				bits = 14
			}
			m := makeTiny(f, bits, z, extended)
			f.Add(m.b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		known := func(err error) {
			t.Helper()
			switch api.KindOf(err) {
			case api.Corrupt, api.Unsupported, api.OutOfRange, api.Invalid:
			default:
				t.Fatalf("error %v of kind %v", err, api.KindOf(err))
			}
		}
		lim := Limits{VirtualSize: 32 << 20}
		im, err := Open(bytes.NewReader(b), int64(len(b)), lim)
		if _, headErr := ReadHeader(b[:min(len(b), HeadSize)], lim); headErr != nil {
			known(headErr)
			if err == nil {
				t.Fatalf("the header alone is refused: %v", headErr)
			}
		}
		if err != nil {
			known(err)
			return
		}
		whole, err := oracle.Content(im)
		if err != nil {
			known(err)
		}
		// While the file arrives, the image reads the same, or reports damage later. The size of the file may be
		// unknown.
		for _, size := range []int64{int64(len(b)), -1} {
			lazy, lazyErr := Open(bytes.NewReader(b), size, Limits{VirtualSize: lim.VirtualSize, Lazy: true})
			if lazyErr != nil {
				t.Fatalf("while it arrives: %v", lazyErr)
			}
			again, lazyErr := oracle.Content(lazy)
			if (lazyErr == nil) != (err == nil) {
				t.Fatalf("while it arrives: %v, else %v", lazyErr, err)
			}
			if err == nil && !bytes.Equal(again.B, whole.B) {
				t.Fatal("reads otherwise while it arrives")
			}
		}
		for _, step := range []int{len(b), 1000} {
			p := make([]byte, step)
			for off := int64(0); off < min(im.Size(), 1<<20); off += int64(step) {
				n, readErr := im.ReadAt(p, off)
				if off+int64(n) < im.Size() && n < step {
					known(readErr)
					if err == nil {
						t.Fatalf("reading %d bytes at %d: %v, but not in larger pieces", step, off, readErr)
					}
					break
				}
				if err == nil && !bytes.Equal(p[:n], whole.B[off:off+int64(n)]) {
					t.Fatalf("reading %d bytes at %d differs", step, off)
				}
			}
		}
	})
}
