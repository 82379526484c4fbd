package peer

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/stack"
)

// stuckDisk makes a replica's disk hang in some calls and, by the name "io", in requests, until resume.
type stuckDisk struct {
	mu    sync.Mutex
	names map[string]bool // nil: the disk does not hang
	goOn  chan struct{}
	asked map[string]int // number of hanging calls, by name
}

type openFunc = func(ctx context.Context, uid, volume string) (Replica, Loop, error)

// open is a server's Open on the stuck disk.
func (d *stuckDisk) open(open openFunc) openFunc {
	return func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
		r, l, err := open(ctx, uid, volume)
		return stuckReplica{r, l, d}, l, err
	}
}

func (d *stuckDisk) hang(names ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.names, d.goOn, d.asked = map[string]bool{}, make(chan struct{}), map[string]int{}
	for _, name := range names {
		d.names[name] = true
	}
}

func (d *stuckDisk) resume() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.names != nil {
		d.names = nil
		close(d.goOn)
	}
}

// waits is the channel on which an operation hangs; nil: the operation does not hang.
func (d *stuckDisk) waits(name string) chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.names[name] {
		return nil
	}
	d.asked[name]++
	return d.goOn
}

func (d *stuckDisk) hung(name string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked[name]
}

type stuckReplica struct {
	Replica
	loop Loop
	d    *stuckDisk
}

func (r stuckReplica) Submit(q *block.Request) {
	if wait := r.d.waits("io"); wait != nil {
		go func() { // ends with the test
			<-wait
			r.loop.Post(func() { r.Replica.Submit(q) })
		}()
		return
	}
	r.Replica.Submit(q)
}

func (r stuckReplica) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	if wait := r.d.waits(name); wait != nil {
		<-wait
	}
	return r.Replica.Call(ctx, name, args)
}

func (r stuckReplica) AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error {
	if wait := r.d.waits("adopt"); wait != nil {
		<-wait
	}
	return r.Replica.AdoptFor(ctx, node, epoch, incarnation, members)
}

// Drain waits for the hanging requests.
func (r stuckReplica) Drain(ctx context.Context) error {
	r.d.awaitIO()
	return r.Replica.Drain(ctx)
}

// awaitIO waits for the hanging requests.
func (d *stuckDisk) awaitIO() {
	d.mu.Lock()
	var wait chan struct{}
	if d.asked["io"] > 0 {
		wait = d.goOn
	}
	d.mu.Unlock()
	if wait != nil {
		<-wait
	}
}

// Close waits for the hanging requests, like the close of a replica.
func (r stuckReplica) Close() error {
	r.d.awaitIO()
	if wait := r.d.waits("close"); wait != nil {
		<-wait
	}
	return r.Replica.Close()
}

// hangOn gives a remote replica a stuckDisk.
func (c *cluster) hangOn(i int) *stuckDisk {
	f, d := c.far[i], &stuckDisk{}
	f.stop()
	f.o.Open = d.open(f.o.Open)
	f.start()
	c.t.Cleanup(d.resume)
	return d
}

// TestDiskHangsWhileItsConnectionLives: requests and calls of a replica whose disk hangs fail, and another session on
// the same connection notices nothing. No goroutine is left, the server learns of the end of the session, and the
// replica can be adopted again after the disk continued.
func TestDiskHangsWhileItsConnectionLives(t *testing.T) {
	suite.Slow(t)
	d := &stuckDisk{}
	defer d.resume()
	f := newFar(t, testSize, func(o *ServerOptions) {
		other := o.Open
		open := d.open(other)
		o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			if uid == "well" {
				return prompt{1 << 40}, startLoop(t), nil
			}
			return open(ctx, uid, volume)
		}
	})
	dial, loop, watch := newDialer(t, f.at), startLoop(t), newWatch(t)
	well := member(t, dial, f, loop, func(o *Options) { o.Replica, o.Volume = "well", "well" })
	m := member(t, dial, f, loop, nil)
	well.lane, m.lane = 0, 0
	adoptAs(t, well, 1, 1)
	var s stalls
	stalled := make(chan error, 9)
	on := watch.Member(m, engine.WatchOptions{Loop: loop, Replica: f.uid, Timeout: s.get,
		OnStall: func(why error) { stalled <- why }})
	adopt := func() error { return on.Adopt(t.Context(), 1, 1, []string{f.uid}) }
	if err := adopt(); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func(ctx context.Context) error{
		"digests": func(ctx context.Context) error { _, err := on.Digests(ctx, 0, 1<<20); return err },
		"seal": func(ctx context.Context) error {
			return on.Seal(ctx, stack.Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID())})
		},
		"snap-digests":  func(ctx context.Context) error { _, err := on.SnapDigests(ctx, "s", 0, 1<<20); return err },
		"intend":        func(ctx context.Context) error { return on.Intend(ctx, []int64{0}) },
		"drop-snapshot": func(ctx context.Context) error { return on.Forget(ctx, "s") },
		"meta":          func(ctx context.Context) error { _, err := on.State(ctx); return err },
		"sizes":         func(ctx context.Context) error { _, err := on.Sizes(ctx); return err },
	}
	names := []string{"io", "adopt"}
	for name := range calls {
		names = append(names, name)
	}
	d.hang(names...)
	before := runtime.NumGoroutine()
	answers := make(chan error, len(calls)+1)
	for _, call := range calls {
		go func() { answers <- call(context.Background()) }()
	}
	go func() {
		w := &block.Request{Op: block.OpWrite, Len: block.Size, Buf: block.AlignedBuffer(block.Size)}
		answers <- Do(context.Background(), loop, on, w)
	}()
	for name := range calls {
		for d.hung(name) == 0 {
			runtime.Gosched()
		}
	}
	c := well.c
	s.set(300*time.Millisecond, 600*time.Millisecond)
	for range len(calls) + 1 {
		if err := within(t, "answer", answers); !api.Is(err, api.Unavailable) {
			t.Errorf("of a disk that hangs: %v", err)
		}
	}
	within(t, "stall", stalled)
	if err := adopt(); !api.Is(err, api.Unavailable) {
		t.Errorf("it is adopted: %v", err)
	}
	if _, err := well.callRaw(t.Context(), c, well.session, kindCall, []byte("meta\n{}")); err != nil {
		t.Error(err)
	}
	if well.c != c || m.c != c || c.cause() != nil {
		t.Errorf("the connection broke: %v", c.cause())
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		hang := len(calls) + 2 // goroutines of the server, in the same process
		if n := runtime.NumGoroutine(); n <= before+hang {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%d goroutines are left of %d calls", n-before, len(calls))
		}
	}
	c.mu.Lock()
	if len(c.table) > 0 || len(c.members) > 2 {
		t.Errorf("%d requests and %d sessions are known to the connection still", len(c.table), len(c.members))
	}
	c.mu.Unlock()
	s.set(endless, endless)
	d.resume()
	for err := adopt(); err != nil; err = adopt() {
		if !api.Is(err, api.Unavailable) {
			t.Fatal(err)
		}
	}
	for name, call := range calls {
		if err := call(t.Context()); err != nil && name != "snap-digests" {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Close of an abandoned member ends the session.
	d.hang("digests")
	s.set(300*time.Millisecond, 600*time.Millisecond)
	if err := calls["digests"](t.Context()); !api.Is(err, api.Unavailable) {
		t.Errorf("of a disk that hangs: %v", err)
	}
	if err := on.Close(); !api.Is(err, api.Unavailable) {
		t.Errorf("the end of a member that was abandoned: %v", err)
	}
	d.resume()
	for end := time.Now().Add(5 * time.Minute); f.s.Serves(f.uid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the replica stays open: its session was not ended")
		}
	}
	if c.cause() != nil {
		t.Errorf("the connection broke: %v", c.cause())
	}
	_ = well.Close()
}

// TestAbandonedMemberDrainsBeforeItServes: an abandoned member serves again only after the disk has done, or failed,
// the requests of the former session. Else a late write would overwrite a newer write.
func TestAbandonedMemberDrainsBeforeItServes(t *testing.T) {
	d := &stuckDisk{}
	defer d.resume()
	f := newFar(t, testSize, func(o *ServerOptions) { o.Open = d.open(o.Open) })
	loop := startLoop(t)
	var s stalls
	on := newWatch(t).Member(member(t, newDialer(t, f.at), f, loop, nil), engine.WatchOptions{Loop: loop, Replica: f.uid,
		Timeout: s.get})
	adopt := func() error { return on.Adopt(t.Context(), 1, 1, []string{f.uid}) }
	write := func() error {
		return Do(t.Context(), loop, on, &block.Request{Op: block.OpWrite, Len: block.Size, Buf: block.AlignedBuffer(block.Size)})
	}
	if err := adopt(); err != nil {
		t.Fatal(err)
	}
	d.hang("io")
	wrote := make(chan error, 1)
	go func() { wrote <- write() }()
	for d.hung("io") == 0 { // the disk has the write
		time.Sleep(time.Millisecond)
	}
	s.set(300*time.Millisecond, 600*time.Millisecond)
	if err := <-wrote; !api.Is(err, api.Unavailable) {
		t.Fatalf("a write to a disk that hangs: %v", err)
	}
	for range 3 {
		if err := adopt(); !api.Is(err, api.Unavailable) {
			t.Fatalf("the member is adopted while its disk has an old write: %v", err)
		}
	}
	s.set(endless, endless)
	d.resume()
	for err := adopt(); err != nil; err = adopt() { // the last try may be about to end
		if !api.Is(err, api.Unavailable) {
			t.Fatal(err)
		}
	}
	if err := write(); err != nil {
		t.Error(err)
	}
	if err := on.Close(); err != nil {
		t.Error(err)
	}
}

// TestJoinBesideADiskThatHangs: the join of a replica whose disk hangs fails, and another replica is rebuilt.
func TestJoinBesideADiskThatHangs(t *testing.T) {
	suite.Slow(t)
	for _, name := range []string{"digests", "intents"} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, testSize, 3, true)
			d := c.hangOn(0)
			if err := c.attach(); err != nil {
				t.Fatal(err)
			}
			buf := block.AlignedBuffer(block.Size)
			write := func() {
				t.Helper()
				w := &block.Request{Op: block.OpWrite, Len: block.Size, Buf: buf}
				if err := Do(t.Context(), c.loop, c.e, w); err != nil {
					t.Error(err)
				}
			}
			for _, f := range c.far[:2] {
				c.drop(f.uid)
				buf[0]++
				write()
				c.await(func() bool { return !f.s.Serves(f.uid) }) // the end of the session must not hang
			}
			turn := make(chan struct{}, 1) // as the engine's node has for a volume
			back := func(i int) error {
				turn <- struct{}{}
				defer func() { <-turn }()
				_, err := c.back(c.far[i].uid)
				return err
			}
			d.hang(name, "io", "close")
			first := make(chan error, 1)
			go func() { first <- back(0) }()
			for d.hung(name) == 0 {
				runtime.Gosched()
			}
			second := make(chan error, 1)
			go func() { second <- back(1) }()
			c.stalls.set(2*time.Second, 3*time.Second)
			if err := within(t, "end of the join", first); !api.Is(err, api.Unavailable) {
				t.Errorf("the join of a replica whose disk hangs: %v", err)
			}
			c.stalls.set(endless, endless)
			if err := within(t, "other join", second); err != nil {
				t.Error(err)
			}
			write()
			if err := c.e.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestMemberWhoseDiskHangsInACallIsDropped: the engine drops a member for a stalled call alone, without any I/O.
func TestMemberWhoseDiskHangsInACallIsDropped(t *testing.T) {
	suite.Slow(t)
	c := newCluster(t, testSize, 2, true)
	d := c.hangOn(0)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	d.hang("seal", "adopt", "close")
	sealed := make(chan error, 1)
	go func() { sealed <- c.e.SealAll(t.Context()) }()
	for d.hung("seal") == 0 {
		runtime.Gosched()
	}
	c.stalls.set(2*time.Second, 3*time.Second)
	if err := within(t, "end of the call", sealed); !api.Is(err, api.Unavailable) {
		t.Errorf("a call of a disk that hangs: %v", err)
	}
	c.await(func() bool { _, members := c.rec.state(); return len(members) == 2 })
	c.stalls.set(endless, endless)
	if err := c.e.SealAll(t.Context()); err != nil {
		t.Error(err)
	}
	_ = c.e.Close() // the abandoned member has no clean end
}

// TestAttachBesideADiskThatHangs: an attach removes a snapshot from a member whose disk hangs. The attach leaves the
// member out, once the call has exceeded the stall timeout.
func TestAttachBesideADiskThatHangs(t *testing.T) {
	suite.Slow(t)
	c := newCluster(t, testSize, 2, true)
	d := c.hangOn(0)
	f := c.far[0]
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	alone := stack.Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}
	if err := c.members[1].Member.(engine.Cutter).Seal(t.Context(), alone); err != nil {
		t.Fatal(err)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	d.hang("drop-snapshot", "close")
	first := make(chan error, 1)
	go func() { first <- c.attach() }()
	for d.hung("drop-snapshot") == 0 {
		runtime.Gosched()
	}
	c.stalls.set(2*time.Second, 3*time.Second)
	if err := within(t, "end of the attach", first); err != nil {
		t.Fatalf("the attach: %v", err)
	}
	if missing := c.e.Missing(); len(missing) != 1 || missing[0] != f.uid {
		t.Errorf("missing: %v", missing)
	}
	c.await(func() bool { _, members := c.rec.state(); return len(members) == 2 })
	_ = c.e.Close() // the missing member has no clean end
}

// TestBuffersOfAnAbandonedMember: if the connection is in the middle of a request when the engine abandons the member,
// the buffer of this request is leased until the connection breaks; all other buffers are free at once.
func TestBuffersOfAnAbandonedMember(t *testing.T) {
	const size, count = 1 << 20, 15
	f := newFar(t, testSize, nil)
	p := newProxy(t, f.at)
	loop := startLoop(t)
	m := member(t, newDialer(t, at(p.ln.Addr().String())), f, loop, nil)
	var s stalls
	on := newWatch(t).Member(m, engine.WatchOptions{Loop: loop, Replica: f.uid, Timeout: s.get})
	if err := on.Adopt(t.Context(), 1, 1, []string{f.uid}); err != nil {
		t.Fatal(err)
	}
	c := m.c
	p.freeze(true)
	answers := make(chan *block.Request, count)
	loop.Post(func() {
		for range count {
			on.Submit(&block.Request{Op: block.OpWrite, Len: size, Buf: block.AlignedBuffer(size),
				Done: func(r *block.Request) { answers <- r }})
		}
	})
	stuck := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, s := range c.table {
			if s.state == slotWriting {
				return len(c.queue) > 0
			}
		}
		return false
	}
	for same, last := 0, 0; same < 50; time.Sleep(5 * time.Millisecond) { // until the kernel's buffers are full
		c.mu.Lock()
		now := len(c.queue)
		c.mu.Unlock()
		if same++; now != last || !stuck() {
			same, last = 0, now
		}
	}
	s.set(300*time.Millisecond, 600*time.Millisecond)
	var leased []*block.BufferLease
	for range count {
		r := within(t, "answer", answers)
		if !api.Is(r.Err, api.Unavailable) {
			t.Errorf("a request of an abandoned member: %v", r.Err)
		}
		if r.Lease != nil {
			leased = append(leased, r.Lease)
		}
	}
	back := make(chan bool, 1)
	loop.Post(func() { back <- len(leased) == 1 && !leased[0].Released() })
	is := <-back
	if c.cause() != nil {
		t.Skip("the machine is so busy that the connection counts as silent: ", c.cause())
	}
	if !is {
		t.Fatalf("%d buffers are leased", len(leased))
	}
	if err := on.Adopt(t.Context(), 1, 1, []string{f.uid}); !api.Is(err, api.Unavailable) {
		t.Errorf("the member is adopted while a buffer is in use: %v", err)
	}
	returned := make(chan struct{})
	loop.Post(func() { leased[0].OnRelease(func() { close(returned) }) })
	select {
	case <-returned:
		t.Error("a buffer is back while the connection writes it")
	default:
	}
	p.cut()
	p.freeze(false)
	within(t, "buffer", returned)
	_ = on.Close()
}

// TestUnfetchedReadsAreNoStall: the engine does not abandon a remote replica that answers "not fetched", however long
// the source of the replica is away.
func TestUnfetchedReadsAreNoStall(t *testing.T) {
	suite.Slow(t)
	f, source := newFar(t, imageSize, nil), newDisk(t)
	var lost atomic.Bool
	layer := image(t, source)
	hydrate(t, f.disk, source, layer, &lost)
	f.uid = onImage(t, f.disk, f.volume, layer)
	lost.Store(true)
	loop := startLoop(t)
	stalled := make(chan error, 9)
	on := newWatch(t).Member(member(t, newDialer(t, f.at), f, loop, nil), engine.WatchOptions{Loop: loop, Replica: f.uid,
		Timeout: func() engine.StallTimeout { return engine.StallTimeout{Min: 4 * time.Second, Max: 20 * time.Second} },
		OnStall: func(why error) { stalled <- why }})
	if err := on.Adopt(t.Context(), 1, 1, []string{f.uid}); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < 6*time.Second; time.Sleep(50 * time.Millisecond) {
		r := &block.Request{Op: block.OpRead, Off: 16 << 20, Len: block.Size, Buf: block.AlignedBuffer(block.Size)}
		if err := Do(t.Context(), loop, on, r); !errors.Is(err, stack.ErrNotFetched) {
			t.Fatal(err)
		}
	}
	if len(stalled) > 0 {
		t.Error("it is abandoned")
	}
	if err := on.Close(); err != nil {
		t.Error(err)
	}
}
