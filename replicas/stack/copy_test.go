package stack

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// second makes another disk of the node, with c's disk as a source.
func (c *chained) second() *Disk {
	d := newDisk(c.t)
	fromDisk(d, c.d)
	return d
}

// TestCloneOnAnotherDisk: a clone on another disk reads its layers from the source's disk until the clone has verified
// copies of all. Until then the source can be deleted, but the pin keeps the layers. Afterwards the clone needs neither
// the source, nor the snapshot, nor the source's disk.
func TestCloneOnAnotherDisk(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	c := newChained(t)
	ctx := context.Background()
	snaps := c.scribble(4)
	c.mergeAll() // merges nothing, since all layers are needed, but finishes the older layers
	snaps = append(snaps, c.scribble(2)...)
	at := snaps[4]
	b := c.second()
	size := int64(len(c.model))
	uid := string(api.NewUID())
	p, err := c.d.Pin(ctx, Pin{UID: uid, For: "clone", Disk: b.UID()}, c.uid, at)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.d.Pin(ctx, Pin{UID: uid}, c.uid, snaps[0]); err != nil || !slices.Equal(again.Layers, p.Layers) {
		t.Fatalf("a pin that is there: %+v, %v", again, err)
	}
	spec := Spec{UID: uid, Volume: "clone", VolumeUID: string(api.NewUID()), Size: size, Layers: p.Layers}
	if err := b.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	model := c.snaps[at]
	compareView(t, b, uid, model)
	if err := c.d.RemoveReplica(c.uid); err != nil {
		t.Fatal(err)
	}
	if err := c.d.Collect(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if n := c.layersOnDisk(); n != len(p.Layers) {
		t.Fatalf("%d layers stay, not the %d that are pinned", n, len(p.Layers))
	}
	compareView(t, b, uid, model)
	r, err := b.OpenReplica(ctx, uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Adopt(ctx, 1, 1, []string{uid}); err != nil {
		t.Fatal(err)
	}
	for i, l := range p.Layers {
		lacks, err := b.Lacking(uid)
		if err != nil || len(lacks) != len(p.Layers)-i || lacks[0] != l {
			t.Fatalf("lacks %v, %v", lacks, err)
		}
		last := int64(-1)
		err = b.CopyLayer(ctx, c.d, l, CopyOptions{Progress: func(done, total int64) {
			if done < last || done > total {
				t.Errorf("progress %d after %d of %d", done, last, total)
			}
			last = done
		}})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Verify(ctx, l); err != nil {
			t.Fatal(err)
		}
		if err := r.Localize(ctx); err != nil {
			t.Fatal(err)
		}
		compareAll(t, c.loop, r, model)
	}
	if r.Hydrates() {
		t.Fatal("still reads the other disk")
	}
	if err := c.d.Unpin(uid); err != nil {
		t.Fatal(err)
	}
	if n := c.layersOnDisk(); n != 0 {
		t.Fatalf("%d layers are left on the source's disk", n)
	}
	compareAll(t, c.loop, r, model)
}

// TestFlattenContinuesAndDetectsDamage: a flatten continues with the chunks that an ended process copied. A flatten of
// a damaged source fails and leaves no layer.
func TestFlattenContinuesAndDetectsDamage(t *testing.T) {
	t.Parallel()
	c := newChained(t)
	snaps := c.scribble(3)
	b := c.second()
	p, err := c.d.Pin(context.Background(), Pin{UID: string(api.NewUID())}, c.uid, snaps[2])
	if err != nil {
		t.Fatal(err)
	}
	uid := string(api.NewUID())
	stop := errors.New("killed")
	first := int64(0)
	ctx, cancel := context.WithCancelCause(context.Background())
	err = b.Flatten(ctx, []*Disk{c.d}, p.Layers, uid, CopyOptions{Workers: 1, Progress: func(done, total int64) {
		if first = done; done > total/2 {
			cancel(stop)
		}
	}})
	if !errors.Is(err, stop) {
		t.Fatalf("cancelled: %v", err)
	}
	ctx = context.Background()
	began := int64(-1)
	if err := b.Flatten(ctx, []*Disk{c.d}, p.Layers, uid, CopyOptions{Progress: func(done, _ int64) {
		if began < 0 {
			began = done
		}
	}}); err != nil {
		t.Fatal(err)
	}
	if began < first-2*chunkSize {
		t.Errorf("went on at %d of the %d that were there", began, first)
	}
	if err := b.Verify(ctx, uid); err != nil {
		t.Fatal(err)
	}
	src, err := b.OpenStack([]string{uid}, int64(len(c.model)))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := make([]byte, len(c.model))
	if err := block.Copy(ctx, arraySink(got), src, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, c.snaps[snaps[2]]) {
		t.Fatal("the copy differs")
	}

	l := p.Layers[0]
	if err := c.d.Finish(ctx, l); err != nil {
		t.Fatal(err)
	}
	e, err := mustOpen(t, c.d, l).Next(0)
	for err == nil && e.Kind != block.Data {
		e, err = mustOpen(t, c.d, l).Next(e.End())
	}
	if err != nil {
		t.Fatal(err)
	}
	name := c.d.Join(layer.Dir, l, layer.DataFile)
	if err := os.Chmod(name, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var was [1]byte
	if _, err := f.ReadAt(was[:], e.Off); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{was[0] ^ 1}, e.Off); err != nil {
		t.Fatal(err)
	}
	if err := b.CopyLayer(ctx, c.d, l, CopyOptions{}); !api.Is(err, api.Corrupt) {
		t.Fatalf("a damaged layer: %v", err)
	}
	if _, _, err := b.Digest(l); !api.Is(err, api.NotFound) {
		t.Fatalf("something came of it: %v", err)
	}
	if err := b.Flatten(ctx, []*Disk{c.d}, p.Layers[:1], string(api.NewUID()), CopyOptions{}); !api.Is(err, api.Corrupt) {
		t.Fatalf("a damaged layer, copied: %v", err)
	}
}

func mustOpen(t *testing.T, d *Disk, layer string) block.Source {
	t.Helper()
	s, err := d.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// TestPinAndSpace: pinned layers are not merged, and Space counts pinned layers as shared.
func TestPinAndSpace(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	c := newChained(t)
	ctx := context.Background()
	snaps := c.scribble(4)
	uid := string(api.NewUID())
	if _, err := c.d.Pin(ctx, Pin{UID: uid}, c.uid, snaps[3]); err != nil {
		t.Fatal(err)
	}
	used, shared, err := c.d.Space(c.uid)
	if err != nil || shared == 0 || shared > used {
		t.Fatalf("used %d, shared %d, %v", used, shared, err)
	}
	for _, s := range snaps[:3] {
		if err := c.d.DropSnapshot(c.uid, s); err != nil {
			t.Fatal(err)
		}
		delete(c.snaps, s)
	}
	before := c.layersOnDisk()
	c.mergeAll()
	if n := c.layersOnDisk(); n != before {
		t.Fatalf("%d of %d layers after a merge of pinned ones", n, before)
	}
	if pins, err := c.d.Pins(); err != nil || len(pins) != 1 || pins[0].UID != uid {
		t.Fatalf("pins %v, %v", pins, err)
	}
	if err := c.d.Unpin(uid); err != nil {
		t.Fatal(err)
	}
	if _, shared, err = c.d.Space(c.uid); err != nil || shared != 0 {
		t.Fatalf("shared %d, %v", shared, err)
	}
	c.mergeAll()
	if n := c.layersOnDisk(); n >= before {
		t.Fatalf("%d layers, as before the merge", n)
	}
	c.check()
}
