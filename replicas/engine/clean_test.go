package engine

import (
	"context"
	"testing"

	"drover.io/drover/api"
)

// TestIntentsStayWhileAReplicaIsAway: the end of an engine clears no intents while a replica of the volume is away,
// because the intents name the regions that the replica lacks. The end clears them if all replicas are members.
func TestIntentsStayWhileAReplicaIsAway(t *testing.T) {
	for _, whole := range []bool{false, true} {
		adopt := func(int) error { return nil }
		a, b := &scripted{data: make([]byte, 1<<20), adopt: adopt}, &scripted{data: make([]byte, 1<<20), adopt: adopt}
		e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true,
			Resync:  true,
			Members: []Named{{Name: "a", Member: a}, {Name: "b", Member: b}},
			Drop:    func(context.Context, int64, string) error { return api.Errorf(api.Denied, "no") }})
		if err != nil {
			t.Fatal(err)
		}
		e.SetWhole(5, whole)
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if a.cleaned.Load() != whole || b.cleaned.Load() != whole {
			t.Errorf("all replicas are members: %v; intents cleared: %v, %v", whole, a.cleaned.Load(), b.cleaned.Load())
		}
	}
}
