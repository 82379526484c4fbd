package engine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// scripted is a member with content, intents and digests, and with an Adopt that answers as the test says.
type scripted struct {
	data    []byte
	region  int64 // size of a noted region; 0: the engine's own
	dirty   []int64
	adopt   func(n int) error          // of the n-th call, from 1
	before  func(*block.Request) error // may be nil
	adopts  atomic.Int32
	cleaned atomic.Bool
	// Regions noted by Join's goroutine.
	intended []int64
	calls    []string // of Track and Unnoted, in order
	full     bool     // Unnoted finds no room
}

func (m *scripted) Submit(r *block.Request) {
	r.Err = nil
	if m.before != nil {
		r.Err = m.before(r)
	}
	switch {
	case r.Err != nil:
	case r.Op == block.OpRead:
		copy(r.Buf, m.data[r.Off:])
	case r.Op == block.OpWrite:
		copy(m.data[r.Off:], r.Buf)
	}
	r.Done(r)
}

func (m *scripted) Adopt(context.Context, int64, int64, []string) error {
	return m.adopt(int(m.adopts.Add(1)))
}
func (m *scripted) Expand(context.Context, int64) error { return nil }
func (m *scripted) Close() error                        { return nil }
func (m *scripted) Mark(context.Context, int64) error   { return nil }
func (m *scripted) Clean(context.Context, int64, int64, []int64) error {
	m.cleaned.Store(true)
	return nil
}

func (m *scripted) Track(_ context.Context, on bool) error {
	m.calls = append(m.calls, fmt.Sprint("track ", on))
	return nil
}

func (m *scripted) Unnoted(_ context.Context, epoch int64) error {
	m.calls = append(m.calls, fmt.Sprint("unnoted ", epoch))
	if m.full {
		return api.Errorf(api.Full, "no room on the disk")
	}
	return nil
}

func (m *scripted) Intents(context.Context) (stack.Intents, error) {
	return stack.Intents{Region: cmp.Or(m.region, cleanRegion), Base: 1, Joined: 1, Regions: m.dirty}, nil
}

func (m *scripted) Intend(_ context.Context, regions []int64) error {
	m.intended = append(m.intended, regions...)
	return nil
}

func (m *scripted) Digests(_ context.Context, off, n int64) (sums []byte, err error) {
	for ; n > 0; off, n = off+block.Size, n-block.Size {
		s := sha256.Sum256(m.data[off : off+block.Size])
		sums = append(sums, s[:digestSize]...)
	}
	return sums, nil
}

// TestMissingMemberNeverServes: after an unclean end two members differ, and the engine does not reach the second
// member at the open, so the engine cannot resync it. The first member, which has to vouch for the drop, is then
// unreachable for a moment. The missing member must not serve in its place, and the engine clears no intent: only the
// intents record the difference.
func TestMissingMemberNeverServes(t *testing.T) {
	l := newLoop(t)
	vouched := make(chan struct{})
	kept := &scripted{data: bytes.Repeat([]byte{'A'}, 1<<20), dirty: []int64{0}, adopt: func(n int) error {
		switch n {
		case 2: // the first probe of the drop
			return errAway
		case 3:
			close(vouched)
		}
		return nil
	}}
	asked := make(chan struct{}, 8)
	late := &scripted{data: bytes.Repeat([]byte{'X'}, 1<<20), dirty: []int64{0}, adopt: func(n int) error {
		if n == 1 {
			return errAway
		}
		asked <- struct{}{}
		return nil
	}}
	dropped := make(chan string, 2)
	e, err := Open(t.Context(), Config{Loop: l, Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true, Lenient: true,
		Resync: true, Members: []Named{{Name: "kept", Member: kept}, {Name: "late", Member: late}},
		Drop:   func(context.Context, int64, string) error { return nil },
		OnDrop: func(m string, _ error) { dropped <- m }})
	if err != nil {
		t.Fatal(err)
	}
	e.SetWhole(5, true) // as the API says: both are members
	if got := e.Missing(); len(got) != 1 || got[0] != "late" {
		t.Errorf("missing: %v", got)
	}
	select {
	case <-asked:
		t.Error("the member that nobody resynced is asked to serve again")
	case <-vouched:
	}
	if !t.Failed() {
		if m := within(t, "drop", dropped); m != "late" {
			t.Errorf("dropped %s", m)
		}
	}
	read := func() byte {
		buf := block.AlignedBuffer(block.Size)
		done := make(chan error, 1)
		r := &block.Request{Op: block.OpRead, Len: block.Size, Buf: buf, Done: func(q *block.Request) { done <- q.Err }}
		l.Post(func() { e.Submit(r) })
		if err := within(t, "read", done); err != nil {
			t.Error(err)
		}
		return buf[0]
	}
	if got := read(); got != 'A' {
		t.Errorf("block 0 reads %c", got)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if kept.cleaned.Load() || late.cleaned.Load() {
		t.Error("the intents are cleared, and two replicas differ")
	}
}

// TestIOWaitsForTheMemberThatWasReached: if the only member that the engine reached is away, I/O waits for this member,
// even if the missing member answers by now.
func TestIOWaitsForTheMemberThatWasReached(t *testing.T) {
	l := newLoop(t)
	looks := make(chan struct{}, 64)
	kept := &scripted{data: make([]byte, 1<<20), adopt: func(n int) error {
		if n == 1 {
			return nil
		}
		select {
		case looks <- struct{}{}:
		default:
		}
		return errAway
	}}
	late := &scripted{data: make([]byte, 1<<20), adopt: func(n int) error {
		if n == 1 {
			return errAway
		}
		t.Error("the member that nobody resynced is asked to serve again")
		return nil
	}}
	e, err := Open(t.Context(), Config{Loop: l, Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true, Lenient: true,
		Members: []Named{{Name: "kept", Member: kept}, {Name: "late", Member: late}},
		Drop: func(context.Context, int64, string) error {
			t.Error("a member is dropped, and nobody vouched")
			return api.Errorf(api.Denied, "no")
		}})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		within(t, "look at the member that was reached", looks)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestFullDiskNotesIntents: a member whose disk has no room for the record "no intents noted" notes intents.
func TestFullDiskNotesIntents(t *testing.T) {
	m := &scripted{data: make([]byte, 1<<20), full: true, adopt: func(int) error { return nil }}
	e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1,
		Members: []Named{{Name: "a", Member: m, Local: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if want := []string{"unnoted 5", "track true"}; !slices.Equal(m.calls, want) {
		t.Errorf("calls %q, want %q", m.calls, want)
	}
	if err := e.NoteIntents(t.Context()); err != nil || len(m.calls) != 2 {
		t.Errorf("a replica may join: %v; calls %q", err, m.calls)
	}
}
