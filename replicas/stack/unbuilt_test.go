package stack

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestMergeOfBlocksNotLookedAt: a head which exists at the open of the replica becomes a layer, gets digests and is
// merged, all before the open replica has looked at the head's blocks. The merge empties the file which shows the
// head's blocks.
func TestMergeOfBlocksNotLookedAt(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const size = 192 << 20
	d, loop := newDisk(t), startLoop(t)
	d.window = 1 << 20
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	open := func(epoch int64) *Replica {
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Adopt(ctx, epoch, 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
		return r
	}
	cut := func(r *Replica, name string) Snapshot {
		s := Snapshot{UID: string(api.NewUID()), Name: name, Layer: string(api.NewUID()), Created: time.Now()}
		if err := r.Cut(ctx, s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	r := open(1)
	for b := range int64(32) { // the larger layer: the merge copies the other layer here and empties the other
		mustIssue(t, loop, r, block.OpWrite, b<<blockBits, blockSize, numbered(100+uint64(b)))
	}
	below := cut(r, "below")
	for _, b := range []int64{3, 40} {
		mustIssue(t, loop, r, block.OpWrite, b<<blockBits, blockSize, numbered(200+uint64(b)))
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.Finish(ctx, below.Layer); err != nil {
		t.Fatal(err)
	}
	r = open(2)
	defer r.Close()
	above := cut(r, "above")
	if err := d.Finish(ctx, above.Layer); err != nil {
		t.Fatal(err)
	}
	if err := r.DropSnapshot(below.UID); err != nil {
		t.Fatal(err)
	}
	some, cancel := context.WithCancel(ctx)
	defer cancel()
	merged := make(chan bool, 1)
	go func() {
		for did := false; !did && some.Err() == nil; { // no merge begins while a starting process has a layer's lock
			did, _ = r.Merge(some, MergeOptions{})
		}
		merged <- true
	}()
	for over := false; !over; {
		m := r.Meta()
		over = len(m.Layers) == 1 || m.Merge != nil && m.Merge.Done >= 2<<20
		time.Sleep(time.Millisecond / 4)
	}
	cancel()
	<-merged
	buf := block.AlignedBuffer(int(blockSize))
	for b, want := range map[int64]uint64{2: 102, 3: 203, 40: 240, 41: 0} {
		mustIssue(t, loop, r, block.OpRead, b<<blockBits, blockSize, buf)
		if string(buf) != string(numbered(want)) {
			t.Errorf("block %d begins with %x, want %d", b, buf[:8], want)
		}
	}
	d.window = mergeWindow // as fast as possible
	for len(r.Meta().Layers) > 1 {
		if _, err := r.Merge(ctx, MergeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}
