package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
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

// flood makes n connections to addr as fast as possible, half of them from the engines' address and half from 80 other
// addresses, and sends nothing. A client keeps its last 500 connections, to exhaust the server, and closes older ones.
func flood(addr string, n int) error {
	const clients, kept = 8, 500
	ends := make(chan error, clients)
	for c := range clients {
		go func() {
			var open [kept]net.Conn
			for i := range n / clients {
				from := net.IPv4(127, 0, 0, 1)
				if c%2 == 1 {
					from = net.IPv4(127, 0, byte(c), byte(1+i%20))
				}
				dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
				nc, err := dial.Dial("tcp", addr)
				if err != nil {
					ends <- fmt.Errorf("connection %d: %w", i, err)
					return
				}
				if old := open[i%kept]; old != nil {
					_ = old.Close()
				}
				open[i%kept] = nc
			}
			ends <- nil
		}()
	}
	var errs []error
	for range clients {
		errs = append(errs, <-ends)
	}
	return errors.Join(errs...)
}

// floodAs has a process of a user without rights flood addr. The channel gets the error of the process.
func floodAs(t *testing.T, user uint32, addr string, n int) <-chan error {
	t.Helper()
	// The folder of the test's program is closed to others: /proc/self/exe is not.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{floodVariable + "=" + addr, fmt.Sprintf("%s=%d", floodVariable+"_COUNT", n)}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := make(chan error, 1)
	go func() {
		if err := cmd.Wait(); err != nil {
			end <- fmt.Errorf("flood: %w: %s", err, out)
		}
		close(end)
	}()
	return end
}

const floodVariable = "DROVER_TEST_FLOOD"

// floodMain is the process of floodAs.
func floodMain() int {
	n, err := strconv.Atoi(os.Getenv(floodVariable + "_COUNT"))
	if err == nil {
		err = flood(os.Getenv(floodVariable), n)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// TestFloodOfUnknownConnections: a user without rights makes connections, as many and as fast as possible. No session
// of an engine breaks, and other engines can begin sessions meanwhile and afterwards.
func TestFloodOfUnknownConnections(t *testing.T) {
	suite.System(t) // for the user without rights
	f := newFar(t, testSize, nil)
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1)
	write := func(m *Member) {
		t.Helper()
		if err := Do(context.Background(), loop, m, &block.Request{Op: block.OpWrite, Len: block.Size,
			Buf: block.AlignedBuffer(block.Size)}); err != nil {
			t.Fatal(err)
		}
	}
	write(m)
	c := connOf(m)
	start := func() <-chan error {
		return floodAs(t, 65534, f.at(), suite.Count(t, "DROVER_CONNECTIONS", 5_000, 20_000))
	}
	end := start()
	writes, tries, probes, most := 0, 0, 0, 0
	for floods := 1; floods > 0; {
		select {
		case err := <-end:
			switch {
			case err != nil:
				t.Fatal(err)
			case probes > 0:
				floods = 0
			case floods == 20:
				t.Fatalf("none of %d new engines got through", tries)
			default: // the machine had time for few attempts
				floods, end = floods+1, start()
			}
		default:
		}
		write(m)
		if writes++; writes%10 != 1 {
			continue
		}
		other := newDialer(t, f.at)
		next := member(t, other, f, loop, nil)
		tries++
		if _, _, err := next.Probe(context.Background()); err == nil {
			probes++
		}
		_ = next.Close()
		other.Close()
		f.s.mu.Lock()
		n := len(f.s.conns)
		f.s.mu.Unlock()
		most = max(most, n)
	}
	if most > 1024 { // the bound, and ending connections
		t.Errorf("the server held %d connections at once", most)
	}
	t.Logf("%d writes during the flood, %d of %d new engines, at most %d connections at once", writes, probes, tries, most)
	if connOf(m) != c {
		t.Error("the engine's connection broke")
	}
	next := member(t, newDialer(t, f.at), f, loop, nil)
	adoptAs(t, next, 2, 1)
	write(next)
	_ = m.Close()
	if err := next.Close(); err != nil {
		t.Error(err)
	}
}

// TestIdleConnectionsEnd: a connection without sessions ends, a connection with a session stays, and an adoption makes
// a new connection.
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

// TestSilenceEndsAConnection: the server closes a silent connection in bounded time.
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
