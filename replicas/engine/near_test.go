package engine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
)

// hangs is a replica whose disk hangs when it is closed.
type hangs struct {
	Cutter
	goOn chan struct{}
}

func (h hangs) Close() error { <-h.goOn; return nil }

// slowCall is a replica that is slow to answer a call.
type slowCall struct {
	Cutter
	goOn   chan struct{}
	closed *bool
}

func (s slowCall) Track(context.Context, bool) error { <-s.goOn; return nil }
func (s slowCall) Close() error                      { *s.closed = true; return nil }

// TestNearEndsBesideACall: a call that its caller did not wait for is under way when a replica is closed. That is no
// reason to give the replica up: it is closed once the call has ended, and only then is it said to be.
func TestNearEndsBesideACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, slow := NewWatch(), slowCall{goOn: make(chan struct{}), closed: new(bool)}
		n := NewNear(slow, NearOptions{Watch: w, Replica: "r"})
		ctx, cancel := context.WithCancel(t.Context())
		asked := make(chan error)
		go func() { asked <- n.Track(ctx, true) }()
		synctest.Wait()
		cancel()
		if err := <-asked; err == nil {
			t.Fatal("the call was answered")
		}
		time.AfterFunc(time.Second, func() {
			if w.Buried("r") {
				t.Error("it is given up")
			}
			close(slow.goOn)
		})
		if err := n.Close(); err != nil || !*slow.closed || w.Buried("r") {
			t.Errorf("the end: %v; closed: %t, given up: %t", err, *slow.closed, w.Buried("r"))
		}
		w.Close()
	})
}

// TestNearHangsAtItsEnd: a disk that begins to hang when a replica is closed is not waited for, and nobody has the
// replica before it goes on.
func TestNearHangsAtItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, h := NewWatch(), hangs{goOn: make(chan struct{})}
		n := NewNear(h, NearOptions{Watch: w, Replica: "r"})
		if err := n.Close(); !api.Is(err, api.Unavailable) {
			t.Errorf("the end of a replica whose disk hangs: %v", err)
		}
		if !w.Buried("r") {
			t.Error("the replica is said to be free")
		}
		close(h.goOn)
		synctest.Wait()
		if w.Buried("r") || w.Waits() > 0 {
			t.Error("the disk has answered, and the replica is not free")
		}
		w.Close()
	})
}
