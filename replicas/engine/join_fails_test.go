package engine

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
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
