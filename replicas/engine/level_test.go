package engine

import (
	"context"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// keeper is a member with snapshots.
type keeper struct {
	*scripted
	snapshots []stack.Snapshot
	forgot    []string
}

func (k *keeper) State(context.Context) (stack.Meta, error) {
	return stack.Meta{Snapshots: slices.Clone(k.snapshots)}, nil
}

func (k *keeper) Forget(_ context.Context, uid string) error {
	k.forgot = append(k.forgot, uid)
	return nil
}
func (k *keeper) PrepareCut(context.Context, stack.Snapshot) error                  { return nil }
func (k *keeper) DoCut(context.Context, string) error                               { return nil }
func (k *keeper) AbortCut(context.Context) error                                    { return nil }
func (k *keeper) Seal(context.Context, ...stack.Snapshot) error                     { return nil }
func (k *keeper) SnapRead(context.Context, string, int64, []byte) error             { return nil }
func (k *keeper) SnapEnd(context.Context) error                                     { return nil }
func (k *keeper) Sizes(context.Context) (map[string]stack.LayerSize, error)         { return nil, nil }
func (k *keeper) SnapDigests(context.Context, string, int64, int64) ([]byte, error) { return nil, nil }
func (k *keeper) Changed(context.Context, string, string, []string, int64) ([]int64, error) {
	return nil, nil
}

func newKeeper(snapshots ...stack.Snapshot) *keeper {
	return &keeper{&scripted{data: make([]byte, 1<<20), adopt: func(int) error { return nil }}, snapshots, nil}
}

// TestUnreportedSnapshotIsTakenOut: a snapshot which some member lacks, and which the API never reported, is deleted
// from the other members. If the API reported the snapshot, the members without the snapshot lose their membership. The
// open fails if the API does not answer, or if each member lacks a snapshot.
func TestUnreportedSnapshotIsTakenOut(t *testing.T) {
	s := stack.Snapshot{UID: "s", Name: "s", Created: time.Unix(1, 0)}
	other := stack.Snapshot{UID: "o", Name: "o", Created: time.Unix(2, 0)}
	yes := func(context.Context, stack.Snapshot) (bool, error) { return true, nil }
	for name, c := range map[string]struct {
		a, b     *keeper
		reported func(context.Context, stack.Snapshot) (bool, error)
		missing  []string
		forgets  bool
		kind     api.Kind
	}{
		"nobody is asked": {a: newKeeper(s), b: newKeeper(), forgets: true},
		"it was not": {a: newKeeper(s), b: newKeeper(), forgets: true,
			reported: func(context.Context, stack.Snapshot) (bool, error) { return false, nil }},
		"it was": {a: newKeeper(s), b: newKeeper(), reported: yes, missing: []string{"b"}},
		"no answer": {a: newKeeper(s), b: newKeeper(), kind: api.Unavailable,
			reported: func(context.Context, stack.Snapshot) (bool, error) { return false, errAway }},
		"both lack one": {a: newKeeper(s), b: newKeeper(other), reported: yes, kind: api.Corrupt},
	} {
		t.Run(name, func(t *testing.T) {
			dropped := make(chan string, 2)
			e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true,
				Lenient: true, Resync: true, Members: []Named{{Name: "a", Member: c.a}, {Name: "b", Member: c.b}},
				Reported: c.reported,
				Drop:     func(context.Context, int64, string) error { return nil },
				OnDrop:   func(m string, _ error) { dropped <- m }})
			if (len(c.a.forgot) > 0) != c.forgets {
				t.Errorf("it was taken out of a: %v", c.a.forgot)
			}
			if c.kind != 0 {
				if !api.Is(err, c.kind) {
					t.Errorf("%v, want kind %v", err, c.kind)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range c.missing {
				if got := within(t, "drop", dropped); got != name {
					t.Errorf("dropped %s", got)
				}
			}
			if got := e.Missing(); len(got) != len(c.missing) {
				t.Errorf("missing: %v", got)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSnapshotsWaitForTheDropOfAMissingMember: the engine has not compared the snapshots of a missing member, so the
// engine reports no snapshots before the drop of the missing member.
func TestSnapshotsWaitForTheDropOfAMissingMember(t *testing.T) {
	s := stack.Snapshot{UID: "s", Name: "s", Created: time.Unix(1, 0)}
	here, away := newKeeper(s), newKeeper()
	away.adopt = func(int) error { return errAway }
	drop, dropped := make(chan struct{}), make(chan string, 1)
	e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true,
		Lenient: true, Members: []Named{{Name: "a", Member: here}, {Name: "b", Member: away}},
		Drop:   func(context.Context, int64, string) error { <-drop; return nil },
		OnDrop: func(m string, _ error) { dropped <- m }})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := e.Snapshots(t.Context()); !api.Is(err, api.Busy) {
		t.Errorf("%v, %v", st.Snapshots, err)
	}
	close(drop)
	within(t, "drop", dropped)
	if st, err := e.Snapshots(t.Context()); err != nil || len(st.Snapshots) != 1 {
		t.Errorf("after the drop: %v, %v", st.Snapshots, err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
