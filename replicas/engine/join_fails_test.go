package engine

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// forgetful is a keeper whose Forget the test answers.
type forgetful struct {
	*keeper
	forget func(context.Context) error
}

func (f forgetful) Forget(ctx context.Context, uid string) error {
	if err := f.forget(ctx); err != nil {
		return err
	}
	return f.keeper.Forget(ctx, uid)
}

// TestDropSnapshotBesideAJoin: a user deletes a snapshot, and a replica asks for its membership before the replica has
// answered. If the replica does not delete the snapshot, the replica does not become a member, and the join names the
// cause. Else the replica becomes a member.
func TestDropSnapshotBesideAJoin(t *testing.T) {
	late := api.Errorf(api.Unavailable, "too late")
	for name, c := range map[string]struct {
		forget func(context.Context) error
		cause  error
	}{
		"the replica deletes it":      {forget: func(context.Context) error { return nil }},
		"the replica fails":           {func(context.Context) error { return syscall.EIO }, syscall.EIO},
		"the replica does not answer": {func(ctx context.Context) error { <-ctx.Done(); return late }, late},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := stack.Snapshot{UID: "s", Name: "s", Layer: "l", Created: time.Unix(1, 0)}
				there, ready, goOn, answer := newKeeper(s), make(chan struct{}), make(chan struct{}), make(chan struct{})
				back := forgetful{newKeeper(s), func(ctx context.Context) error { <-answer; return c.forget(ctx) }}
				e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true,
					Members: []Named{{Name: "there", Member: there}},
					Drop:    func(context.Context, int64, string) error { return nil },
					Add:     func(context.Context, int64, string) error { return nil }})
				if err != nil {
					t.Fatal(err)
				}
				joined, deleted := make(chan error, 1), make(chan error, 1)
				go func() {
					_, err := e.Join(t.Context(), Named{Name: "back", Member: back},
						JoinOptions{OnSwap: func() error { close(ready); <-goOn; return nil }})
					joined <- err
				}()
				<-ready
				go func() { deleted <- e.DropSnapshot(t.Context(), "s") }()
				synctest.Wait() // the replica has the question
				close(goOn)
				synctest.Wait() // the join has asked for the membership
				close(answer)
				if err := <-deleted; err != nil {
					t.Error(err)
				}
				if err := within(t, "join", joined); !errors.Is(err, c.cause) {
					t.Errorf("the join: %v", err)
				}
				_, members, err := e.Epoch(t.Context())
				if is := slices.Contains(members, "back"); err != nil || is != (c.cause == nil) {
					t.Errorf("the snapshot is said to be deleted; members %v, %v", members, err)
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// awaitsSwap opens an engine of one member, and a replica joins up to its swap. The function swap lets the join ask for
// the swap; added reports whether the engine made the swap.
func awaitsSwap(t *testing.T, late *memory) (r *rig, swap func(), joined chan error, added *atomic.Bool) {
	added = &atomic.Bool{}
	r = newRig(t, 1, func(c *Config) {
		c.Members[0].Member.(*memory).auto = true
		c.Members[0].Member = mirror{memory: c.Members[0].Member.(*memory)}
		c.Track = true
		c.Add = func(context.Context, int64, string) error { added.Store(true); return nil }
		c.Drop = func(context.Context, int64, string) error { return nil }
	})
	ready, goOn := make(chan struct{}), make(chan struct{})
	joined = make(chan error, 1)
	go func() {
		_, err := r.e.Join(t.Context(), Named{Name: "late", Member: mirror{memory: late}},
			JoinOptions{OnSwap: func() error { close(ready); <-goOn; return nil }})
		joined <- err
	}()
	<-ready
	r.l.do(func() { r.m[0].auto, late.auto = false, false })
	return r, func() { close(goOn) }, joined, added
}

// TestJoinerThatFailsBeforeItsSwap: a write to a joining replica fails while a member still has the write in progress,
// and then the join asks for its swap. The engine makes no swap, and the join names the cause.
func TestJoinerThatFailsBeforeItsSwap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := &memory{t: t, data: make([]byte, testSize), auto: true}
		r, swap, joined, added := awaitsSwap(t, late)
		write := r.start(block.OpWrite, 0, fill(4096, 1), 0)
		r.l.do(func() {
			late.fail = func(*block.Request) error { return syscall.EIO }
			late.next(0)
		})
		swap()
		synctest.Wait() // the join has asked for the swap
		r.answer(0, 0, nil)
		is(t, write, nil)
		if err := within(t, "join", joined); !errors.Is(err, syscall.EIO) || added.Load() {
			t.Errorf("the join: %v; a swap was made: %v", err, added.Load())
		}
		r.close()
	})
}

// TestFormerJoinerIsNoCause: two writes to a joining replica fail, the second one after the volume's member has failed
// it as well. The guest hears the member's error.
func TestFormerJoinerIsNoCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := &memory{t: t, data: make([]byte, testSize), auto: true}
		r, swap, joined, _ := awaitsSwap(t, late)
		late.fail = func(*block.Request) error { return syscall.EIO }
		first := r.start(block.OpWrite, 0, fill(4096, 1), 0)
		second := r.start(block.OpWrite, 8192, fill(4096, 1), 0)
		r.l.do(func() { late.next(0) })
		r.answer(0, 1, syscall.EROFS)
		r.l.do(func() { late.next(0) })
		r.answer(0, 0, nil)
		swap()
		is(t, first, nil)
		is(t, second, syscall.EROFS)
		if err := within(t, "join", joined); !errors.Is(err, syscall.EIO) {
			t.Errorf("the join: %v", err)
		}
		r.close()
	})
}
