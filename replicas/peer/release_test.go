package peer

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"drover.io/drover/block/suite"
)

// TestRelease: the other node takes its replica back while an engine uses the replica. The engine gets the replica
// again later.
func TestRelease(t *testing.T) {
	suite.Slow(t)
	f := newFar(t, testSize, nil)
	d := newDialer(t, f.at)
	loop := startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1)
	g := &guest{t: t, m: m, loop: loop, rng: rand.New(rand.NewPCG(4, 4)), model: make([]byte, testSize)}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(30 * time.Millisecond)
		defer tick.Stop()
		for before := int64(0); ; {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			now := g.ended.Load()
			if now == before { // a busy machine opens the replica more slowly than the test releases
				continue
			}
			before = now
			if err := f.s.Release(f.uid); err != nil {
				t.Error(err)
			}
		}
	}()
	g.run(3000, 16)
	close(stop)
	within(t, "end of what was begun", done)
	g.run(1, 1) // the last release may have ended the session: Close needs a session
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	compare(t, f, g.model, nil)
}

// TestLinger: the server closes a replica if no engine comes back.
func TestLinger(t *testing.T) {
	f := newFar(t, testSize, nil)
	p := newProxy(t, f.at)
	d := newDialer(t, at(p.ln.Addr().String()))
	m := member(t, d, f, startLoop(t), nil)
	adoptAs(t, m, 1, 1)
	_ = p.ln.Close()
	p.cut()
	for deadline := time.Now().Add(time.Minute); f.s.Serves(f.uid); {
		if time.Now().After(deadline) {
			t.Fatal("the replica stays open")
		}
		tick := time.NewTimer(10 * time.Millisecond)
		<-tick.C
	}
	if err := m.Close(); err == nil {
		t.Error("the end of a session that was not reached is said to be clean")
	}
}

// TestReleaseFromWaitsForNoDisk: the sessions of a former engine end although the disk hangs. The server waits for the
// disk in its Close.
func TestReleaseFromWaitsForNoDisk(t *testing.T) {
	d := &stuckDisk{}
	defer d.resume()
	f := newFar(t, testSize, func(o *ServerOptions) { o.Open = d.open(o.Open) })
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	adoptAs(t, m, 1, 1)
	c, session := m.c, m.session
	d.hang("close")
	released := make(chan bool, 1)
	go func() { released <- f.s.ReleaseFrom(f.uid, "near") }()
	d.awaitHang("close")
	s, closed := f.s, make(chan struct{})
	if !within(t, "end of the release", released) {
		t.Error("the replica is said not to serve the node")
	}
	if f.s.ReleaseFrom(f.uid, "near") {
		t.Error("the replica is said to serve the node after the end of the sessions")
	}
	if _, err := m.callRaw(t.Context(), c, session, kindCall, []byte("meta\n{}")); err == nil {
		t.Error("a call of the session that ended has an answer")
	}
	go func() { s.Close(); close(closed) }()
	for !s.isClosed() {
		runtime.Gosched()
	}
	select {
	case <-closed:
		t.Error("the server ended before the replica")
	default:
	}
	d.resume()
	within(t, "end of the server", closed)
}
