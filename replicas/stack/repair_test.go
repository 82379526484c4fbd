package stack

import (
	"context"
	"os"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// TestRepair: Repair restores a damaged chunk from the data of another replica, also if other blocks of the layer are
// hidden there. Data without the right content changes nothing.
func TestRepair(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	const size = 16 << 20
	lower := filledLayer(t, d, size, []int64{0, 1, 2, 600, 601, 602, 1500, 4000}, 1<<32, make(expect))
	upper := filledLayer(t, d, size, []int64{601, 3000}, 2<<32, make(expect))
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{lower, upper}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	const chunk = 2 << 20 // with the blocks 512 to 1023
	shown := func(layers ...string) []byte {
		src, err := d.OpenStack(layers, size)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		b := make([]byte, chunkSize)
		if _, err := src.ReadAt(b, chunk); err != nil {
			t.Fatal(err)
		}
		return b
	}
	all, exact := shown(lower, upper), shown(lower)
	data, crcs := d.Join(layer.Dir, lower, layer.DataFile), d.Join(layer.Dir, lower, layer.CRCsFile)
	held, err := os.ReadFile(data)
	if err != nil {
		t.Fatal(err)
	}
	read := func() ([]byte, error) {
		defer d.Close() // the disk records damage in the background
		buf := block.AlignedBuffer(int(chunkSize))
		return buf, issue(loop, r, block.OpRead, chunk, chunkSize, buf, false)
	}
	damaged := func(want bool) {
		t.Helper()
		list, err := d.Scrub(ctx, lower, 0)
		if err != nil || want != slices.Equal(list, []Damage{{Off: chunk, Len: chunkSize}}) || !want && len(list) > 0 {
			t.Fatalf("damage %v, %v; expected: %v", list, err, want)
		}
		if broken := r.Broken(); want != (len(broken) == 1 && broken[0].Layer == lower && broken[0].Off == chunk) {
			t.Fatalf("broken: %v", broken)
		}
	}
	same := func() {
		t.Helper()
		if got, err := read(); err != nil || !slices.Equal(got, all) {
			t.Fatalf("not read as before: %v", err)
		}
		if got := shown(lower); !slices.Equal(got, exact) {
			t.Fatal("the layer is not what it was")
		}
	}

	// An uncovered block, with the data of the whole stack: block 601 is different there.
	flipBit(t, data, 600<<blockBits+99)
	damaged(true)
	if _, err := read(); !api.Is(err, api.Corrupt) {
		t.Fatalf("damage was served: %v", err)
	}
	if err := d.Repair(lower, chunk, all); err != nil {
		t.Fatal(err)
	}
	damaged(false)
	same()
	if err := d.Repair(lower, chunk, all); err != nil {
		t.Fatalf("once more: %v", err)
	}

	// Another replica holds other data, or hides the block.
	flipBit(t, data, 600<<blockBits+99)
	damaged(true)
	other := slices.Clone(all)
	other[600<<blockBits-chunk+5] ^= 1
	was, err := os.ReadFile(data)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Repair(lower, chunk, other); !api.Is(err, api.Corrupt) {
		t.Fatalf("made of something else: %v", err)
	}
	if now, err := os.ReadFile(data); err != nil || !slices.Equal(now, was) {
		t.Fatal("something else was written")
	}
	damaged(true)
	flipBit(t, data, 601<<blockBits+7)
	if err := d.Repair(lower, chunk, all); !api.Is(err, api.Corrupt) {
		t.Fatalf("made of what hides it: %v", err)
	}
	damaged(true)
	uid := r.Meta().UID
	if d.BeyondRepair(uid, lower) {
		t.Fatal("nobody said so")
	}
	r.Hopeless(lower, chunk)
	if !d.BeyondRepair(uid, lower) || len(r.Broken()) > 0 {
		t.Fatal("it is asked for again")
	}
	if d.BeyondRepair("another", lower) {
		t.Fatal("what other volumes with the layer show was not looked at")
	}
	if err := d.Repair(lower, chunk, exact); err != nil {
		t.Fatal(err)
	}
	if d.BeyondRepair(uid, lower) {
		t.Fatal("it was repaired")
	}
	damaged(false)
	same()

	// Data in a hole, a file which is too short, and wrong checksums.
	flipBit(t, data, 700<<blockBits)
	flipBit(t, crcs, 602*crcSize)
	damaged(true)
	if err := d.Repair(lower, chunk, exact); err != nil {
		t.Fatal(err)
	}
	damaged(false)
	if err := os.Truncate(data, 602<<blockBits); err != nil {
		t.Fatal(err)
	}
	if list, err := d.Scrub(ctx, lower, 0); err != nil || len(list) == 0 {
		t.Fatal(list, err)
	}
	for _, b := range r.Broken() {
		if err := d.Repair(lower, b.Off, held[b.Off:][:b.Len]); err != nil {
			t.Fatal(err)
		}
	}
	damaged(false)
	same()

	// The digests are damaged: the disk cannot tell the right data.
	flipBit(t, d.Join(layer.Dir, lower, layer.SumsFile), sumsHeader+sumSize+1)
	if err := d.Repair(lower, chunk, exact); !api.Is(err, api.Corrupt) {
		t.Fatalf("without digests: %v", err)
	}
	flipBit(t, data, 600<<blockBits+99)
	if list, err := d.Scrub(ctx, lower, 0); err != nil || len(list) == 0 {
		t.Fatal(list, err)
	}
	if !d.BeyondRepair(uid, lower) || !d.BeyondRepair("another", lower) || len(r.Broken()) > 0 {
		t.Fatal("a layer without digests is repaired chunk by chunk")
	}
}

// TestRepairReadsTheSnapshotThatShowsMost: a repair reads a damaged chunk in the snapshot which shows most of the
// chunk's layer.
func TestRepairReadsTheSnapshotThatShowsMost(t *testing.T) {
	m := Meta{Layers: []string{"a", "b", "c"}, Branches: []Branch{{"d", "a"}},
		Snapshots: []Snapshot{{UID: "on-d", Layer: "d"}, {UID: "on-c", Layer: "c"}}}
	for layer, want := range map[string]string{"a": "on-d", "b": "on-c", "c": "on-c", "d": "on-d", "x": ""} {
		if got := m.nearestSnapshot(layer); got != want {
			t.Errorf("layer %s: %q, not %q", layer, got, want)
		}
	}
}
