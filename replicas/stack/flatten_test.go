package stack

import (
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"os"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// twoLayers are layers that give each other's chunks something, or hide something of them, or neither.
func twoLayers(t *testing.T, d *Disk) (layers []string, e expect) {
	t.Helper()
	e = make(expect)
	const lowerSize, size = 9 << 20, 12 << 20
	lower := filledLayer(t, d, lowerSize, []int64{0, 1, 200, // a chunk that it has alone
		512, 520, // to which the upper one adds
		1024, 1025, // of which that hides something
		1536, 1537, // the same, by zeros
		2048, // which is longer there
	}, 1<<32, e)
	upper := string(api.NewUID())
	w, err := d.Create(context.Background(), upper, size)
	if err != nil {
		t.Fatal(err)
	}
	buf := diskfs.AlignedBuffer(int(blockSize))
	for _, b := range []int64{513, 1024, 2560, 3071} {
		fill(buf, 2<<32+uint64(b))
		if _, err := w.WriteAt(buf, b<<blockBits); err != nil {
			t.Fatal(err)
		}
		e.put(b, 2<<32+uint64(b))
	}
	if err := w.ZeroAt(1536<<blockBits, blockSize); err != nil {
		t.Fatal(err)
	}
	e.put(1536, 0)
	if _, _, err := w.Seal(context.Background()); err != nil {
		t.Fatal(err)
	}
	return []string{lower, upper}, e
}

// A copy of several layers has the digests that belong to what it holds, whatever the layers have of a chunk, and also
// where checksums are wrong or lack.
func TestFlattenedDigests(t *testing.T) {
	t.Parallel()
	ctx, d := context.Background(), newDisk(t)
	layers, e := twoLayers(t, d)
	crcs := d.Join(layer.Dir, layers[0], layer.CRCsFile)
	for _, c := range []struct {
		name   string
		change func()
	}{
		{"whole", func() {}},
		{"a checksum is wrong", func() { flipBit(t, crcs, 200*crcSize) }},
		{"checksums lack", func() {
			if err := os.Remove(crcs); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		c.change()
		uid := string(api.NewUID())
		if err := d.Flatten(ctx, []*Disk{d}, layers, uid, CopyOptions{}); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if err := d.Verify(ctx, uid); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		e.checkLayers(t, d, []string{uid}, 12<<20)
		checksummed(t, d, uid)
	}
}

// Damage never gets a digest that matches it in a copy: where the checksums tell, or a chunk gets a new digest, nothing
// comes of it; a chunk that keeps its digest shows the damage to the next scrub.
func TestFlattenGivesDamageNoDigest(t *testing.T) {
	t.Parallel()
	ctx, d := context.Background(), newDisk(t)
	layers, _ := twoLayers(t, d)
	lower := layers[0]
	// damage changes a block and, where it is so to say unseen, its checksum. Done twice, it is as it was.
	damage := func(b int64, unseen bool) {
		t.Helper()
		flipBit(t, d.Join(layer.Dir, lower, layer.DataFile), b<<blockBits)
		if !unseen {
			return
		}
		h, err := os.OpenFile(d.Join(layer.Dir, lower, layer.DataFile), os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		buf := make([]byte, blockSize)
		if _, err := h.ReadAt(buf, b<<blockBits); err != nil {
			t.Fatal(err)
		}
		c, err := os.OpenFile(d.Join(layer.Dir, lower, layer.CRCsFile), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.WriteAt(binary.LittleEndian.AppendUint32(nil, format.BlockCRC(buf)), b*crcSize); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string) {
		t.Helper()
		uid := string(api.NewUID())
		if err := d.Flatten(ctx, []*Disk{d}, layers, uid, CopyOptions{}); !api.Is(err, api.Corrupt) {
			t.Fatalf("%s: %v", what, err)
		}
		if _, _, err := d.Digest(uid); !api.Is(err, api.NotFound) {
			t.Fatalf("%s: something came of it: %v", what, err)
		}
	}
	for _, b := range []int64{0, 512, 1024, 1025, 1537, 2048} {
		damage(b, false)
		refused("damage of a chunk")
		damage(b, false)
	}
	for _, b := range []int64{512, 1024, 1025, 1537, 2048} {
		damage(b, true)
		refused("damage that checksums do not tell, of a chunk that gets a new digest")
		damage(b, true)
	}
	sums := d.Join(layer.Dir, lower, layer.SumsFile)
	flipBit(t, sums, sumsHeader)
	refused("a digest that is damaged")
	flipBit(t, sums, sumsHeader)
	damage(0, true)
	uid := string(api.NewUID())
	if err := d.Flatten(ctx, []*Disk{d}, layers, uid, CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	bad := []Damage{{Off: 0, Len: chunkSize}}
	if list, err := d.Scrub(ctx, uid, 0); err != nil || !slices.Equal(list, bad) {
		t.Fatalf("the damage has a digest that matches it: %v, %v", list, err)
	}
	if list, err := d.Scrub(ctx, lower, 0); err != nil || !slices.Equal(list, bad) {
		t.Fatalf("scrubbed: %v, %v", list, err)
	}
	refused("damage that is known")
}

// What is hidden can have the checksum of the zeros that hide it: the copy's digest is not that of the layer.
func TestFlattenHidesWithoutChecksums(t *testing.T) {
	t.Parallel()
	ctx, d := context.Background(), newDisk(t)
	var layers []string
	hides := diskfs.AlignedBuffer(int(blockSize))
	binary.LittleEndian.PutUint64(hides, bits.Reverse64(0x11EDC6F41)>>31) // the polynomial: adding it changes no checksum
	if format.BlockCRC(hides) != format.BlockCRC(make([]byte, blockSize)) {
		t.Fatal("its checksum is not that of zeros")
	}
	for i := range 2 {
		uid := string(api.NewUID())
		w, err := d.Create(ctx, uid, chunkSize)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			data := diskfs.AlignedBuffer(int(blockSize))
			fill(data, 7)
			if _, err = w.WriteAt(data, 0); err == nil {
				_, err = w.WriteAt(hides, blockSize)
			}
		} else {
			err = w.ZeroAt(blockSize, blockSize)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.Seal(ctx); err != nil {
			t.Fatal(err)
		}
		layers = append(layers, uid)
	}
	uid := string(api.NewUID())
	if err := errors.Join(d.Flatten(ctx, []*Disk{d}, layers, uid, CopyOptions{}), d.Verify(ctx, uid)); err != nil {
		t.Fatal(err)
	}
}
