package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/stack"
)

func startLoop(t testing.TB) *uring.Loop {
	t.Helper()
	l, err := uring.New(128)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- l.Run() }()
	t.Cleanup(func() {
		l.Close()
		if err := within(t, "end of what was begun", done); err != nil {
			t.Error(err)
		}
	})
	return l
}

// proxy stands between two nodes and acts like a faulty network.
type proxy struct {
	t    testing.TB
	ln   net.Listener
	to   func() string
	wg   sync.WaitGroup
	mu   sync.Mutex
	all  []net.Conn
	stop atomic.Bool // nothing passes
	flip atomic.Int64
	cond *sync.Cond
}

func newProxy(t testing.TB, to func() string) *proxy {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, ln: ln, to: to}
	p.cond = sync.NewCond(&p.mu)
	p.wg.Add(1)
	go func() {
		defer p.wg.Done()
		for {
			a, err := ln.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", p.to())
			if err != nil {
				_ = a.Close()
				continue
			}
			p.mu.Lock()
			p.all = append(p.all, a, b)
			p.mu.Unlock()
			p.wg.Add(2)
			go p.pass(a, b, true)
			go p.pass(b, a, false)
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		p.freeze(false)
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) pass(from, to net.Conn, there bool) {
	defer p.wg.Done()
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		for p.stop.Load() {
			p.cond.Wait()
		}
		p.mu.Unlock()
		if n > 0 {
			if there && p.flip.Load() > 0 && p.flip.Add(-int64(n)) <= 0 {
				buf[n-1] ^= 0x10
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *proxy) freeze(is bool) {
	p.mu.Lock()
	p.stop.Store(is)
	p.cond.Broadcast()
	p.mu.Unlock()
}

// cut breaks every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.all {
		_ = c.Close()
	}
	p.all = nil
}

// far is a node with a replica.
type far struct {
	t      testing.TB
	disk   *stack.Disk
	uid    string
	volume string
	loop   *uring.Loop
	addr   atomic.Pointer[string] // another address after every start: another process may take a free address
	o      ServerOptions
	s      *Server
	ln     net.Listener
	served chan error
}

func newFar(t testing.TB, size int64, change func(*ServerOptions)) *far {
	t.Helper()
	disk, err := stack.Add(context.Background(), filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	return newFarOn(t, disk, size, change)
}

// newFarOn is newFar with a disk. The end of the test closes the disk.
func newFarOn(t testing.TB, disk *stack.Disk, size int64, change func(*ServerOptions)) *far {
	t.Helper()
	f := &far{t: t, disk: disk, uid: string(api.NewUID()), volume: string(api.NewUID()), loop: startLoop(t)}
	if err := disk.CreateReplica(context.Background(), stack.Spec{UID: f.uid, Volume: "v", VolumeUID: f.volume,
		Size: size}); err != nil {
		t.Fatal(err)
	}
	f.o = ServerOptions{Node: "far", Log: slog.New(slog.DiscardHandler), Linger: 200 * time.Millisecond,
		Open: func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			if uid != f.uid || volume != f.volume {
				return nil, nil, api.Errorf(api.NotFound, "no such replica")
			}
			r, err := disk.OpenReplica(ctx, uid, f.loop)
			if err != nil {
				return nil, nil, err
			}
			return NewBackend(r, f.loop), f.loop, nil
		}}
	if change != nil {
		change(&f.o)
	}
	f.start()
	t.Cleanup(func() {
		f.stop()
		if err := disk.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// within returns a value from a channel; a missing value ends the test.
func within[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(10 * time.Minute)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
	}
	_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1) // says where
	t.Fatal("no " + what)
	panic("not reached")
}

func (f *far) start() {
	f.t.Helper()
	var err error
	if f.s, err = NewServer(f.o); err != nil {
		f.t.Fatal(err)
	}
	if f.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		f.t.Fatal(err)
	}
	addr := f.ln.Addr().String()
	f.addr.Store(&addr)
	f.served = make(chan error, 1)
	s, ln, served := f.s, f.ln, f.served
	go func() { served <- s.Serve(ln) }()
}

func (f *far) at() string { return *f.addr.Load() }

func (f *far) stop() {
	if f.s == nil {
		return
	}
	_ = f.ln.Close()
	f.s.Close()
	if err := within(f.t, "end of the server", f.served); err != nil {
		f.t.Error(err)
	}
	f.s = nil
}

func newDialer(t testing.TB, addr func() string) *Dialer {
	d := &Dialer{Node: "near", Address: func(context.Context, string) (string, error) { return addr(), nil }}
	t.Cleanup(d.Close)
	return d
}

// guest keeps requests in flight on a member and checks the answers. Requests in flight share no blocks.
type guest struct {
	t     testing.TB
	m     block.Submitter
	loop  Loop
	rng   *rand.Rand
	model []byte
	busy  map[int64]bool
	left  int
	depth int
	done  chan struct{}
	fail  func(r *block.Request) // handles an error
	worst time.Duration
	ended atomic.Int64 // answered requests
}

func (g *guest) run(n, depth int) {
	done := make(chan struct{})
	g.loop.Post(func() {
		g.left, g.done, g.busy = n, done, map[int64]bool{}
		for range depth {
			g.next()
		}
	})
	within(g.t, "end of what was begun", done)
}

func (g *guest) next() {
	if g.left == 0 {
		if g.depth == 0 {
			g.left = -1
			close(g.done)
		}
		return
	}
	if g.left < 0 {
		return
	}
	g.left--
	n := int64(1 + g.rng.IntN(8))
	blocks := int64(len(g.model)) / block.Size
	at := g.rng.Int64N(blocks - n)
	for b := at; b < at+n; b++ {
		if g.busy[b] {
			g.depth++
			g.depth--
			g.left++
			g.loop.Post(g.next)
			return
		}
	}
	for b := at; b < at+n; b++ {
		g.busy[b] = true
	}
	r := &block.Request{Off: at * block.Size, Len: n * block.Size}
	var val byte
	switch g.rng.IntN(10) {
	case 0:
		r.Op, r.Off, r.Len = block.OpFlush, 0, 0
	case 1:
		r.Op = block.OpZero
	case 2, 3, 4:
		r.Op, r.Buf = block.OpRead, block.AlignedBuffer(int(r.Len))
	default:
		r.Op, r.Buf = block.OpWrite, block.AlignedBuffer(int(r.Len))
		val = byte(1 + g.rng.IntN(255))
		for i := range r.Buf {
			r.Buf[i] = val + byte(i/block.Size)
		}
	}
	began := time.Now()
	g.depth++
	r.Done = func(r *block.Request) {
		g.depth--
		g.ended.Add(1)
		g.worst = max(g.worst, time.Since(began))
		part := g.model[at*block.Size : (at+n)*block.Size]
		switch {
		case r.Err != nil && g.fail != nil:
			g.fail(r)
		case r.Err != nil:
			g.t.Errorf("op %d at %d: %v", r.Op, r.Off, r.Err)
		case r.Op == block.OpRead && !bytes.Equal(part, r.Buf):
			g.t.Errorf("read at %d is not what was written", r.Off)
		case r.Op == block.OpWrite:
			copy(part, r.Buf)
		case r.Op == block.OpZero:
			clear(part)
		}
		for b := at; b < at+n; b++ {
			delete(g.busy, b)
		}
		g.loop.Post(g.next)
	}
	g.m.Submit(r)
}

const testSize = 8 << 20

func member(t testing.TB, d *Dialer, f *far, loop Loop, change func(*Options)) *Member {
	o := Options{Node: "far", Replica: f.uid, Volume: f.volume, Loop: loop}
	if change != nil {
		change(&o)
	}
	return d.Member(o)
}

func adoptAs(t testing.TB, m *Member, epoch, inc int64, members ...string) {
	t.Helper()
	if err := m.Adopt(context.Background(), epoch, inc, append([]string{m.o.Replica}, members...)); err != nil {
		t.Fatal(err)
	}
}

// TestWork has a guest work over TLS, and compares the content of the other disk in the end.
func TestWork(t *testing.T) {
	both, err := wire.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]*wire.Identity{}
	for _, node := range []string{"near", "far"} {
		id, err := wire.OpenIdentity(t.TempDir(), node)
		if err != nil {
			t.Fatal(err)
		}
		req, err := id.Request()
		if err != nil {
			t.Fatal(err)
		}
		cert, _, err := ca.Sign(req, node, wire.CertificateLife)
		if err != nil {
			t.Fatal(err)
		}
		if err := id.Put(cert, ca.PEM()); err != nil {
			t.Fatal(err)
		}
		ids[node] = id
	}
	var asked atomic.Value
	f := newFar(t, testSize, func(o *ServerOptions) {
		o.TLS, o.NodeOf = ids["far"].Server(Protocol), wire.NodeOf
		o.Allow = func(_ context.Context, node, _, _ string, epoch int64) error {
			asked.Store(node)
			if epoch == 9 {
				return api.Errorf(api.Denied, "the API names another node")
			}
			return nil
		}
	})
	d := newDialer(t, f.at)
	d.TLS = func(node string) (*tls.Config, error) { return ids["near"].Client(node, Protocol) }
	loop := startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1, "another")
	if asked.Load() != "near" {
		t.Errorf("the server was asked by node %v", asked.Load())
	}
	g := &guest{t: t, m: m, loop: loop, rng: rand.New(rand.NewPCG(1, 1)), model: make([]byte, testSize)}
	g.run(4000, 32)
	if io := f.s.GuestIO(); io.Requests < 4000 || io.Latency <= 0 {
		t.Errorf("after 4,000 requests the server counts %+v", io)
	}
	want, err := m.Digests(context.Background(), 0, testSize)
	if err != nil {
		t.Fatal(err)
	}
	in, err := m.Intents(context.Background())
	if err != nil || len(in.Regions) != 1 || in.Joined != 1 {
		t.Errorf("intents %+v: %v", in, err)
	}
	if err := m.Expand(context.Background(), 2*testSize); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	compare(t, f, g.model, want)
	other := member(t, d, f, loop, nil)
	if err := other.Adopt(context.Background(), 9, 1, []string{f.uid}); !api.Is(err, api.Denied) {
		t.Errorf("an engine that the API does not name: %v", err)
	}
	_ = other.Close()
}

func compare(t *testing.T, f *far, model, digests []byte) {
	t.Helper()
	if err := f.s.Release(f.uid); err != nil {
		t.Fatal(err)
	}
	v, err := f.disk.OpenView(f.uid)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	have := make([]byte, len(model))
	if _, err := v.ReadAt(have, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if !bytes.Equal(have, model) {
		t.Error("what is on the disk differs from what was written")
	}
	meta, err := f.disk.Stack(f.uid)
	if err != nil || meta.Dirty {
		t.Errorf("the end was not clean: %v", err)
	}
	_ = digests
}

// TestCuts breaks the connections, and restarts the other process, while a guest works: the guest notices nothing.
func TestCuts(t *testing.T) {
	suite.Slow(t)
	f := newFar(t, testSize, nil)
	p := newProxy(t, f.at)
	d := newDialer(t, at(p.ln.Addr().String()))
	loop := startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1)
	g := &guest{t: t, m: m, loop: loop, rng: rand.New(rand.NewPCG(2, 2)), model: make([]byte, testSize)}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for n, before := 1, int64(0); ; n++ {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			now := g.ended.Load()
			if now == before { // a busy machine connects more slowly than the test cuts
				continue
			}
			before = now
			switch {
			case n%10 == 0: // the other process ends, and another one begins
				f.stop()
				p.cut()
				f.start()
			case n%7 == 0:
				p.flip.Store(int64(100000)) // a byte is damaged
			default:
				p.cut()
			}
		}
	}()
	g.run(suite.Count(t, "DROVER_REQUESTS", 2000, 12000), 32)
	close(stop)
	within(t, "end of what was begun", done)
	p.flip.Store(0)
	if _, err := m.Intents(t.Context()); err != nil { // connected again: only then the end can be clean
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	compare(t, f, g.model, nil)
	t.Logf("the longest request took %v", g.worst)
}

// FuzzFrames gives the parser any bytes.
func FuzzFrames(f *testing.F) {
	var hb [headerSize]byte
	for k := kindHello; k < kindEnd; k++ {
		h := header{kind: k, session: 1, id: 2, off: 4096, n: 4096, size: 3}
		h.encode(&hb)
		f.Add(append(bytes.Clone(hb[:]), "{}\n"...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			h, err := readHeader(r, &hb)
			if err != nil {
				return
			}
			again := hb
			h.encode(&again)
			if again != hb {
				t.Errorf("%x becomes %x", hb, again)
			}
			p, err := readPayload(r, &h)
			if err != nil {
				return
			}
			_ = decodeFault(p)
		}
	})
}

func TestMain(m *testing.M) {
	if os.Getenv(floodVariable) != "" {
		os.Exit(floodMain())
	}
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

func at(addr string) func() string { return func() string { return addr } }

// TestErrorsTravel: an error of a replica has the same identity and kind on the other node.
func TestErrorsTravel(t *testing.T) {
	for _, want := range []error{ErrRestarted, errSession, stack.ErrFailed, ErrAbandoned} {
		b, err := json.Marshal(faultOf(fmt.Errorf("replica r: %w", want)))
		if err != nil {
			t.Fatal(err)
		}
		if got := decodeFault(b); !errors.Is(got, want) || api.KindOf(got) != api.KindOf(want) {
			t.Errorf("%v came as %v", want, got)
		}
	}
}
