package stack

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// TestLayerContract goes through the promises of block.Layers.
func TestLayerContract(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	d := newDisk(t)
	uid := string(api.NewUID())
	if _, err := d.Open(uid); !api.Is(err, api.NotFound) {
		t.Fatalf("open: %v", err)
	}
	if _, err := d.Create(ctx, "../../etc", 1<<20); !api.Is(err, api.Invalid) {
		t.Fatalf("create outside of the disk: %v", err)
	}
	w, err := d.Create(ctx, uid, 1<<20+1) // rounded up
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create(ctx, uid, 1<<20); !api.Is(err, api.Busy) {
		t.Fatalf("a second writer: %v", err)
	}
	if err := d.Collect(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt(make([]byte, 10), 1<<20+blockSize-5); !api.Is(err, api.OutOfRange) {
		t.Fatalf("write past the end: %v", err)
	}
	if _, err := w.WriteAt([]byte("odd bytes at an odd place"), 4090); err != nil {
		t.Fatal(err)
	}
	if err := w.ZeroAt(100<<10+1, 20<<10); err != nil {
		t.Fatal(err)
	}
	if err := d.PutImage(block.Image{UID: string(api.NewUID()), Layers: []string{uid}}); !api.Is(err, api.NotFound) {
		t.Fatalf("image of a layer that is not finished: %v", err)
	}
	root, _, err := w.Seal(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt([]byte("x"), 0); err == nil {
		t.Fatal("a sealed layer was written")
	}
	if err := w.Abort(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create(ctx, uid, 1<<20); !api.Is(err, api.Exists) {
		t.Fatalf("create of a finished layer: %v", err)
	}
	if got, allocated, err := d.Digest(uid); err != nil || got != root || allocated <= 0 {
		t.Fatalf("digest %s, %d, %v", got, allocated, err)
	}
	if st, err := os.Stat(d.Join(layer.Dir, uid, layer.DataFile)); err != nil || st.Mode().Perm() != 0o444 {
		t.Fatalf("mode %v, %v", st.Mode(), err)
	}
	src, err := d.Open(uid)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if src.Size() != 1<<20+blockSize {
		t.Fatalf("size %d", src.Size())
	}
	img := block.Image{UID: string(api.NewUID()), Name: "i", Layers: []string{uid}}
	if err := d.PutImage(img); err != nil {
		t.Fatal(err)
	}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 2 << 20, Layers: []string{uid}}
	small := spec
	small.Size = 1 << 20
	if err := d.CreateReplica(ctx, small); !api.Is(err, api.Invalid) {
		t.Fatalf("volume smaller than its image: %v", err)
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	other := spec
	other.VolumeUID = string(api.NewUID())
	if err := d.CreateReplica(ctx, other); !api.Is(err, api.Exists) {
		t.Fatalf("the same uid for another volume: %v", err)
	}
	if err := d.RemoveImage(img.UID); !api.Is(err, api.InUse) {
		t.Fatalf("remove image in use: %v", err)
	}
	if err := d.RemoveReplica(spec.UID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.Digest(uid); err != nil {
		t.Fatalf("the image's layer went with the replica: %v", err)
	}
	for range 2 {
		if err := d.RemoveImage(img.UID); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := d.Digest(uid); !api.Is(err, api.NotFound) {
		t.Fatalf("the layer is still there: %v", err)
	}
	b := make([]byte, 25)
	if _, err := src.ReadAt(b, 4090); err != nil || string(b) != "odd bytes at an odd place" {
		t.Fatalf("an open layer is not readable after its name went: %q, %v", b, err)
	}
}

// TestDigestIsOfContent: the same content has the same digest, however a writer wrote the content. Other content, or
// another map, has another digest.
func TestDigestIsOfContent(t *testing.T) {
	ctx := context.Background()
	d := newDisk(t)
	const size = int64(5) << 20
	rng := rand.New(rand.NewPCG(3, 4))
	content := make([]byte, size)
	randomBytes(rng, content[1<<20:4<<20])
	clear(content[2<<20 : 2<<20+5*blockSize])
	digest := func(fill func(w block.LayerWriter) error) string {
		t.Helper()
		w, err := d.Create(ctx, string(api.NewUID()), size)
		if err != nil {
			t.Fatal(err)
		}
		if err := fill(w); err != nil {
			t.Fatal(err)
		}
		root, _, err := w.Seal(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return root
	}
	write := func(w block.LayerWriter, off, n int64) error {
		_, err := w.WriteAt(content[off:off+n], off)
		return err
	}
	whole := digest(func(w block.LayerWriter) error { return write(w, 0, size) })
	parts := digest(func(w block.LayerWriter) error {
		for off := int64(0); off < size; off += 96 << 10 {
			if err := write(w, off, min(96<<10, size-off)); err != nil {
				return err
			}
		}
		return nil
	})
	twice := digest(func(w block.LayerWriter) error {
		junk := bytes.Repeat([]byte("junk"), int(size/4))
		if _, err := w.WriteAt(junk, 0); err != nil {
			return err
		}
		return write(w, 0, size)
	})
	if whole != parts || whole != twice {
		t.Errorf("one content, digests %s, %s, %s", whole, parts, twice)
	}
	grown := digest(func(w block.LayerWriter) error { // with resizes between the writes
		junk := bytes.Repeat([]byte("junk"), int(size/4))
		if _, err := w.WriteAt(junk, 0); err != nil {
			return err
		}
		if err := w.Resize(1<<20 + 777); err != nil {
			return err
		}
		for off := int64(0); off < size; off += 1 << 20 {
			if err := errors.Join(w.Resize(off+3<<20), write(w, off, 1<<20)); err != nil {
				return err
			}
		}
		if _, err := w.WriteAt(junk, size); err == nil {
			return errors.New("written behind the end")
		}
		return w.Resize(size)
	})
	if grown != whole {
		t.Errorf("one content, digest %s of one size, %s after others", whole, grown)
	}
	holes := digest(func(w block.LayerWriter) error { return write(w, 1<<20, 3<<20) })
	content[3<<20]++
	other := digest(func(w block.LayerWriter) error { return write(w, 0, size) })
	if holes == whole || other == whole {
		t.Error("different layers, one digest")
	}
}

// TestVerifyFindsDamage: Verify reports a flipped bit in each file of a layer.
func TestVerifyFindsDamage(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	d := newDisk(t)
	model := make([]byte, 16<<20)
	uid := makeLayer(t, d, rand.New(rand.NewPCG(5, 6)), 16<<20, model)
	first := int64(bytes.IndexFunc(model, func(r rune) bool { return r != 0 }))
	for name, at := range map[string]int64{layer.DataFile: first, layer.MapFile: format.MapHeader + format.MapEntry + 9, layer.SumsFile: sumsHeader + 1,
		layer.LayerFile: 40} {
		flip := func() {
			f, err := os.OpenFile(d.Join(layer.Dir, uid, name), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			var b [1]byte
			if _, err := f.ReadAt(b[:], at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 4
			if _, err := f.WriteAt(b[:], at); err != nil {
				t.Fatal(err)
			}
			if err := f.Sync(); err != nil {
				t.Fatal(err)
			}
		}
		flip()
		if err := d.Verify(ctx, uid); !api.Is(err, api.Corrupt) {
			t.Errorf("%s damaged: %v", name, err)
		}
		flip()
	}
	if err := d.Verify(ctx, uid); err != nil {
		t.Fatal(err)
	}
}
