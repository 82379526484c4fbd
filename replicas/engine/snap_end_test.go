package engine

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// shown is a member with a snapshot, whose content is open until SnapEnd. Like a member of another node, SnapEnd does
// nothing for a caller that has left.
type shown struct {
	*keeper
	open  atomic.Bool
	asked chan struct{}
}

func (m *shown) SnapDigests(ctx context.Context, _ string, _, n int64) ([]byte, error) {
	m.open.Store(true)
	select {
	case m.asked <- struct{}{}:
	default:
	}
	<-ctx.Done() // the piece takes long
	return make([]byte, n/block.Size*digestSize), ctx.Err()
}

func (m *shown) SnapEnd(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.open.Store(false)
	return nil
}

// TestSnapshotIsClosedAfterAJoin: a rebuild copies a snapshot, and ends because its caller gave up. The members close
// the snapshot: the node cannot merge the snapshot's layers before.
func TestSnapshotIsClosedAfterAJoin(t *testing.T) {
	there := &shown{keeper: newKeeper(stack.Snapshot{UID: "s", Name: "s", Layer: "l", Created: time.Unix(1, 0)}),
		asked: make(chan struct{}, 1)}
	there.dirty = []int64{0}
	e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true,
		Members: []Named{{Name: "there", Member: there}},
		Drop:    func(context.Context, int64, string) error { return nil },
		Add:     func(context.Context, int64, string) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	go func() { <-there.asked; giveUp() }()
	if _, err := e.Join(ctx, Named{Name: "back", Member: newKeeper()}, JoinOptions{}); err == nil {
		t.Error("the replica joined")
	}
	if there.open.Load() {
		t.Error("the rebuild has ended, and the member keeps the snapshot open: its layers are not merged")
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
