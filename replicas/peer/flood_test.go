package peer

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/listener"
	"drover.io/drover/block/suite"
)

func connOf(m *Member) *conn {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.c
}

// TestFloodOfUnknownConnections: connections without end from a user without rights, who says nothing, break no session
// of an engine, and another engine can begin one meanwhile.
func TestFloodOfUnknownConnections(t *testing.T) {
	f := newFar(t, testSize, func(o *ServerOptions) { o.Listen = listener.Options{Unknown: 32, PerSource: 4} })
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1)
	write := func(m *Member) {
		t.Helper()
		if err := Do(context.Background(), loop, m, &block.Request{Op: block.OpWrite, Len: block.Size,
			Buf: aligned(block.Size)}); err != nil {
			t.Fatal(err)
		}
	}
	c := connOf(m)
	for i := range 300 {
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(fmt.Sprintf("127.0.1.%d", 1+i%20))}}
		nc, err := dial.Dial("tcp", f.at())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if i%50 != 49 {
			continue
		}
		write(m)
		other := newDialer(t, f.at)
		next := member(t, other, f, loop, nil)
		if _, _, err := next.Probe(context.Background()); err != nil {
			t.Fatalf("after %d connections: %v", i, err)
		}
		_ = next.Close()
	}
	if connOf(m) != c {
		t.Error("the engine's connection broke")
	}
	f.s.mu.Lock()
	n := len(f.s.conns)
	f.s.mu.Unlock()
	if n > 32+16 {
		t.Errorf("%d connections are served", n)
	}
	next := member(t, newDialer(t, f.at), f, loop, nil)
	adoptAs(t, next, 2, 1)
	write(next)
	_ = m.Close()
	if err := next.Close(); err != nil {
		t.Error(err)
	}
}

// TestIdleConnectionsEnd: a connection without sessions ends, one with a session stays, and a new one is made when it is
// needed.
func TestIdleConnectionsEnd(t *testing.T) {
	suite.Slow(t)
	f := newFar(t, testSize, func(o *ServerOptions) { o.Idle = time.Millisecond })
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	if _, _, err := m.Probe(context.Background()); err != nil {
		t.Fatal(err)
	}
	lanes := d.lanesTo("far")
	lanes.mu.Lock()
	c := lanes.conns[m.lane]
	lanes.mu.Unlock()
	if c == nil {
		t.Fatal("no connection is there")
	}
	within(t, "end of the idle connection", c.closed) // after the next ping
	adoptAs(t, m, 1, 1)
	busy := connOf(m)
	late := time.NewTimer(3 * pingEvery)
	defer late.Stop()
	select {
	case <-busy.closed:
		t.Error("a connection with a session ended")
	case <-late.C:
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestSilenceEndsAConnection: one that says nothing is closed in bounded time.
func TestSilenceEndsAConnection(t *testing.T) {
	f := newFar(t, testSize, func(o *ServerOptions) { o.Listen = listener.Options{Deadline: 50 * time.Millisecond} })
	nc, err := net.Dial("tcp", f.at())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	gone := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, nc)
		gone <- err
	}()
	within(t, "end of a silent connection", gone)
}
