package stack

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// flipBit changes a bit of a file.
func flipBit(t testing.TB, name string, at int64) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

// until waits for a change in the background.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Minute); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

// TestReadsAreCompared: damage which no scrub has found is not served, neither by a volume, nor by a view, nor by a
// reader of the layer. The disk records and reports the damage. After a repair, the next read removes the record.
func TestReadsAreCompared(t *testing.T) {
	t.Parallel()
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	e := make(expect)
	const size = 16 << 20
	layerUID := filledLayer(t, d, size, []int64{0, 1, 2, 600, 1500, 1501, 4000}, 1<<32, e)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layerUID}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	told := make(chan string, 16)
	d.OnDamage(func(uid string) { told <- uid })
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	data, crcs := d.Join(layer.Dir, layerUID, layer.DataFile), d.Join(layer.Dir, layerUID, layer.CRCsFile)
	read := func(off, n int64) ([]byte, error) {
		buf := block.AlignedBuffer(int(n))
		return buf, issue(loop, r, block.OpRead, off, n, buf, false)
	}
	whole, err := read(0, size)
	if err != nil {
		t.Fatal(err)
	}
	other, err := d.OpenReplica(ctx, cloneOf(t, d, spec), loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	const at = 600 << blockBits
	bad := []Damage{{Off: 2 << 20, Len: 2 << 20}}
	flipBit(t, data, at+4095)
	for _, n := range []int64{blockSize, 64 << 10, 4 << 20} {
		if _, err := read(at, n); !errors.Is(err, unix.EIO) {
			t.Fatalf("damage was served: %v", err)
		}
	}
	if uid := <-told; uid != layerUID {
		t.Fatalf("damage of %s was told, not of %s", uid, layerUID)
	}
	if list := d.Damaged(layerUID); !slices.Equal(list, bad) {
		t.Fatalf("recorded: %v", list)
	}
	// Other replicas with the layer open know the damage.
	buf := block.AlignedBuffer(int(blockSize))
	if err := issue(loop, other, block.OpRead, at, blockSize, buf, false); !errors.Is(err, unix.EIO) {
		t.Fatalf("damage was served: %v", err)
	}
	if got, err := read(1500<<blockBits, 8<<20); err != nil || !bytes.Equal(got, whole[1500<<blockBits:][:8<<20]) {
		t.Fatalf("what is whole is not read: %v", err)
	}
	if did, err := r.Merge(ctx, MergeOptions{}); did || err != nil {
		t.Fatal(did, err)
	}
	_ = d.Close()             // waits for the record of the damage
	flipBit(t, data, at+4095) // repairs the block
	if got, err := read(at, 64<<10); err != nil || !bytes.Equal(got, whole[at:][:64<<10]) {
		t.Fatalf("what was repaired is not read: %v", err)
	}
	<-told
	if list := d.Damaged(layerUID); len(list) > 0 {
		t.Fatalf("still recorded: %v", list)
	}
	// A damaged checksum does no harm.
	flipBit(t, crcs, 600*crcSize)
	r.forgetAll(t)
	if got, err := read(at, 64<<10); err != nil || !bytes.Equal(got, whole[at:][:64<<10]) {
		t.Fatalf("a damaged checksum: %v", err)
	}
	if list, err := d.Scrub(ctx, layerUID, 0); err != nil || len(list) > 0 {
		t.Fatal(list, err)
	}
	h, err := os.ReadFile(crcs)
	if err != nil || !bytes.Equal(h[600*crcSize:][:crcSize], format.AppendCRCs(nil, whole[at:][:blockSize])) {
		t.Fatalf("a scrub does not put checksums right: %v", err)
	}
	// Views and readers of the layer.
	src, err := d.Open(layerUID)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := make([]byte, size)
	for _, c := range [][2]int64{{0, size}, {at - 100, 300}, {at + 1, 4094}, {at + 100, 8192}, {1<<20 + 5, 3 << 20}} {
		if _, err := src.ReadAt(got[:c[1]], c[0]); err != nil || !bytes.Equal(got[:c[1]], whole[c[0]:][:c[1]]) {
			t.Fatalf("%v: %v", c, err)
		}
	}
	flipBit(t, data, at+7)
	for _, c := range [][2]int64{{0, size}, {at - 100, 300}, {at + 100, 1}, {at + 100, 8192}} {
		if _, err := src.ReadAt(got[:c[1]], c[0]); !api.Is(err, api.Corrupt) {
			t.Fatalf("%v: damage was served: %v", c, err)
		}
	}
	if _, err := src.ReadAt(got[:8192], at+4096); err != nil {
		t.Fatal(err)
	}
	<-told
	_ = d.Close()
	flipBit(t, data, at+7)
	if _, err := read(at, blockSize); err != nil {
		t.Fatal(err)
	}
	<-told
}

// cloneOf makes a second replica on the same layers.
func cloneOf(t *testing.T, d *Disk, spec Spec) string {
	t.Helper()
	spec.UID, spec.VolumeUID, spec.Volume = string(api.NewUID()), string(api.NewUID()), "clone"
	if err := d.CreateReplica(context.Background(), spec); err != nil {
		t.Fatal(err)
	}
	return spec.UID
}

// forgetAll empties the cache of checksums.
func (r *Replica) forgetAll(t *testing.T) {
	t.Helper()
	if err := r.onLoop(func() {
		for _, page := range r.crcs.pages {
			page.forget()
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestReadsAreComparedOnceFinished: reads of an open volume compare a cut layer as soon as the layer has digests, and
// also a layer from a version without checksums.
func TestReadsAreComparedOnceFinished(t *testing.T) {
	t.Parallel()
	ctx, c := context.Background(), newChained(t)
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := r.Adopt(ctx, 100, 1, []string{c.uid}); err != nil {
		t.Fatal(err)
	}
	buf, got := block.AlignedBuffer(1<<20), block.AlignedBuffer(1<<20)
	randomBytes(c.rng, buf)
	mustIssue(t, c.loop, r, block.OpWrite, 3<<20, 1<<20, buf)
	s := Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Name: "one", Created: time.Now()}
	if err := r.Cut(ctx, s); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, c.loop, r, block.OpRead, 3<<20, 1<<20, got)
	if err := c.d.Finish(ctx, s.Layer); err != nil {
		t.Fatal(err)
	}
	dir := c.d.Join(layer.Dir, s.Layer)
	damaged := func() bool {
		t.Helper()
		flipBit(t, dir+"/"+layer.DataFile, 3<<20+99)
		err := issue(c.loop, r, block.OpRead, 3<<20, 1<<20, got, false)
		flipBit(t, dir+"/"+layer.DataFile, 3<<20+99)
		return errors.Is(err, unix.EIO)
	}
	if !damaged() {
		t.Fatal("damage was served")
	}
	until(t, "the record goes", func() bool {
		mustIssue(t, c.loop, r, block.OpRead, 3<<20, 1<<20, got)
		return len(c.d.Damaged(s.Layer)) == 0
	})
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir + "/" + layer.CRCsFile); err != nil {
		t.Fatal(err)
	}
	if r, err = c.d.OpenReplica(ctx, c.uid, c.loop); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, c.loop, r, block.OpRead, 3<<20, 1<<20, got)
	if list, err := c.d.ToFinish(); err != nil || !slices.Equal(list, []string{s.Layer}) {
		t.Fatal(list, err)
	}
	if err := c.d.Finish(ctx, s.Layer); err != nil {
		t.Fatal(err)
	}
	if list, err := c.d.ToFinish(); err != nil || len(list) > 0 {
		t.Fatal(list, err)
	}
	mustIssue(t, c.loop, r, block.OpRead, 3<<20, 1<<20, got)
	if !bytes.Equal(got, buf) || !damaged() {
		t.Fatal("damage was served")
	}
}

// TestChecksumCacheIsBounded: the cache of checksums keeps to the bound.
func TestChecksumCacheIsBounded(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	const size = 1 << 30
	w, err := d.Create(ctx, string(api.NewUID()), size)
	if err != nil {
		t.Fatal(err)
	}
	block1 := bytes.Repeat([]byte{7}, int(blockSize))
	for off := int64(0); off < size; off += 4 << 20 {
		if _, err := w.WriteAt(block1, off); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := w.Seal(ctx); err != nil {
		t.Fatal(err)
	}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{w.(*layer.Writer).UID}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	before := crcPagesUsed.Load()
	crcPagesUsed.Add(crcPagesAll) // other replicas have all pages
	buf := block.AlignedBuffer(int(blockSize))
	for range 2 {
		for off := int64(0); off < size; off += 4 << 20 {
			mustIssue(t, loop, r, block.OpRead, off, blockSize, buf)
			if !bytes.Equal(buf, block1) {
				t.Fatal("another block was read")
			}
		}
	}
	if n := len(r.crcs.pages); n != crcPagesOwn {
		t.Errorf("%d pages", n)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	crcPagesUsed.Add(-crcPagesAll)
	if now := crcPagesUsed.Load(); now != before {
		t.Errorf("%d pages are in the books, %d before", now, before)
	}
}
