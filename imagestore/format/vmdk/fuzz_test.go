package vmdk

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/format/oracle"
)

// FuzzOpen: for arbitrary bytes, Open returns an image which reads the same in every way, or an error of a known kind.
// The seeds are handmade images and small images of qemu-img.
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
		// While the file arrives, the image reads the same, or reports damage later.
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

// FuzzDescriptor: with any descriptor text, an accepted image is a disk in this file alone, and a refused image gets a
// message of a single line.
func FuzzDescriptor(f *testing.F) {
	sparse := fmt.Sprintf(tinyText, "monolithicSparse")
	for _, s := range []string{sparse, fmt.Sprintf(tinyText, "streamOptimized"), fmt.Sprintf(tinyText, "twoGbMaxExtentFlat"),
		strings.ReplaceAll(sparse, "parentCID=ffffffff", "parentCID=12345678\nparentFileNameHint=\"base.vmdk\""),
		strings.ReplaceAll(sparse, "tiny.vmdk", "/etc/passwd"), strings.ReplaceAll(sparse, "RW 4114", "NOACCESS 4114"),
		sparse + "RW 1 FLAT \"b\" 0\nRDONLY 1 ZERO\n", strings.ReplaceAll(sparse, "\n", "\r\n"), "RW", "=", "createType=\"", ""} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		told := func(err error) {
			t.Helper()
			if api.KindOf(err) == api.Other || len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\r\n\x00") {
				t.Fatalf("not a message: %q (kind %v)", err, api.KindOf(err))
			}
		}
		if alone := append([]byte(magicText+"\n"), text...); refuseOtherFiles(alone) == nil {
			t.Fatal("a lone descriptor is taken for a disk")
		} else {
			told(refuseOtherFiles(alone))
		}
		m := makeTiny(false)
		n := (len(text) + sector - 1) / sector
		le.PutUint64(m.b[28:], uint64(len(m.b)/sector))
		le.PutUint64(m.b[36:], uint64(n))
		m.b = append(append(m.b, text...), make([]byte, n*sector-len(text))...)
		im, err := Open(bytes.NewReader(m.b), int64(len(m.b)), Limits{})
		if err != nil {
			told(err)
			return
		}
		d := parseText(text)
		if k := strings.ToLower(im.Info().CreateType); k != "monolithicsparse" && k != "streamoptimized" ||
			len(d.extents) != 1 || d.extents[0].kind != "SPARSE" || strings.ContainsAny(d.extents[0].file, `/\`) || d.parent != "" {
			t.Fatalf("this is a disk: %+v", d)
		}
		if _, err := oracle.Content(im); err != nil {
			t.Fatal(err)
		}
	})
}
