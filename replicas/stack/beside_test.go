package stack

import (
	"context"
	"errors"
	"slices"
	"testing"

	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"

	"drover.io/drover/api"
)

// TestMergeBesideTheHead: a revert leaves layers of snapshots beside the head, and merges join these layers like the
// layers below the head. A layer with a snapshot, or below two branches, stays.
func TestMergeBesideTheHead(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	c := newChained(t)
	c.d.window = 3 << 20
	first := c.scribble(5)
	revert := func(to string) {
		t.Helper()
		if err := c.d.Revert(ctx, c.uid, to, 0); err != nil {
			t.Fatal(err)
		}
		c.model = slices.Clone(c.snaps[to])
	}
	drop := func(uids ...string) {
		t.Helper()
		for _, uid := range uids {
			if err := c.d.DropSnapshot(c.uid, uid); err != nil {
				t.Fatal(err)
			}
			delete(c.snaps, uid)
		}
	}
	layers := func(want int) {
		t.Helper()
		c.check()
		if n := c.layersOnDisk(); n != want {
			t.Fatalf("%d layers, want %d", n, want)
		}
	}
	revert(first[2])
	second := c.scribble(2)
	revert(first[0]) // beside the head: layers 1 and 2, and on layer 2 both 3, 4 and the layers of second
	c.mergeAll()
	layers(7)
	drop(first[1], first[3], second[0])
	c.mergeAll()
	layers(4) // 0; 1 and 2; 3 and 4; second
	drop(first[2])
	c.mergeAll()
	layers(4) // two branches stand on layer 2
	drop(first[4])
	c.mergeAll()
	layers(2) // 0; all layers of second[1], merged
	m, err := c.d.Stack(c.uid)
	if err != nil || len(m.Branches) != 1 {
		t.Fatalf("%+v, %v", m, err)
	}
	if err := c.d.Verify(ctx, m.Branches[0].Layer); err != nil {
		t.Fatal(err)
	}
	revert(second[1])
	c.check()
	c.scribble(1)
	drop(first[0], second[1])
	c.mergeAll()
	layers(1)
}

// untilMerging is a context which ends in the middle of a merge of the replica.
type untilMerging struct {
	context.Context
	r *Replica
}

func (u untilMerging) Err() error {
	if g := u.r.Meta().Merge; g != nil && g.Done > 0 {
		return errPatience
	}
	return nil
}

// TestMergeBesideTheHeadIsInterrupted: an interrupted merge beside the head continues. The layers are removed if their
// snapshot was deleted meanwhile.
func TestMergeBesideTheHeadIsInterrupted(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	for _, goes := range []bool{false, true} {
		c := newChained(t)
		c.d.window = 2 << 20
		snaps := c.scribble(3)
		if err := c.d.Revert(ctx, c.uid, snaps[0], 0); err != nil {
			t.Fatal(err)
		}
		c.model = slices.Clone(c.snaps[snaps[0]])
		gone := snaps[1:2]
		uids, err := c.d.Unfinished()
		if err != nil {
			t.Fatal(err)
		}
		for _, uid := range uids {
			if err := c.d.Finish(ctx, uid); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.d.DropSnapshot(c.uid, snaps[1]); err != nil {
			t.Fatal(err)
		}
		r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = r.Merge(untilMerging{ctx, r}, MergeOptions{}); !errors.Is(err, errPatience) {
			t.Fatalf("it was to be interrupted: %v", err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if m, err := c.d.Stack(c.uid); err != nil || m.Merge == nil || len(m.Branches) != 2 {
			t.Fatalf("%+v, %v", m, err)
		}
		if err := c.d.Revert(ctx, c.uid, snaps[2], 0); !api.Is(err, api.Busy) {
			t.Fatalf("a revert to what is being merged: %v", err)
		}
		want := 2
		if goes {
			gone, want = snaps[1:], 1
			if err := c.d.DropSnapshot(c.uid, snaps[2]); err != nil {
				t.Fatal(err)
			}
		}
		for _, uid := range gone {
			delete(c.snaps, uid)
		}
		c.mergeAll()
		c.check()
		if n := c.layersOnDisk(); n != want {
			t.Fatalf("%d layers, want %d", n, want)
		}
	}
}

// mergeBeside merges layers which a revert left beside the head.
var mergeBeside = step{name: "merge beside the head", third: 2, setup: func(t *testing.T, d *Disk, i *ids) {
	i.makeImage(t, d)
	var layers []string
	for k, b := range [][]int64{{1, 5, 600, 601, 900}, {5, 6, 601, 700, 1500, 2047}, {2}} {
		layers = append(layers, filledLayer(t, d, 8<<20, b, uint64(k+1)<<40, i.side))
	}
	spec := i.spec(i.layer)
	for k, l := range layers {
		spec.Branches = append(spec.Branches, Branch{l, append([]string{""}, layers...)[k]})
	}
	spec.Snapshots = []Snapshot{{UID: string(api.NewUID()), Name: "s", Layer: layers[2]}}
	if err := d.CreateReplica(context.Background(), spec); err != nil {
		t.Fatal(err)
	}
},
	do: withReplica(mergeAll),
	check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
		servedAsSealed(t, d)
		if err := d.Collect(context.Background(), 0); err != nil {
			t.Fatal(err)
		}
		merged := func(m Meta, _ bool) bool { return len(m.Branches) == 1 && m.Merge == nil }
		replicaIs(func(m Meta, done bool) bool { return !done || merged(m, done) })(t, d, p, i, done)
		if err := withReplica(mergeAll)(d, p, i); err != nil {
			t.Fatal(err)
		}
		replicaIs(merged)(t, d, p, i, done)
		list, err := d.Replicas()
		if err != nil {
			t.Fatal(err)
		}
		layerUID := list[0].Branches[0].Layer
		if err := d.Verify(context.Background(), layerUID); err != nil {
			t.Fatal(err)
		}
		checksummed(t, d, layerUID)
		if chain, err := list[0].Chain(list[0].Snapshots[0].Layer); err != nil || !slices.Equal(chain, []string{layerUID}) {
			t.Fatalf("%v, %v", chain, err)
		}
		i.side.checkLayers(t, d, []string{layerUID}, 8<<20)
		if err := errors.Join(d.Collect(context.Background(), 0), d.Collect(context.Background(), 0), d.Close()); err != nil {
			t.Fatal(err)
		}
		for dir, want := range map[string]int{layer.Dir: 2, trashDir: 0} {
			if left, err := d.FS.ReadDir(d.Join(dir)); err != nil || len(left) != want {
				t.Fatalf("%s holds %v, %v", dir, left, err)
			}
		}
	}}
