package peer

import (
	"context"
	"sync"
	"testing"

	"drover.io/drover/block"
)

// lateDisk is a replica with a late write of an older session, during the adoption of a newer session. The write comes
// between the first drain and the change of the sessions, and reaches the disk in the second drain.
type lateDisk struct {
	*Backend
	loop    Loop
	at      int64         // incarnation
	adopted chan struct{} // closed once the adoption is durable
	goOn    chan struct{}
	came    chan struct{} // closed once the late write came

	mu     sync.Mutex
	second bool
	under  *block.Request
}

func (r *lateDisk) Submit(q *block.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.adopted:
		if q.Op == block.OpWrite && !r.second && r.under == nil {
			r.under = q
			close(r.came)
			return
		}
	default:
	}
	r.Backend.Submit(q)
}

func (r *lateDisk) AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error {
	err := r.Backend.AdoptFor(ctx, node, epoch, incarnation, members)
	if incarnation == r.at {
		close(r.adopted)
		<-r.goOn
	}
	return err
}

func (r *lateDisk) Drain(ctx context.Context) error {
	r.mu.Lock()
	r.second = true
	under := r.under
	r.mu.Unlock()
	if under != nil {
		sent := make(chan struct{})
		r.loop.Post(func() { r.Backend.Submit(under); close(sent) })
		<-sent
	}
	return r.Backend.Drain(ctx)
}

// TestAdoptDrainsAfterItChangedSessions: until the server serves the newer session, the server takes requests of the
// older session. ADOPT answers after the end of these requests, too. Else a late write of the older engine overwrites a
// write of the newer engine.
func TestAdoptDrainsAfterItChangedSessions(t *testing.T) {
	disk := &lateDisk{at: 12, adopted: make(chan struct{}), goOn: make(chan struct{}), came: make(chan struct{})}
	f := newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			r, loop, err := open(ctx, uid, volume)
			if err != nil {
				return nil, nil, err
			}
			disk.Backend, disk.loop = r.(*Backend), loop
			return disk, loop, nil
		}
	})
	d := newDialer(t, f.at)
	loop := startLoop(t)
	ctx := context.Background()
	old, now := member(t, d, f, loop, nil), member(t, d, f, loop, nil)
	adoptAs(t, old, 1, 11)
	newer := make(chan error, 1)
	go func() { newer <- now.Adopt(ctx, 2, 12, []string{f.uid}) }()
	within(t, "first drain", disk.adopted)
	late := make(chan error, 1)
	go func() {
		late <- Do(ctx, loop, old, &block.Request{Op: block.OpWrite, Len: block.Size, Buf: block.AlignedBuffer(block.Size)})
	}()
	within(t, "write of the older engine", disk.came)
	close(disk.goOn)
	if err := within(t, "newer session", newer); err != nil {
		t.Fatal(err)
	}
	disk.mu.Lock()
	drained, under := disk.second, disk.under
	disk.mu.Unlock()
	if !drained {
		t.Error("the newer engine is adopted while a write of the older one is under way")
		f.loop.Post(func() { disk.Backend.Submit(under) })
	}
	<-late // with an error or without
	_ = old.Close()
	if err := now.Close(); err != nil {
		t.Error(err)
	}
}
