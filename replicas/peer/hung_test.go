package peer

import (
	"context"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/engine"
)

// TestHung: the other side stops answering. Every request gets an answer in bounded time, and a new Adopt takes the
// member back.
func TestHung(t *testing.T) {
	suite.Slow(t)
	f := newFar(t, testSize, nil)
	p := newProxy(t, f.at)
	d := newDialer(t, at(p.ln.Addr().String()))
	loop := startLoop(t)
	var s stalls // short only for a hanging connection, not for a busy connection
	short := func() { s.set(2*time.Second, 3*time.Second) }
	m := newWatch(t).Member(member(t, d, f, loop, nil), engine.WatchOptions{Loop: loop, Replica: f.uid, Timeout: s.get})
	adopt := func() {
		t.Helper()
		if err := m.Adopt(t.Context(), 1, 1, []string{f.uid}); err != nil {
			t.Fatal(err)
		}
	}
	adopt()
	g := &guest{t: t, m: m, loop: loop, rng: rand.New(rand.NewPCG(3, 3)), model: make([]byte, testSize)}
	g.run(500, 16)
	short()
	p.freeze(true)
	failed := 0
	g.fail = func(r *block.Request) {
		failed++
		if !api.Is(r.Err, api.Unavailable) {
			t.Errorf("the error is %v", r.Err)
		}
	}
	g.run(200, 16)
	if failed != 200 {
		t.Errorf("%d requests failed", failed)
	}
	s.set(endless, endless)
	p.freeze(false)
	adopt()
	g.fail, g.model = nil, make([]byte, testSize) // failed writes may be on the disk or not: zeros replace all
	zero := &block.Request{Op: block.OpZero, Len: testSize}
	if err := Do(context.Background(), loop, m, zero); err != nil {
		t.Fatal(err)
	}
	g.run(500, 16)
	// The last member has no stall timeout.
	m.Last(true)
	short()
	p.freeze(true)
	ran := make(chan struct{})
	go func() { g.run(100, 4); close(ran) }()
	select {
	case <-ran:
		t.Error("nothing was frozen")
	case <-time.After(4 * time.Second): // longer than the stall timeout
	}
	p.freeze(false)
	within(t, "end of the requests", ran)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	compare(t, f, g.model, nil)
}

// TestFence has a second engine take over, and a machine restart.
func TestFence(t *testing.T) {
	f := newFar(t, testSize, nil)
	d := newDialer(t, f.at)
	loop := startLoop(t)
	ctx := context.Background()
	old, now := member(t, d, f, loop, nil), member(t, d, f, loop, nil)
	adoptAs(t, old, 1, 1)
	buf := block.AlignedBuffer(block.Size)
	write := func(m *Member) error {
		return Do(ctx, loop, m, &block.Request{Op: block.OpWrite, Len: block.Size, Buf: buf})
	}
	if err := write(old); err != nil {
		t.Fatal(err)
	}
	adoptAs(t, now, 2, 1)
	if err := write(old); !api.Is(err, api.Denied) {
		t.Errorf("a fenced engine writes: %v", err)
	}
	if err := old.Adopt(ctx, 1, 2, []string{f.uid}); !api.Is(err, api.Denied) {
		t.Errorf("a fenced engine is adopted: %v", err)
	}
	if err := write(now); err != nil {
		t.Errorf("the new engine: %v", err)
	}
	if err := Do(ctx, loop, now, &block.Request{Op: block.OpWrite, Off: testSize, Len: block.Size,
		Buf: buf}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("the errno of an answer: %v", err)
	}
	f.o.Boot = "another"
	f.stop()
	f.start()
	if err := write(now); !errors.Is(err, ErrRestarted) {
		t.Errorf("after a restart of its machine: %v", err)
	}
	if err := now.Adopt(ctx, 3, 1, []string{f.uid}); !errors.Is(err, ErrRestarted) {
		t.Errorf("it is adopted after a restart: %v", err)
	}
	_ = old.Close()
	_ = now.Close()
}
