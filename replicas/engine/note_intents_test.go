package engine

import (
	"context"
	"slices"
	"testing"
)

// TestEngineWithoutIntentsSaysSo: a single member that notes no intents records so before the engine serves, and again
// before the engine begins to note intents. Else a former member would return and lack the unnoted writes.
func TestEngineWithoutIntentsSaysSo(t *testing.T) {
	m := differs('A', 1) // with intents of epoch 1
	e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 2 * halfSize, Epoch: 5, Incarnation: 1,
		Members: []Named{{Name: "there", Member: m}},
		Drop:    func(context.Context, int64, string) error { return nil },
		Add:     func(context.Context, int64, string) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"unnoted 5"}; !slices.Equal(m.calls, want) {
		t.Errorf("when the engine opens it calls %q, and %q is right", m.calls, want)
	}
	m.calls = nil
	if err := e.NoteIntents(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"unnoted 5", "track true"}
	if !slices.Equal(m.calls, want) {
		t.Errorf("when it begins to note it calls %q, and %q is right", m.calls, want)
	}
	if _, err := e.Join(t.Context(), Named{Name: "back", Member: differs('B')}, JoinOptions{}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(m.calls, want) {
		t.Errorf("an engine that notes intents begins again: %q", m.calls)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
