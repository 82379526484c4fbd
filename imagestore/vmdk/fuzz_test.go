package vmdk

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/imagestore/oracle"
)

// FuzzOpen: whatever the bytes, there is an image that reads the same in every way, or an error of a known kind.
// It starts from images by hand and small ones of qemu-img.
func FuzzOpen(f *testing.F) {
	for _, compressed := range []bool{false, true} {
		m := makeTiny(compressed)
		f.Add(m.b)
		f.Add(withFooter(bytes.Clone(m.b)))
	}
	for _, o := range []string{"subformat=monolithicSparse", "subformat=streamOptimized"} {
		path := filepath.Join(f.TempDir(), "i.vmdk")
		oracle.Create(f, "vmdk", o, path, 100<<10)
		oracle.Write(f, "vmdk", path, "write -P 5 0 64k")
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	open := limited(Limits{VirtualSize: 1 << 40})
	f.Fuzz(func(t *testing.T, b []byte) {
		oracle.Sound(t, open, bytes.NewReader(b), int64(len(b)))
		// While it arrives it reads the same, or what is wrong shows later.
		im, err := Open(bytes.NewReader(b), int64(len(b)), Limits{VirtualSize: 32 << 20})
		if err != nil || im.Info().Redundant {
			return
		}
		whole, err := oracle.Content(im)
		lazy, lazyErr := Open(bytes.NewReader(b), int64(len(b)), Limits{VirtualSize: 32 << 20, Stream: true})
		if lazyErr != nil {
			t.Fatalf("while it arrives: %v", lazyErr)
		}
		again, lazyErr := oracle.Content(lazy)
		if (lazyErr == nil) != (err == nil) {
			t.Fatalf("while it arrives: %v, else %v", lazyErr, err)
		}
		if err == nil && (!bytes.Equal(again.B, whole.B) || im.Info() != lazy.Info()) {
			t.Fatal("reads otherwise while it arrives")
		}
	})
}
