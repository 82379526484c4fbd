package importer

import (
	"bytes"
	"crypto/rand"
	"errors"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// TestEarlyIsComparedAfterARestart: the continuing process compares bytes read early with the stream, too, but not with
// bytes before the checkpoint.
func TestEarlyIsComparedAfterARestart(t *testing.T) {
	const size = waitDistance + 5*lookaheadUnit + 1000
	file := make([]byte, size)
	_, _ = rand.Read(file)
	made := func(came int64) *lookahead {
		return &lookahead{read: func(p []byte, off int64) error { copy(p, file[off:]); return nil }, size: size, name: "it",
			total: new(atomic.Int64), bytes: map[int64][]byte{}, arrived: came}
	}
	first := made(0)
	if first.readAt(make([]byte, 10), waitDistance-1, 0) || first.readAt(make([]byte, 10), size-9, 0) {
		t.Error("something was read that is near, or not there")
	}
	for off, n := range map[int64]int{waitDistance + 10: 100, waitDistance + 3*lookaheadUnit - 5: 10, size - 700: 700} {
		p := make([]byte, n)
		if !first.readAt(p, off, 0) || !bytes.Equal(p, file[off:off+int64(n)]) {
			t.Fatalf("%d bytes at %d were not read", n, off)
		}
	}
	if n := first.total.Load(); n != 3*lookaheadUnit+1000 {
		t.Errorf("%d bytes were read", n)
	}
	const here = waitDistance - lookaheadUnit
	if err := first.compareStream(file[:here], 0); err != nil {
		t.Fatal(err)
	}
	notes, ok := first.pendingRecords()
	if !ok || len(notes) != 4 {
		t.Fatalf("%d notes, %v", len(notes), ok)
	}
	for _, wrong := range []int64{-1, waitDistance + 1, waitDistance + 3*lookaheadUnit - 1, size - 1, waitDistance + lookaheadUnit} {
		then := bytes.Clone(file)
		unread := wrong == waitDistance+lookaheadUnit // not read early, so every byte is right
		if wrong >= 0 {
			then[wrong]++
		}
		next := made(here)
		if err := next.restoreRecords(notes, here); err != nil {
			t.Fatal(err)
		}
		var err error
		for off := int64(here); off < size && err == nil; off += 100_000 {
			err = next.compareStream(then[off:min(off+100_000, size)], off)
		}
		if (wrong >= 0 && !unread) != (origin.Changed(err) && api.Is(err, api.Unavailable)) {
			t.Errorf("with another byte at %d: %v", wrong, err)
		}
		if err == nil && next.hasPending() {
			t.Error("not all was compared")
		}
	}
	if err := made(size).restoreRecords(notes, waitDistance+1); !api.Is(err, api.Corrupt) {
		t.Errorf("a record of what has come: %v", err)
	}
	if err := (*lookahead)(nil).restoreRecords(notes, here); !errors.Is(err, errRestart) {
		t.Errorf("a source that cannot be compared: %v", err)
	}
	// In the middle of a unit nothing can be recorded.
	if err := first.compareStream(file[here:waitDistance+1], here); err != nil {
		t.Fatal(err)
	}
	if _, ok := first.pendingRecords(); ok {
		t.Error("half a comparison was recorded")
	}
	// The lookahead takes no bytes already passed by the stream.
	if err := first.compareStream(file[waitDistance+1:waitDistance+lookaheadUnit+10], waitDistance+1); err != nil {
		t.Fatal(err)
	}
	if first.readAt(make([]byte, 10), waitDistance+lookaheadUnit+20, 0) {
		t.Error("bytes were given that had come")
	}
}
