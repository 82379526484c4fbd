package stack

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
)

// TestAnEpochHasOneEngine: a replica records the node of the adopted session and refuses another node in the same
// epoch, also after the replica was opened again. A record without a node, as older versions wrote, refuses no node.
func TestAnEpochHasOneEngine(t *testing.T) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	members := []string{spec.UID}
	open := func() *Replica {
		t.Helper()
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := open()
	for i, s := range []struct {
		node       string
		epoch, inc int64
		denied     bool
		recorded   string
	}{
		{"", 1, 1, false, ""}, {"a", 1, 1, false, "a"}, {"b", 1, 1, true, "a"}, {"b", 1, 9, true, "a"},
		{"", 1, 1, false, "a"}, {"a", 1, 2, false, "a"}, {"b", 2, 1, false, "b"}, {"a", 1, 3, true, "b"},
		{"a", 2, 9, true, "b"}, {"", 3, 1, false, ""}, {"a", 3, 1, false, "a"},
	} {
		err := r.AdoptFor(ctx, s.node, s.epoch, s.inc, members)
		if api.Is(err, api.Denied) != s.denied || err != nil && !s.denied {
			t.Fatalf("step %d: %v", i, err)
		}
		if m, err := d.readStack(spec.UID); err != nil || m.EngineNode != s.recorded {
			t.Fatalf("step %d: the record says node %q, not %q: %v", i, m.EngineNode, s.recorded, err)
		}
	}
	if err := r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID()),
		Created: time.Unix(1, 0)}); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = open()
	if err := r.AdoptFor(ctx, "b", 3, 9, members); !api.Is(err, api.Denied) {
		t.Errorf("another node in the epoch of node a, after the replica was opened again: %v", err)
	}
	snapshot := r.Meta().Snapshots[0].UID
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.Revert(ctx, spec.UID, snapshot, 4); err != nil {
		t.Fatal(err)
	}
	if m, err := d.readStack(spec.UID); err != nil || m.Epoch != 4 || m.EngineNode != "" {
		t.Errorf("the epoch of a revert is that of an engine: %+v, %v", m, err)
	}
}
