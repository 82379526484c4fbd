package stack

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// TestDamageWhileMerging: damage in the middle of a merge is not served, neither before nor after the end of the merge,
// from whichever layer the data came. The damage gets no matching digest. Data beside the damage is served.
func TestDamageWhileMerging(t *testing.T) {
	t.Parallel()
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	d.window = 4 << 20
	const size = 16 << 20
	e := make(expect)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{
		filledLayer(t, d, size, []int64{10, 600, 601, 2000}, 1<<32, e),
		filledLayer(t, d, size, []int64{11, 12, 601, 602, 2001, 3000}, 2<<32, e)}} // the larger layer: the target
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	all := block.AlignedBuffer(size)
	mustIssue(t, loop, r, block.OpRead, 0, size, all)
	if _, err = r.Merge(untilMerging{ctx, r}, MergeOptions{}); !errors.Is(err, errPatience) {
		t.Fatalf("it was to be interrupted: %v", err)
	}
	name := d.Join(layer.Dir, spec.Layers[1], layer.DataFile)
	buf := block.AlignedBuffer(size)
	read := func(b, n int64) error {
		t.Helper()
		into := buf[:n<<blockBits]
		err := issue(loop, r, block.OpRead, b<<blockBits, n<<blockBits, into, false)
		if err == nil && !bytes.Equal(into, all[b<<blockBits:][:n<<blockBits]) {
			t.Fatalf("%d blocks at %d hold something else", n, b)
		}
		return err
	}
	for _, b := range []int64{10, 11, 600, 602} { // from either layer, in the merged part
		flipBit(t, name, b<<blockBits+99)
		for _, at := range [][2]int64{{b, 1}, {b - 2, 40}, {0, size >> blockBits}} {
			if err := read(at[0], at[1]); !errors.Is(err, unix.EIO) {
				t.Fatalf("damage of block %d was served: %v", b, err)
			}
		}
		if err := read(13, 500); err != nil {
			t.Fatalf("what is whole is not read: %v", err)
		}
		flipBit(t, name, b<<blockBits+99) // repairs the block
		if err := read(0, size>>blockBits); err != nil {
			t.Fatal(err)
		}
	}
	// A damaged checksum does no harm if a digest can tell.
	flipBit(t, d.Join(layer.Dir, spec.Layers[1], layer.CRCsFile), 3000*crcSize)
	r.forgetAll(t)
	if err := read(0, size>>blockBits); err != nil {
		t.Fatal(err)
	}
	told := make(chan string, 16)
	d.OnDamage(func(uid string) { told <- uid })
	flipBit(t, name, 600<<blockBits+99)
	for more := true; more; {
		if more, err = r.Merge(ctx, MergeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	layers := r.Meta().Layers
	if len(layers) != 1 {
		t.Fatalf("layers %v", layers)
	}
	bad := []Damage{{Off: chunkSize, Len: chunkSize}}
	if list := d.Damaged(layers[0]); !slices.Equal(list, bad) {
		t.Fatalf("recorded: %v", list)
	}
	if uid := <-told; uid != layers[0] {
		t.Fatalf("damage of %s was told", uid)
	}
	for range 2 {
		if err := read(600, 1); !errors.Is(err, unix.EIO) {
			t.Fatalf("damage was served: %v", err)
		}
		if err := errors.Join(read(0, 512), read(1024, size>>blockBits-1024)); err != nil {
			t.Fatal(err)
		}
		if list, err := d.Scrub(ctx, layers[0], 0); err != nil || !slices.Equal(list, bad) {
			t.Fatal(list, err)
		}
	}
}
