package engine

import (
	"syscall"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestDamagedMemberStays: a member with damage at the place of a read stays a member; a member that fails otherwise is
// dropped.
func TestDamagedMemberStays(t *testing.T) {
	r := newRig(t, 3, nil)
	copy(r.m[1].data, fill(4096, 9))
	damaged := api.Errorf(api.Corrupt, "the disk: %w", syscall.EIO)
	for range 2 {
		buf := make([]byte, 4096)
		done := r.start(block.OpRead, 0, buf, 0)
		r.answer(0, 0, damaged)
		r.answer(1, 0, nil)
		is(t, done, nil)
		if buf[100] != 9 {
			t.Fatal("not what the second member has")
		}
	}
	if ep, names, _ := r.e.Epoch(t.Context()); ep != 7 || len(names) != 3 {
		t.Fatalf("epoch %d of %v", ep, names)
	}
	done := r.start(block.OpRead, 0, make([]byte, 4096), 0)
	r.answer(0, 0, damaged)
	r.answer(1, 0, damaged)
	r.answer(2, 0, damaged)
	is(t, done, syscall.EIO)
	done = r.start(block.OpRead, 0, make([]byte, 4096), 0)
	r.answer(0, 0, damaged)
	r.answer(1, 0, syscall.EIO)
	r.answer(2, 0, nil)
	is(t, done, nil)
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("dropped %s", m)
	}
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
}

// TestDamagedMemberAlone: one member is damaged at the place of a read, and the other does not answer. The engine drops
// the silent member, and the guest gets an error.
func TestDamagedMemberAlone(t *testing.T) {
	damaged := api.Errorf(api.Corrupt, "the disk: %w", syscall.EIO)
	away := api.Errorf(api.Unavailable, "no answer")
	for _, c := range []struct {
		first, second error
		left          int
		dropped       string
	}{{damaged, away, 0, "b"}, {away, damaged, 1, "a"}} {
		r := newRig(t, 2, nil)
		done := r.start(block.OpRead, 0, make([]byte, 4096), 0)
		r.answer(0, 0, c.first)
		r.answer(1, 0, c.second)
		if m := within(t, "drop that is asked for", r.drops); m != c.dropped {
			t.Fatalf("dropped %s, not %s", m, c.dropped)
		}
		r.settle <- nil
		within(t, "word of a drop", r.dropped)
		r.answer(c.left, 0, damaged)
		is(t, done, syscall.EIO)
	}
}
