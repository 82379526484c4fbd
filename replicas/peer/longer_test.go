package peer

import (
	"bytes"
	"context"
	"testing"

	"drover.io/drover/block"
)

// TestLongerReplicaJoins: a user expands a volume, and a guest writes to the new end, while one replica is away. The
// user salvages the volume with the shorter replica. The former member joins, and is longer than the volume. Then the
// user expands the volume: both members hold the same at the new end.
func TestLongerReplicaJoins(t *testing.T) {
	const size = int64(1) << 20
	c := newCluster(t, size, 1, true)
	far := c.far[0].uid
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	only := func(uid string) { // the only member from the next epoch on
		epoch, _ := c.rec.state()
		if err := c.rec.swap(epoch, func() { c.rec.members = []string{uid} }); err != nil {
			t.Fatal(err)
		}
		if err := c.attach(); err != nil {
			t.Fatal(err)
		}
	}
	write := func(off int64, b byte) {
		buf := block.AlignedBuffer(block.Size)
		copy(buf, bytes.Repeat([]byte{b}, block.Size))
		r := &block.Request{Op: block.OpWrite, Off: off, Len: block.Size, Buf: buf}
		if err := Do(context.Background(), c.loop, c.e, r); err != nil {
			t.Fatal(err)
		}
	}
	only(c.local)
	if err := c.e.Expand(t.Context(), 2*size); err != nil {
		t.Fatal(err)
	}
	write(size+8*block.Size, 'X')
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	only(far) // salvaged
	if _, err := c.back(c.local); err != nil {
		t.Fatal(err)
	}
	if err := c.e.Expand(t.Context(), 2*size); err != nil {
		t.Fatal(err)
	}
	epoch, members := c.rec.state()
	if c.e.SetWhole(epoch, true); len(members) != 2 {
		t.Fatalf("members %v", members)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	c.size = 2 * size
	here, there := c.content(c.local), c.content(far)
	for b := range c.size / block.Size {
		if x, y := here[b*block.Size:][:block.Size], there[b*block.Size:][:block.Size]; !bytes.Equal(x, y) {
			t.Errorf("block %d: one member reads %q, the other one %q", b, x[:1], y[:1])
		}
	}
	r, err := c.disk.OpenReplica(t.Context(), c.local, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	left, err := r.Intents(t.Context())
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if t.Failed() {
		t.Logf("intents that tell of the difference: %v, %v", left.Regions, err)
	}
	if err != nil {
		t.Error(err)
	}
}
