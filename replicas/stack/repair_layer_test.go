package stack

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// TestRepairRestoresEveryFileOfALayer: a repair restores a layer from another copy after any damage of the files, and
// open readers of the layer continue.
func TestRepairRestoresEveryFileOfALayer(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	const size = 70 << 20
	model := make([]byte, size)
	good := newDisk(t)
	uid := makeLayer(t, good, rand.New(rand.NewPCG(8, 9)), size, model)
	root, _, err := good.Digest(uid)
	if err != nil {
		t.Fatal(err)
	}
	at := int64(bytes.IndexFunc(model, func(r rune) bool { return r != 0 }))
	flip := func(t *testing.T, name string, at int64) {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
	for name, damage := range map[string]func(t *testing.T, dir string){
		"a bit":      func(t *testing.T, dir string) { flip(t, dir+"/data", at) },
		"cut":        func(_ *testing.T, dir string) { _ = os.Truncate(dir+"/data", 3<<20+77) },
		"empty":      func(_ *testing.T, dir string) { _ = os.Truncate(dir+"/data", 0) },
		"longer":     func(_ *testing.T, dir string) { _ = os.Truncate(dir+"/data", size+4096) },
		"no data":    func(_ *testing.T, dir string) { _ = os.Remove(dir + "/data") },
		"no map":     func(_ *testing.T, dir string) { _ = os.Remove(dir + "/map") },
		"map":        func(t *testing.T, dir string) { flip(t, dir+"/map", format.MapHeader+format.MapEntry+9) },
		"sums":       func(t *testing.T, dir string) { flip(t, dir+"/sums", sumsHeader+1) },
		"no sums":    func(_ *testing.T, dir string) { _ = os.Remove(dir + "/sums") },
		"record":     func(t *testing.T, dir string) { flip(t, dir+"/layer.json", 40) },
		"no record":  func(_ *testing.T, dir string) { _ = os.Remove(dir + "/layer.json") },
		"everything": func(_ *testing.T, dir string) { _ = os.RemoveAll(dir) },
		"nothing":    func(*testing.T, string) {},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t)
			src, err := good.Open(uid)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			w, err := d.Create(ctx, uid, size)
			if err != nil {
				t.Fatal(err)
			}
			if err := block.Copy(ctx, w, src, block.CopyOptions{}); err != nil {
				t.Fatal(err)
			}
			if got, _, err := w.Seal(ctx); err != nil || got != root {
				t.Fatal(got, err)
			}
			if err := d.PutImage(block.Image{UID: uid, Name: "golden", Layers: []string{uid}}); err != nil {
				t.Fatal(err)
			}
			open, err := d.Open(uid)
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			damage(t, filepath.Join(d.Path(), layer.Dir, uid))
			if err := d.RepairLayer(ctx, uid, root, src); err != nil {
				t.Fatal(err)
			}
			if err := d.Verify(ctx, uid); err != nil {
				t.Error(err)
			}
			if mark, err := d.Touched(uid); mark != "" || err != nil {
				t.Errorf("still touched: %s %v", mark, err)
			}
			again, err := d.Open(uid)
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			for who, r := range map[string]block.Source{"who had it open": open, "who opens it": again} {
				got := make([]byte, size)
				if n, err := r.ReadAt(got, 0); n < size {
					t.Fatalf("%s: %d bytes, %v", who, n, err)
				}
				if !bytes.Equal(got, model) {
					t.Errorf("%s reads something else", who)
				}
				for off := int64(0); off < size; {
					e, err := r.Next(off)
					want, werr := src.Next(off)
					if err != nil || werr != nil || e != want {
						t.Fatalf("%s: at %d %+v %v, want %+v", who, off, e, err, want)
					}
					off = e.End()
				}
			}
		})
	}

	// A source with other content changes nothing.
	d := newDisk(t)
	mine := makeLayer(t, d, rand.New(rand.NewPCG(1, 1)), size, make([]byte, size))
	was, _, _ := d.Digest(mine)
	src, err := good.Open(uid)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if err := d.RepairLayer(ctx, mine, was, src); !api.Is(err, api.Corrupt) {
		t.Errorf("made of something else: %v", err)
	}
	if err := d.Verify(ctx, mine); err != nil {
		t.Error(err)
	}
}
