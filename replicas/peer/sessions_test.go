package peer

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// panicking is a replica with a defect in a call.
type panicking struct{ Replica }

func (p panicking) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	if name == "meta" {
		var none []int
		_ = none[len(args)]
	}
	return p.Replica.Call(ctx, name, args)
}

// logged is a log for tests.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// TestPanicEndsItsSessionAlone: a call that panics gets an error, and so do all later requests of the same session.
// Other sessions of the connection continue, and the server opens the replica again.
func TestPanicEndsItsSessionAlone(t *testing.T) {
	var log logged
	f := newFar(t, 64<<20, nil)
	f.stop()
	withPrompt(f)
	open := f.o.Open
	f.o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
		r, l, err := open(ctx, uid, volume)
		if err == nil && uid == f.uid {
			r = panicking{r}
		}
		return r, l, err
	}
	f.o.Log = slog.New(slog.NewTextHandler(&log, nil))
	f.start()
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	other := d.Member(Options{Node: "far", Replica: "r", Volume: "prompt", Loop: loop})
	for other.lane != m.lane {
		other = d.Member(Options{Node: "far", Replica: "r", Volume: "prompt", Loop: loop})
	}
	adoptAs(t, m, 1, 1)
	adoptAs(t, other, 1, 1)
	content := bytes.Repeat([]byte{7}, block.Size)
	do := func(m *Member, op block.Op) error {
		r := block.Request{Op: op, Len: block.Size, Buf: slices.Clone(content)}
		err := Do(t.Context(), loop, m, &r)
		if err == nil && !bytes.Equal(r.Buf, content) && m != other {
			err = fmt.Errorf("something else was read")
		}
		return err
	}
	if err := do(m, block.OpWrite); err != nil {
		t.Fatal(err)
	}
	c := m.c
	_, err := m.State(t.Context())
	if !api.Is(err, api.Unavailable) {
		t.Fatalf("the call that panicked: %v", err)
	}
	for _, op := range []block.Op{block.OpWrite, block.OpRead, block.OpFlush} {
		if err := do(m, op); !api.Is(err, api.Unavailable) {
			t.Errorf("%v after it: %v", op, err)
		}
	}
	if _, err := m.Intents(t.Context()); !api.Is(err, api.Unavailable) {
		t.Errorf("a call after it: %v", err)
	}
	if err := do(other, block.OpRead); err != nil {
		t.Error(err)
	}
	if other.c != c || c.cause() != nil {
		t.Errorf("the connection broke: %v", c.cause())
	}
	if err := m.Close(); err == nil {
		t.Error("the end of the session is said to be clean")
	}
	log.mu.Lock()
	if text := log.buf.String(); !strings.Contains(text, "panicking.Call") || !strings.Contains(text, "level=ERROR") {
		t.Errorf("the log has no stack: %s", text)
	}
	log.mu.Unlock()
	m = member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 2)
	if err := do(m, block.OpRead); err != nil {
		t.Errorf("the replica is not opened again: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if s, err := f.disk.Stack(f.uid); err != nil || s.Dirty {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestEngineComesBackAfterAPanic: an engine loses its session by a panic, and adopts the replica again. The replica has
// the engine's former writes.
func TestEngineComesBackAfterAPanic(t *testing.T) {
	f := newFar(t, 64<<20, nil)
	f.stop()
	open := f.o.Open
	f.o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
		r, l, err := open(ctx, uid, volume)
		return panicking{r}, l, err
	}
	f.start()
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1)
	content := bytes.Repeat([]byte{7}, block.Size)
	w := block.Request{Op: block.OpWrite, Len: block.Size, Buf: slices.Clone(content)}
	if err := Do(t.Context(), loop, m, &w); err != nil {
		t.Fatal(err)
	}
	if _, err := m.State(t.Context()); !api.Is(err, api.Unavailable) {
		t.Fatalf("the call that panicked: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		err := m.Adopt(ctx, 1, 1, []string{f.uid})
		if err == nil {
			break
		}
		if ctx.Err() != nil || !api.Is(err, api.Unavailable) && !api.Is(err, api.Busy) {
			t.Fatalf("the replica is not adopted again: %v", err)
		}
	}
	r := block.Request{Op: block.OpRead, Len: block.Size, Buf: make([]byte, block.Size)}
	if err := Do(t.Context(), loop, m, &r); err != nil || !bytes.Equal(r.Buf, content) {
		t.Errorf("the replica after the panic: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// open opens a session, and returns the error in the answer.
func (g *greedy) open(session uint32, replica string) error {
	g.t.Helper()
	g.say(header{kind: kindOpen, session: session, id: uint64(session)}, openRequest{replica, "prompt"})
	return g.answer()
}

// answer is the error in the next answer.
func (g *greedy) answer() error {
	g.t.Helper()
	var hb [headerSize]byte
	h, err := readHeader(g.r, &hb)
	var b []byte
	if err == nil {
		b, err = readPayload(g.r, &h)
	}
	if err != nil {
		g.t.Fatal(err)
	}
	if h.status == 0 {
		return nil
	}
	return decodeFault(b)
}

// TestSessionsAreBounded: a connection opens no more sessions than an engine needs. New sessions of a replica end old
// sessions, but not the served session.
func TestSessionsAreBounded(t *testing.T) {
	f := newFar(t, testSize, nil)
	f.stop()
	withPrompt(f)
	f.start()
	g := newGreedy(t, f, "r") // session 1
	served := func() (n int) {
		f.s.mu.Lock()
		defer f.s.mu.Unlock()
		for c := range f.s.conns {
			c.mu.Lock()
			n += len(c.sessions)
			c.mu.Unlock()
		}
		return n
	}
	for i := range uint32(10 * replicaSessions) {
		if err := g.open(2+i, "r"); err != nil {
			t.Fatal(err)
		}
	}
	counted := func() int {
		f.s.sessions.mu.Lock()
		defer f.s.sessions.mu.Unlock()
		return f.s.sessions.all
	}
	if n := served(); n > replicaSessions+1 || n != counted() {
		t.Errorf("%d sessions with one replica, %d counted", n, counted())
	}
	if err := writeControl(g.nc, header{kind: kindFlush, session: 1, id: 9}, nil); err != nil {
		t.Fatal(err)
	}
	g.say(header{kind: kindOpen, session: 1, id: 10}, openRequest{"r", "prompt"})
	if err := errorsOf(g, 2); err[0] != nil || !api.Is(err[1], api.Invalid) {
		t.Errorf("the session that is served: %v; it is opened twice: %v", err[0], err[1])
	}
	session := uint32(10000)
	for ; ; session++ {
		err := g.open(session, fmt.Sprint("r-", session))
		if api.Is(err, api.Busy) {
			break
		}
		if err != nil || session > 10000+nodeSessions {
			t.Fatalf("session %d: %v", session, err)
		}
	}
	if n := served(); n != nodeSessions {
		t.Errorf("%d sessions", n)
	}
	g.say(header{kind: kindClose, session: 10001, id: 7}, struct{}{})
	if err := g.answer(); err != nil {
		t.Fatal(err)
	}
	if err := g.open(session, "last"); err != nil {
		t.Errorf("there is room again: %v", err)
	}
	_ = g.nc.Close()
	for served() > 0 || counted() > 0 {
		tick := time.NewTimer(10 * time.Millisecond)
		<-tick.C
	}
}

// errorsOf are the errors in the next answers, by the ids of the requests.
func errorsOf(g *greedy, n int) []error {
	g.t.Helper()
	list := make([]error, n)
	for range n {
		var hb [headerSize]byte
		h, err := readHeader(g.r, &hb)
		var b []byte
		if err == nil {
			b, err = readPayload(g.r, &h)
		}
		if err != nil || h.id < 9 || h.id >= 9+uint64(n) {
			g.t.Fatalf("%+v: %v", h, err)
		}
		if h.status != 0 {
			list[h.id-9] = decodeFault(b)
		}
	}
	return list
}

// TestCloseOfAnEndedSessionKeepsTheConnection: a replica ended a session, as another session's end does, and the engine
// closes the session afterwards. The connection stays, with all other sessions.
func TestCloseOfAnEndedSessionKeepsTheConnection(t *testing.T) {
	f := newFar(t, testSize, nil)
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	c, err := d.lanesTo("far").connectLane(t.Context(), m.lane)
	if err != nil {
		t.Fatal(err)
	}
	const session = 1 << 20
	if err := m.callControl(t.Context(), c, session, kindOpen, openRequest{m.o.Replica, m.o.Volume}, &Info{}); err != nil {
		t.Fatal(err)
	}
	if err := f.s.Release(f.uid); err != nil {
		t.Fatal(err)
	}
	if err := m.callControl(t.Context(), c, session, kindClose, struct{}{}, nil); !api.Is(err, api.Unavailable) {
		t.Errorf("the end of a session that has ended: %v", err)
	}
	if err := c.cause(); err != nil {
		t.Errorf("the connection broke: %v", err)
	}
}

// TestNodeLeavesSessionsToOthers: a node opens as many sessions as possible, on several connections. Other nodes can
// still begin sessions.
func TestNodeLeavesSessionsToOthers(t *testing.T) {
	f := newFar(t, testSize, nil)
	f.stop()
	withPrompt(f)
	f.start()
	opened := 0
	for range serverSessions / nodeSessions {
		g := dialGreedy(t, f)
		g.say(header{kind: kindHello}, hello{Version: Version, MinVersion: minVersion, Node: "greedy"})
		g.next()
		for id := range uint32(nodeSessions) {
			if g.open(id, fmt.Sprint("r-", id/replicaSessions)) == nil {
				opened++
			}
		}
	}
	if opened != nodeSessions {
		t.Errorf("one node opened %d sessions", opened)
	}
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}
