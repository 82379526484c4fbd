package engine

import (
	"context"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestDropSnapshotBesideASuspect: a user deletes a snapshot while the engine suspects a member, whose drop is not
// decided. The other member then fails to vouch for a moment, and the suspect serves again. Either the deletion failed,
// or the suspect lacks the snapshot, too: otherwise the engine would report the deleted snapshot again.
func TestDropSnapshotBesideASuspect(t *testing.T) {
	s := stack.Snapshot{UID: "s", Name: "s", Layer: "l", Created: time.Unix(1, 0)}
	suspect, other := newKeeper(s), newKeeper(s)
	asked, goOn := make(chan struct{}), make(chan struct{})
	other.adopt = func(n int) error {
		if n == 2 { // the engine asks the member to vouch
			close(asked)
			<-goOn
			return errAway
		}
		return nil
	}
	dropped := make(chan string, 1)
	e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true,
		Members: []Named{{Name: "suspect", Local: true, Member: suspect}, {Name: "other", Member: other}},
		Drop:    func(context.Context, int64, string) error { return nil },
		OnDrop:  func(m string, _ error) { dropped <- m }})
	if err != nil {
		t.Fatal(err)
	}
	e.Suspect("suspect", errAway)
	<-asked
	derr := e.DropSnapshot(t.Context(), "s")
	close(goOn)
	for serves, began := false, time.Now(); !serves; time.Sleep(time.Millisecond) {
		if err := e.runOnLoop(t.Context(), func() { serves = e.suspect == 0 }); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > time.Minute {
			t.Fatal("the suspect does not serve again")
		}
	}
	if len(dropped) > 0 {
		t.Fatalf("%s was dropped", <-dropped)
	}
	if derr == nil && !slices.Contains(suspect.forgot, "s") {
		t.Error("the snapshot is said to be deleted, and a member that serves has it")
	}
	if derr != nil && !api.Is(derr, api.Busy) {
		t.Error(derr)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
