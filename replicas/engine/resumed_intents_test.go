package engine

import (
	"bytes"
	"context"
	"testing"
)

// TestResumedEngineKeepsIntents: the process before died with a write in progress, which only one of two members has.
// The next process resumes, and ends before the kernel has sent the write again: the device could not be resumed, or a
// user took the device away by force. The engine has not resynced the members, so the intents stay for the next attach.
func TestResumedEngineKeepsIntents(t *testing.T) {
	a, b := differs('A', 1), differs('B', 1)
	open := func(epoch int64, resync bool) {
		e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 2 * halfSize, Epoch: epoch, Incarnation: epoch, Track: true,
			Lenient: true, Resync: resync, Members: []Named{{Name: "a", Member: a}, {Name: "b", Member: b}},
			Drop: func(context.Context, int64, string) error { return nil }})
		if err != nil {
			t.Fatal(err)
		}
		e.SetWhole(epoch, true) // as the API says: all replicas are members
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	open(5, false)
	if a.cleaned.Load() || b.cleaned.Load() {
		t.Error("the intents are cleared, and the members differ")
		a.dirty, b.dirty = nil, nil
	}
	open(6, true)
	if !bytes.Equal(a.data, b.data) {
		t.Error("the next attach serves members that differ")
	}
	if !a.cleaned.Load() || !b.cleaned.Load() {
		t.Error("the intents stay after an attach that resynced the members")
	}
}
