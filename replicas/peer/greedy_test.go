package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// prompt is a replica that answers immediately.
type prompt struct{ size int64 }

func (p prompt) Submit(r *block.Request)                                        { r.Done(r) }
func (p prompt) AdoptFor(context.Context, string, int64, int64, []string) error { return nil }
func (p prompt) Drain(context.Context) error                                    { return nil }
func (p prompt) Info() Info                                                     { return Info{Size: p.size} }
func (p prompt) Call(context.Context, string, []byte) ([]byte, error) {
	return make([]byte, 1<<20), nil
}
func (p prompt) Close() error { return nil }

// withPrompt has a server serve prompt replicas, beside its own replica.
func withPrompt(f *far) {
	open := f.o.Open
	f.o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
		if volume == "prompt" {
			return prompt{1 << 40}, f.loop, nil
		}
		return open(ctx, uid, volume)
	}
}

// greedy is a client that speaks the protocol, keeps no limits, and reads only when the test says so.
type greedy struct {
	t  *testing.T
	nc net.Conn
	r  *bufio.Reader
}

func dialGreedy(t *testing.T, f *far) *greedy {
	t.Helper()
	nc, err := net.Dial("tcp", f.at())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	return &greedy{t: t, nc: nc, r: bufio.NewReader(nc)}
}

func newGreedy(t *testing.T, f *far, replica string) *greedy {
	t.Helper()
	g := dialGreedy(t, f)
	g.say(header{kind: kindHello}, hello{Version: Version, MinVersion: minVersion, Node: "greedy"})
	g.next()
	g.say(header{kind: kindOpen, session: 1, id: 1}, openRequest{replica, "prompt"})
	g.next()
	g.say(header{kind: kindAdopt, session: 1, id: 2}, adoption{1, 1, []string{replica}})
	g.next()
	return g
}

func (g *greedy) say(h header, with any) {
	g.t.Helper()
	b, err := json.Marshal(with)
	if err == nil {
		err = writeControl(g.nc, h, b)
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// next is an answer, which must not be an error.
func (g *greedy) next() (header, []byte) {
	g.t.Helper()
	var hb [headerSize]byte
	h, err := readHeader(g.r, &hb)
	var b []byte
	if err == nil {
		b, err = readPayload(g.r, &h)
	}
	if err != nil || h.status != 0 {
		g.t.Fatalf("%v: %s", err, b)
	}
	return h, b
}

// flood sends a frame again and again, until the connection breaks; ended gets the error.
func (g *greedy) flood(h header, payload []byte) (ended chan error) {
	ended = make(chan error, 1)
	go func() {
		w := bufio.NewWriterSize(g.nc, 64<<10)
		for id := uint64(3); ; id++ {
			h.id = id
			if err := writeControl(w, h, payload); err != nil {
				ended <- err
				return
			}
		}
	}()
	return ended
}

// owed is the server's load for a client.
type owed struct {
	frames, calls int   // in progress, or answered and not sent
	bytes         int64 // of buffers
	answers       int64 // bytes of calls
}

func (o owed) within(t *testing.T) {
	t.Helper()
	if o.frames > connFrames || o.calls > connCalls || o.bytes > connMost || o.answers > connAnswers+int64(len(methods))*sessionCalls<<20 {
		t.Fatalf("a server has for a client that takes no answers: %+v", o)
	}
}

// owes lists the server's present load for each client.
func (f *far) owes() (list []owed) {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	for c := range f.s.conns {
		c.mu.Lock()
		o := owed{frames: len(c.out) + c.flying + c.calling, calls: c.calling, answers: c.answers}
		c.mu.Unlock()
		f.s.bufs.mu.Lock()
		o.bytes = c.account.held
		f.s.bufs.mu.Unlock()
		list = append(list, o)
	}
	return list
}

// full waits until the server takes no more requests of its clients.
func full(t *testing.T, f *far, is func([]owed) bool) {
	t.Helper()
	until := time.Now().Add(5 * time.Minute)
	for list := []owed(nil); !is(list); time.Sleep(time.Millisecond) { // between looks
		list = f.owes()
		for _, o := range list {
			o.within(t)
		}
		if time.Now().After(until) {
			t.Fatalf("the clients are not held back: %+v", list)
		}
	}
}

const greedyClients = 3

// every is for all clients.
func every(is func(owed) bool) func([]owed) bool {
	return func(list []owed) bool {
		return len(list) >= greedyClients && !slices.ContainsFunc(list, func(o owed) bool { return !is(o) })
	}
}

func allFrames(o owed) bool { return o.frames >= connFrames }
func allCalls(o owed) bool  { return o.calls >= connCalls }

// allMemory: no memory is left for a large request.
func allMemory(list []owed) bool {
	var sum int64
	for _, o := range list {
		sum += o.bytes
	}
	return sum > serverMemory-maxPayload
}

// TestGreedy: clients that send requests and read no answers get a bounded part of the server's memory, and the server
// serves other clients.
func TestGreedy(t *testing.T) {
	suite.Slow(t)
	read := header{kind: kindRead, session: 1, n: maxPayload}
	call := []byte("snap-read\n{}")
	for _, c := range []struct {
		name    string
		h       header
		payload []byte
		is      func([]owed) bool
	}{
		{"reads", read, nil, allMemory},
		{"flushes", header{kind: kindFlush, session: 1}, nil, every(allFrames)},
		{"pings", header{kind: kindPing}, nil, every(allFrames)},
		{"nothing", header{kind: kindFlush, session: 7}, nil, every(allFrames)},
		{"calls", header{kind: kindCall, session: 1}, call, every(allCalls)},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFar(t, testSize, func(o *ServerOptions) { o.Stalled = time.Hour })
			f.stop()
			withPrompt(f)
			f.start()
			for i := range greedyClients {
				newGreedy(t, f, "r"+string(rune('0'+i))).flood(c.h, c.payload)
			}
			full(t, f, c.is)
			d, loop := newDialer(t, f.at), startLoop(t)
			m := member(t, d, f, loop, nil)
			adoptAs(t, m, 1, 1)
			g := &guest{t: t, m: m, loop: loop, rng: rand.New(rand.NewPCG(1, 2)), model: make([]byte, testSize)}
			ran := make(chan struct{})
			go func() { g.run(2000, 16); close(ran) }()
			select {
			case <-ran:
			case <-time.After(5 * time.Minute):
				t.Fatal("the I/O of others does not go on")
			}
			for _, o := range f.owes() {
				o.within(t)
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestGreedyIsCutOff: the server cuts off a client that reads no answers, and takes all buffers of the client back.
func TestGreedyIsCutOff(t *testing.T) {
	suite.Slow(t)
	// The test itself may stall, too.
	f := newFar(t, testSize, func(o *ServerOptions) { o.Stalled = 5 * time.Second })
	f.stop()
	withPrompt(f)
	f.start()
	g := newGreedy(t, f, "r")
	select {
	case <-g.flood(header{kind: kindRead, session: 1, n: 1 << 20}, nil):
	case <-time.After(5 * time.Minute):
		t.Fatal("it is not cut off")
	}
	until := time.Now().Add(5 * time.Minute)
	for len(f.owes()) > 0 {
		if time.Now().After(until) {
			t.Fatalf("the server has its connection still: %+v", f.owes())
		}
		time.Sleep(time.Millisecond) // between looks
	}
	f.s.bufs.mu.Lock()
	left := f.s.bufs.left
	for c, list := range f.s.bufs.free {
		left += int64(len(list)) * int64(classes[c])
	}
	f.s.bufs.mu.Unlock()
	if left != serverMemory {
		t.Errorf("%d bytes of buffers are not given back", serverMemory-left)
	}
}

// TestSlowClient: a client that reads answers slowly gets all answers, for any number of requests.
func TestSlowClient(t *testing.T) {
	f := newFar(t, testSize, nil)
	f.stop()
	withPrompt(f)
	f.start()
	g := newGreedy(t, f, "r")
	if err := g.nc.(*net.TCPConn).SetReadBuffer(16 << 10); err != nil {
		t.Fatal(err)
	}
	const all = 300 // of 256 KiB: more than connMost
	want := bytes.Repeat([]byte{0x5a}, 256<<10)
	wrote := make(chan error, 1)
	go func() {
		for id := range uint64(all) {
			if err := writeControl(g.nc, header{kind: kindWrite, session: 1, id: 1000 + id, n: 256 << 10}, want); err != nil {
				wrote <- err
				return
			}
			if err := writeControl(g.nc, header{kind: kindRead, session: 1, id: 2000 + id, n: 256 << 10}, nil); err != nil {
				wrote <- err
				return
			}
		}
		wrote <- nil
	}()
	seen := map[uint64]bool{}
	for len(seen) < 2*all {
		h, b := g.next()
		if h.kind != kindAnswer || seen[h.id] || h.id >= 2000 && len(b) != 256<<10 {
			t.Fatalf("answer %+v with %d bytes", h, len(b))
		}
		seen[h.id] = true
		for _, o := range f.owes() {
			if o.bytes > connMost {
				t.Fatalf("the server has %d MiB for it", o.bytes>>20)
			}
		}
	}
	if err := within(t, "end of the write", wrote); err != nil {
		t.Error(err)
	}
}

// TestAnswersOfCalls: a client that asks for more snapshot content than fits gets all answers, as the client reads.
func TestAnswersOfCalls(t *testing.T) {
	f := newFar(t, testSize, nil)
	f.stop()
	withPrompt(f)
	f.start()
	g := newGreedy(t, f, "r")
	if err := g.nc.SetDeadline(time.Now().Add(5 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	const all = 100
	for id := range uint64(all) {
		err := writeControl(g.nc, header{kind: kindCall, session: 1, id: 1000 + id}, []byte("snap-read\n{}"))
		if err != nil {
			t.Fatal(err)
		}
	}
	seen := map[uint64]bool{}
	for len(seen) < all {
		h, b := g.next()
		if len(b) != 1<<20 {
			t.Fatalf("answer %+v with %d bytes", h, len(b))
		}
		seen[h.id] = true
		for _, o := range f.owes() {
			o.within(t)
		}
	}
}

// stuck is a replica with hanging reads of snapshots.
type stuck struct {
	prompt
	hanging chan struct{} // gets a value for each hanging read
}

func (s stuck) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	if name != "snap-read" {
		return s.prompt.Call(ctx, name, args)
	}
	s.hanging <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestDigestsBesideReadsThatHang: hanging reads of snapshots do not delay digests.
func TestDigestsBesideReadsThatHang(t *testing.T) {
	f := newFar(t, testSize, nil)
	f.stop()
	hanging := make(chan struct{}, 2*sessionCalls)
	f.o.Open = func(context.Context, string, string) (Replica, Loop, error) {
		return stuck{prompt{1 << 40}, hanging}, f.loop, nil
	}
	f.start()
	g := newGreedy(t, f, "r")
	if err := g.nc.SetDeadline(time.Now().Add(5 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	call := func(id uint64, what string) {
		if err := writeControl(g.nc, header{kind: kindCall, session: 1, id: id}, []byte(what+"\n{}")); err != nil {
			t.Fatal(err)
		}
	}
	for id := range uint64(2 * sessionCalls) {
		call(1000+id, "snap-read")
	}
	for range sessionCalls {
		<-hanging
	}
	call(7, "digests")
	if h, _ := g.next(); h.id != 7 {
		t.Fatalf("answer %+v", h)
	}
}

// TestUnknownSessionCostsNothing: the server answers requests of an unknown session, and takes no buffers.
func TestUnknownSessionCostsNothing(t *testing.T) {
	f := newFar(t, testSize, nil)
	f.stop()
	withPrompt(f)
	f.start()
	g := newGreedy(t, f, "r")
	for id := range uint64(20) {
		err := writeControl(g.nc, header{kind: kindWrite, session: 9, id: 10 + id, n: 4096}, make([]byte, 4096))
		if err != nil {
			t.Fatal(err)
		}
		var hb [headerSize]byte
		h, err := readHeader(g.r, &hb)
		if err != nil || h.status != 1 || h.id != 10+id {
			t.Fatalf("%+v, %v", h, err)
		}
		b, err := readPayload(g.r, &h)
		if err != nil || !api.Is(decodeFault(b), api.Unavailable) {
			t.Fatalf("%s, %v", b, err)
		}
	}
	f.s.bufs.mu.Lock()
	defer f.s.bufs.mu.Unlock()
	if f.s.bufs.left != serverMemory {
		t.Error("buffers were taken")
	}
}
