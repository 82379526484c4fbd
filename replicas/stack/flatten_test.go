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
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// twoLayers makes a lower and an upper layer. In a chunk of the lower layer, the upper layer adds or hides blocks, or
// does neither.
func twoLayers(t *testing.T, d *Disk) (layers []string, e expect) {
	t.Helper()
	e = make(expect)
	const lowerSize, size = 9 << 20, 12 << 20
	lower := filledLayer(t, d, lowerSize, []int64{0, 1, 200, // a chunk of the lower layer alone
		512, 520, // the upper layer adds a block
		1024, 1025, // the upper layer hides a block
		1536, 1537, // zeros of the upper layer hide a block
		2048, // the chunk is longer in the upper layer
	}, 1<<32, e)
	upper := string(api.NewUID())
	w, err := d.Create(context.Background(), upper, size)
	if err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(blockSize))
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

// TestFlattenedDigests: a copy of several layers has the digests of its content, whatever the layers have of a chunk,
// and also if checksums are wrong or missing.
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

// TestFlattenGivesDamageNoDigest: damage never gets a matching digest in a copy. Flatten fails if checksums show the
// damage, or if the damaged chunk gets a new digest. If the chunk keeps the digest, the next scrub finds the damage.
func TestFlattenGivesDamageNoDigest(t *testing.T) {
	t.Parallel()
	ctx, d := context.Background(), newDisk(t)
	layers, _ := twoLayers(t, d)
	lower := layers[0]
	// damage changes a block and, if unseen, the block's checksum. A second call restores both.
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

// TestFlattenHidesWithoutChecksums: a hidden block can have the checksum of the zeros above. The copy still does not
// take the layer's digest.
func TestFlattenHidesWithoutChecksums(t *testing.T) {
	t.Parallel()
	ctx, d := context.Background(), newDisk(t)
	var layers []string
	hides := block.AlignedBuffer(int(blockSize))
	binary.LittleEndian.PutUint64(hides, bits.Reverse64(0x11EDC6F41)>>31) // adding the polynomial changes no checksum
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
			data := block.AlignedBuffer(int(blockSize))
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
