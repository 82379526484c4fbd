package engine

import (
	"bytes"
	"context"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// halfSize is the size of a region of these members: each member has two regions.
const halfSize = int64(64) << 10

// differs is a member of two regions. The second region is filled with b, so members with another b differ.
func differs(b byte, dirty ...int64) *scripted {
	m := &scripted{data: make([]byte, 2*halfSize), region: halfSize, dirty: dirty, adopt: func(int) error { return nil }}
	copy(m.data[halfSize:], bytes.Repeat([]byte{b}, int(halfSize)))
	return m
}

// joins opens an engine of one member, and a second member joins.
func joins(t *testing.T, there, back *scripted, add func() error) error {
	t.Helper()
	e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 2 * halfSize, Epoch: 5, Incarnation: 1, Track: true,
		Members: []Named{{Name: "there", Member: there}},
		Drop:    func(context.Context, int64, string) error { return nil },
		Add:     func(context.Context, int64, string) error { return add() }})
	if err != nil {
		t.Fatal(err)
	}
	_, joined := e.Join(t.Context(), Named{Name: "back", Member: back}, JoinOptions{})
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	return joined
}

// TestJoinCopiesTheIntentsOfBothSides: a join copies the regions in the intents of the member, and the regions in the
// intents of the returning replica. Neither side knows the other side's writes.
func TestJoinCopiesTheIntentsOfBothSides(t *testing.T) {
	for name, c := range map[string]struct{ there, back *scripted }{
		"the member's":  {differs('A', 1), differs('B')},
		"the replica's": {differs('A'), differs('B', 1)},
	} {
		if err := joins(t, c.there, c.back, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(c.there.data, c.back.data) {
			t.Errorf("only %s intents tell of a region: the replica is a member and differs there", name)
		}
		if name == "the member's" && !slices.Contains(c.back.intended, 1) {
			t.Error("the replica has not noted what the member had noted: a third one may differ there")
		}
	}
}

// TestOpenCopiesTheIntentsOfAllMembers: after an unclean end, any member's intents may name a region that the other
// members' intents lack. The open copies all such regions.
func TestOpenCopiesTheIntentsOfAllMembers(t *testing.T) {
	for name, c := range map[string]struct{ a, b *scripted }{
		"the first":  {differs('A', 1), differs('B')},
		"the second": {differs('A'), differs('B', 1)},
	} {
		e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 2 * halfSize, Epoch: 5, Incarnation: 1, Track: true,
			Resync: true, Members: []Named{{Name: "a", Member: c.a}, {Name: "b", Member: c.b}},
			Drop: func(context.Context, int64, string) error { return nil }})
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(c.a.data, c.b.data) {
			t.Errorf("only %s member's intents tell of a region: both serve, and differ there", name)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestJoinFlushesBeforeTheSwap: the swap says that the replica has all flushed content, so the copy must be durable
// before. A replica that cannot flush does not become a member.
func TestJoinFlushesBeforeTheSwap(t *testing.T) {
	for _, fails := range []bool{false, true} {
		there, back := differs('A', 1), differs('B')
		var written, durable atomic.Bool
		back.before = func(r *block.Request) error {
			switch r.Op {
			case block.OpFlush:
				if fails {
					return syscall.EIO
				}
				durable.Store(written.Load())
			case block.OpWrite:
				written.Store(true)
				durable.Store(false)
			}
			return nil
		}
		added := false
		err := joins(t, there, back, func() error {
			if added = true; !durable.Load() {
				t.Error("the replica is made a member, and its copy is not on its disk")
				return api.Errorf(api.NotFound, "no")
			}
			return nil
		})
		if added == fails || (err != nil) != fails {
			t.Errorf("flush fails: %v, swap asked for: %v, join: %v", fails, added, err)
		}
	}
}

// lingers is a member whose Close takes as long as the test says.
type lingers struct {
	mirror
	goOn chan struct{}
}

func (m lingers) Close() error { <-m.goOn; return m.mirror.Close() }

// TestJoinWaitsForTheEndOfTheDroppedMember: the end of a dropped member's session ends every session with the replica.
// So a Join of the same replica begins no session before.
func TestJoinWaitsForTheEndOfTheDroppedMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		r := newRig(t, 2, func(c *Config) {
			for i, m := range c.Members {
				m.Member.(*memory).auto = true
				c.Members[i].Member = lingers{mirror{memory: m.Member.(*memory)}, goOn}
			}
			c.Add = func(context.Context, int64, string) error { return nil }
		})
		r.e.Suspect("b", errAway)
		within(t, "drop that is asked for", r.drops)
		r.settle <- nil
		within(t, "word of a drop", r.dropped)
		back := mirror{memory: &memory{t: t, data: make([]byte, testSize), auto: true}}
		joined := make(chan error, 1)
		go func() {
			_, err := r.e.Join(t.Context(), Named{Name: "b", Member: back}, JoinOptions{})
			joined <- err
		}()
		synctest.Wait()
		if back.epoch() != 0 || len(joined) > 0 {
			t.Error("the replica has adopted a session before the former one ended")
		}
		close(goOn)
		if err := <-joined; err != nil {
			t.Error(err)
		}
		r.close()
	})
}

// TestHangingReplicaTakesNoTurn: a replica that does not answer at the beginning of a join takes no turn from other
// joins.
func TestHangingReplicaTakesNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 1, func(c *Config) {
			c.Members[0].Member.(*memory).auto = true
			c.Members[0].Member = mirror{memory: c.Members[0].Member.(*memory)}
			c.Add = func(context.Context, int64, string) error { return nil }
		})
		hangs, turns := make(chan struct{}), 0
		back := mirror{memory: &memory{t: t, data: make([]byte, testSize), auto: true}}
		back.refuse = func(int64) error { <-hangs; return nil }
		joined := make(chan error, 1)
		go func() {
			_, err := r.e.Join(t.Context(), Named{Name: "b", Member: back}, JoinOptions{
				Turn: func(context.Context) (func(), error) { turns++; return func() { turns-- }, nil }})
			joined <- err
		}()
		synctest.Wait()
		if turns != 0 || len(joined) > 0 {
			t.Errorf("the replica has not answered, and holds %d turns", turns)
		}
		close(hangs)
		if err := <-joined; err != nil || turns != 0 {
			t.Errorf("%v; %d turns are held after the end", err, turns)
		}
		r.close()
	})
}
