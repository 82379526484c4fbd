package peer

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// pausing is a replica whose Adopt of one incarnation pauses after the adoption is durable.
type pausing struct {
	*Backend
	at      int64
	reached chan struct{}
	goOn    chan struct{}
}

func (p *pausing) AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error {
	err := p.Backend.AdoptFor(ctx, node, epoch, incarnation, members)
	if err == nil && incarnation == p.at {
		p.at = 0
		close(p.reached)
		<-p.goOn
	}
	return err
}

// TestAdoptionsCross: two sessions adopt at the same time. In the end the server serves the newer session, and refuses
// the requests of the older session, which was served before.
func TestAdoptionsCross(t *testing.T) {
	reached, goOn := make(chan struct{}), make(chan struct{})
	f := newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			r, loop, err := open(ctx, uid, volume)
			if err != nil {
				return nil, nil, err
			}
			return &pausing{r.(*Backend), 12, reached, goOn}, loop, nil
		}
	})
	d := newDialer(t, f.at)
	loop := startLoop(t)
	ctx := context.Background()
	old, now := member(t, d, f, loop, nil), member(t, d, f, loop, nil)
	write := func(m *Member) error {
		return Do(ctx, loop, m, &block.Request{Op: block.OpWrite, Len: block.Size, Buf: block.AlignedBuffer(block.Size)})
	}
	adoptAs(t, old, 1, 11)
	older := make(chan error, 1)
	go func() { older <- old.Adopt(ctx, 1, 12, []string{f.uid}) }()
	within(t, "first session", reached)
	newer := make(chan error, 1)
	go func() { newer <- now.Adopt(ctx, 2, 13, []string{f.uid}) }()
	select { // the newer session adopts now, or waits for the older session
	case err := <-newer:
		newer <- err
	case <-time.After(300 * time.Millisecond):
	}
	close(goOn)
	if err := within(t, "newer session", newer); err != nil {
		t.Fatal(err)
	}
	within(t, "older session", older)
	if err := write(now); err != nil {
		t.Errorf("the newer engine: %v", err)
	}
	if err := write(old); !api.Is(err, api.Denied) {
		t.Errorf("the older engine writes: %v", err)
	}
	_ = old.Close()
	if err := now.Close(); err != nil {
		t.Error(err)
	}
}

// TestPanicInAdoptLeavesNoLock: a panic in an adoption leaves the lock of the replica free, for Close.
func TestPanicInAdoptLeavesNoLock(t *testing.T) {
	b := &Backend{cut: &stack.Cut{}} // of no replica: the abort of this cut panics
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the cut was aborted")
			}
		}()
		_ = b.AdoptFor(t.Context(), "near", 1, 1, nil)
	}()
	if !b.mu.TryLock() {
		t.Error("the lock of the replica is left")
	}
}
