package stack

import (
	"bytes"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// anyCut is a snapshot whose cut is not repeated.
func anyCut(uid string) block.SnapshotCut { return block.SnapshotCut{UID: uid} }

// TestHoldKeepsTheSnapshot: the layers of a held snapshot outlive the snapshot, merges, a restart of the process, the
// replica and garbage collections, have digests if asked, and are removed with the end of the hold.
func TestHoldKeepsTheSnapshot(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	c, ctx := newChained(t), t.Context()
	snaps := c.scribble(4)
	holder := string(api.NewUID())
	want := c.snaps[snaps[1]]
	layers, size, err := c.d.HoldSnapshot(ctx, holder, "b1", c.uid, anyCut(snaps[1]))
	if err != nil || size != int64(len(want)) || len(layers) != 2 {
		t.Fatalf("held %v, %d bytes, %v", layers, size, err)
	}
	held := func() {
		t.Helper()
		if err := c.d.Collect(ctx, 0); err != nil {
			t.Fatal(err)
		}
		again, n, err := c.d.HoldSnapshot(ctx, holder, "b1", c.uid, anyCut(snaps[1]))
		if err != nil || n != size || !slices.Equal(again, layers) {
			t.Fatalf("held %v, %d bytes, %v, before %v, %d bytes", again, n, err, layers, size)
		}
		if list, err := c.d.HeldSnapshots(); err != nil || !maps.Equal(list, map[string]string{holder: "b1"}) {
			t.Fatalf("holders %v, %v", list, err)
		}
		src, err := c.d.OpenStack(layers, size)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		for i := range size / chunkSize {
			if !bytes.Equal(readChunk(t, src, i), want[i*chunkSize:][:chunkSize]) {
				t.Fatalf("chunk %d differs from the snapshot", i)
			}
		}
	}
	held()
	for _, uid := range snaps[:3] {
		if err := c.d.DropSnapshot(c.uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	c.mergeAll()
	held()
	if c.d, err = Open(c.d.Root); err != nil {
		t.Fatal(err)
	}
	held()
	if err := c.d.RemoveReplica(c.uid); err != nil {
		t.Fatal(err)
	}
	held()
	if err := c.d.MakeDigests(ctx, layers); err != nil {
		t.Fatal(err)
	}
	for _, uid := range layers {
		if err := c.d.Verify(ctx, uid); err != nil {
			t.Fatal(err)
		}
	}
	held()
	for range 2 {
		if err := c.d.ReleaseSnapshot(holder); err != nil {
			t.Fatal(err)
		}
	}
	if n := c.layersOnDisk(); n > 0 {
		t.Errorf("%d layers are left after the hold", n)
	}
	if list, err := c.d.HeldSnapshots(); err != nil || len(list) > 0 {
		t.Errorf("holders %v, %v", list, err)
	}
}

// TestHoldersAreBackupsAlone: pins of replicas and of images in the making are no holders. A snapshot or a replica that
// does not exist is not held.
func TestHoldersAreBackupsAlone(t *testing.T) {
	t.Parallel()
	c, ctx := newChained(t), t.Context()
	snap := c.scribble(1)[0]
	if _, err := c.d.Pin(ctx, Pin{UID: string(api.NewUID()), For: "clone", Disk: c.d.UID()}, c.uid, snap); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.d.Hold(ctx, string(api.NewUID()), "golden", c.uid, snap); err != nil {
		t.Fatal(err)
	}
	for _, two := range [][2]string{{c.uid, string(api.NewUID())}, {string(api.NewUID()), snap}} {
		if _, _, err := c.d.HoldSnapshot(ctx, string(api.NewUID()), "b", two[0], anyCut(two[1])); !api.Is(err, api.NotFound) {
			t.Errorf("a snapshot that does not exist: %v", err)
		}
	}
	if _, _, err := c.d.HoldSnapshot(ctx, "../x", "b", c.uid, anyCut(snap)); !api.Is(err, api.Invalid) {
		t.Errorf("a holder that is no UID: %v", err)
	}
	if list, err := c.d.HeldSnapshots(); err != nil || len(list) > 0 {
		t.Errorf("holders %v, %v", list, err)
	}
	if pins, err := c.d.Pins(); err != nil || len(pins) != 2 {
		t.Errorf("pins %v, %v", pins, err)
	}
}

// TestHoldFollowsTheSnapshot: a holder who asks for another snapshot holds that one alone. The other try of a snapshot,
// of another instant, is neither held nor compared.
func TestHoldFollowsTheSnapshot(t *testing.T) {
	t.Parallel()
	c, ctx := newChained(t), t.Context()
	snaps := c.scribble(3)
	cuts := map[string]block.SnapshotCut{}
	m, err := c.d.Stack(c.uid)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range m.Snapshots {
		m.Snapshots[i].Created = time.Date(2026, 1, 2, 3, 4, i, i, time.UTC)
		cuts[s.UID] = block.SnapshotCut{UID: s.UID, Created: m.Snapshots[i].Created}
	}
	if err := c.d.writeStack(c.d.Join(replicaDir, c.uid), m); err != nil {
		t.Fatal(err)
	}
	holder := string(api.NewUID())
	for _, uid := range []string{snaps[0], snaps[2], snaps[1]} {
		want := slices.Index(snaps, uid) + 1
		if layers, _, err := c.d.HoldSnapshot(ctx, holder, "b", c.uid, cuts[uid]); err != nil || len(layers) != want {
			t.Errorf("%d layers are held, %v, want %d", len(layers), err, want)
		}
	}
	other := cuts[snaps[0]]
	other.Created = other.Created.Add(1)
	if _, _, err := c.d.HoldSnapshot(ctx, holder, "b", c.uid, other); !api.Is(err, api.NotFound) {
		t.Errorf("the other try is held: %v", err)
	}
	if held, err := c.d.HeldSnapshots(); err != nil || len(held) > 0 {
		t.Errorf("held %v, %v", held, err)
	}
	if _, err := c.d.ChangedChunks(ctx, c.uid, cuts[snaps[0]], cuts[snaps[1]]); err != nil {
		t.Error(err)
	}
	for _, two := range [][2]block.SnapshotCut{{other, cuts[snaps[1]]}, {cuts[snaps[1]], other}} {
		if _, err := c.d.ChangedChunks(ctx, c.uid, two[0], two[1]); !api.Is(err, api.NotFound) {
			t.Errorf("the other try is compared: %v", err)
		}
	}
}

// TestHoldWaitsForLayers: the snapshot of a replica that reads layers from another disk is not held before the copies
// are finished.
func TestHoldWaitsForLayers(t *testing.T) {
	t.Parallel()
	c, ctx := newChained(t), t.Context()
	snap := c.scribble(1)[0]
	layers, size, err := c.d.HoldSnapshot(ctx, string(api.NewUID()), "b", c.uid, anyCut(snap))
	if err != nil {
		t.Fatal(err)
	}
	clone := &chained{t: t, d: c.second(), loop: c.loop, uid: string(api.NewUID()), rng: c.rng,
		model: slices.Clone(c.snaps[snap]), snaps: map[string][]byte{}}
	spec := Spec{UID: clone.uid, Volume: "clone", VolumeUID: string(api.NewUID()), Size: size, Layers: layers}
	if err := clone.d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	own := clone.scribble(1)[0]
	holder := string(api.NewUID())
	if _, _, err := clone.d.HoldSnapshot(ctx, holder, "b", clone.uid, anyCut(own)); !api.Is(err, api.Busy) {
		t.Fatalf("held before the copy: %v", err)
	}
	if err := clone.d.CopyLayer(ctx, c.d, layers[0], CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, _, err := clone.d.HoldSnapshot(ctx, holder, "b", clone.uid, anyCut(own)); err != nil || len(got) != 2 {
		t.Fatalf("held after the copy: %v, %v", got, err)
	}
}

// cutAfter opens the replica, writes, and cuts a snapshot.
func (c *chained) cutAfter(write func(r *Replica)) string {
	c.t.Helper()
	ctx := context.Background()
	c.epoch++
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := r.Adopt(ctx, c.epoch, 1, []string{c.uid}); err != nil {
		c.t.Fatal(err)
	}
	write(r)
	s := Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID())}
	s.Name = s.UID
	if err := r.Cut(ctx, s); err != nil {
		c.t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		c.t.Fatal(err)
	}
	c.snaps[s.UID] = slices.Clone(c.model)
	return s.UID
}

// writeBlocks writes random blocks, or discards blocks.
func (c *chained) writeBlocks(r *Replica, b, n int64, discard bool) {
	c.t.Helper()
	off, n := b<<blockBits, n<<blockBits
	if discard {
		mustIssue(c.t, c.loop, r, block.OpDiscard, off, n, nil)
		clear(c.model[off : off+n])
		return
	}
	buf := block.AlignedBuffer(int(n))
	randomBytes(c.rng, buf)
	mustIssue(c.t, c.loop, r, block.OpWrite, off, n, buf)
	copy(c.model[off:], buf)
}

// compareChanges compares the changed chunks between all pairs of snapshots with the content.
func (c *chained) compareChanges() {
	c.t.Helper()
	for from, before := range c.snaps {
		for to, now := range c.snaps {
			list, err := c.d.ChangedChunks(context.Background(), c.uid, anyCut(from), anyCut(to))
			if err != nil {
				c.t.Fatal(err)
			}
			if from == to && len(list) > 0 {
				c.t.Errorf("chunks of a snapshot differ from themselves: %v", list)
			}
			end := (int64(len(now)) + chunkSize - 1) / chunkSize
			if !slices.IsSorted(list) || len(slices.Compact(slices.Clone(list))) < len(list) ||
				len(list) > 0 && (list[0] < 0 || list[len(list)-1] >= end) {
				c.t.Errorf("chunks %v of %d", list, end)
			}
			was := make([]byte, len(now))
			copy(was, before)
			for i := range end {
				off, stop := i*chunkSize, min((i+1)*chunkSize, int64(len(now)))
				if !bytes.Equal(was[off:stop], now[off:stop]) && !slices.Contains(list, i) {
					c.t.Errorf("chunk %d differs, and only %v changed", i, list)
				}
			}
		}
	}
}

// TestChangedChunksCoverAllDifferences: a chunk with other bytes than in the base is listed, after random writes,
// discards, reverts, removals, merges and growth, in any order of base and target.
func TestChangedChunksCoverAllDifferences(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	c := newChained(t)
	rng := rand.New(rand.NewPCG(suite.Seed(t), 1))
	pick := func() string { return slices.Sorted(maps.Keys(c.snaps))[rng.IntN(len(c.snaps))] }
	few := func(r *Replica) {
		for range rng.IntN(4) {
			b := rng.Int64N(int64(len(c.model)) >> blockBits)
			c.writeBlocks(r, b, min(1+rng.Int64N(20), int64(len(c.model))>>blockBits-b), rng.IntN(3) == 0)
		}
	}
	c.cutAfter(few)
	for range suite.Count(t, "DROVER_ROUNDS", 20, 100) {
		switch {
		case rng.IntN(5) == 0:
			uid := pick()
			if err := c.d.Revert(t.Context(), c.uid, uid, 0); err != nil {
				t.Fatal(err)
			}
			clear(c.model)
			copy(c.model, c.snaps[uid])
		case rng.IntN(4) == 0 && len(c.snaps) > 2:
			uid := pick()
			if err := c.d.DropSnapshot(c.uid, uid); err != nil {
				t.Fatal(err)
			}
			delete(c.snaps, uid)
			c.mergeAll()
		case rng.IntN(5) == 0:
			c.cutAfter(func(r *Replica) {
				size := int64(len(c.model)) + (1+rng.Int64N(700))<<blockBits
				if err := r.Expand(t.Context(), size); err != nil {
					t.Fatal(err)
				}
				c.model = append(c.model, make([]byte, size-int64(len(c.model)))...)
				few(r)
			})
		default:
			c.cutAfter(few)
		}
		c.compareChanges()
	}
}

// TestChangedChunksAreFew: writes and discards list their chunks alone. A snapshot or replica that does not exist is an
// error of kind not found.
func TestChangedChunksAreFew(t *testing.T) {
	t.Parallel()
	c, ctx := newChained(t), t.Context()
	base := c.cutAfter(func(r *Replica) {
		for chunk := range int64(len(c.model)) / chunkSize {
			c.writeBlocks(r, chunk*chunkBlks, 8, false)
		}
	})
	same := c.cutAfter(func(*Replica) {})
	target := c.cutAfter(func(r *Replica) {
		c.writeBlocks(r, 2*chunkBlks-1, 2, false)
		c.writeBlocks(r, 4*chunkBlks, 4, true)
		c.writeBlocks(r, 8*chunkBlks-1, 1, false)
	})
	for _, w := range []struct {
		base, target string
		want         []int64
	}{{base, same, nil}, {base, target, []int64{1, 2, 4, 7}}, {target, base, []int64{1, 2, 4, 7}}} {
		list, err := c.d.ChangedChunks(ctx, c.uid, anyCut(w.base), anyCut(w.target))
		if err != nil || !slices.Equal(list, w.want) {
			t.Errorf("changed %v, %v, want %v", list, err, w.want)
		}
	}
	none := string(api.NewUID())
	for _, three := range [][3]string{{none, base, target}, {c.uid, none, target}, {c.uid, base, none}} {
		_, err := c.d.ChangedChunks(ctx, three[0], anyCut(three[1]), anyCut(three[2]))
		if !api.Is(err, api.NotFound) {
			t.Errorf("what does not exist: %v", err)
		}
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := c.d.ChangedChunks(ended, c.uid, anyCut(base), anyCut(target)); err == nil {
		t.Error("a comparison does not end with its context")
	}
}
