package peer

import (
	"runtime"
	"testing"
	"time"
)

// dialPrompt connects a client to a server of prompt replicas with an idle time.
func dialPrompt(t *testing.T, idle time.Duration) (*far, *greedy) {
	t.Helper()
	f := newFar(t, testSize, func(o *ServerOptions) { o.Linger = idle })
	f.stop()
	withPrompt(f)
	f.start()
	g := dialGreedy(t, f)
	g.say(header{kind: kindHello}, hello{Version: Version, MinVersion: minVersion, Node: "greedy"})
	g.next()
	return f, g
}

// TestSessionsBeginAtTheEndOfTheIdleTime: sessions begin at the same time as the idle time of their replica ends. Each
// session begins, and no session ends before its engine ends it.
func TestSessionsBeginAtTheEndOfTheIdleTime(t *testing.T) {
	_, g := dialPrompt(t, 100*time.Microsecond)
	for i := range uint32(10000) {
		for began := time.Now(); time.Since(began) < time.Duration(i%200)*time.Microsecond; {
			runtime.Gosched()
		}
		if err := g.open(i, "r"); err != nil {
			t.Fatalf("session %d does not begin: %v", i, err)
		}
		g.say(header{kind: kindClose, session: i, id: uint64(i)}, none{})
		if err := g.answer(); err != nil {
			t.Fatalf("the end of session %d: %v", i, err)
		}
	}
}

// TestIdleTimeEndsNoSession: the idle time of a replica has ended, and a session begins before the server closes the
// replica. The session stays. After the session's end the server closes the replica.
func TestIdleTimeEndsNoSession(t *testing.T) {
	f, g := dialPrompt(t, time.Hour)
	if err := g.open(1, "r"); err != nil {
		t.Fatal(err)
	}
	f.s.mu.Lock()
	r := f.s.targets["r"]
	f.s.mu.Unlock()
	r.closeIdle()
	g.say(header{kind: kindClose, session: 1, id: 2}, none{})
	if err := g.answer(); err != nil {
		t.Errorf("the end of the session: %v", err)
	}
	if r.closeIdle(); f.s.Serves("r") {
		t.Error("the replica stays open without a session")
	}
}
