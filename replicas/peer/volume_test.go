package peer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/stack"
)

// record is the volume's record in the API, changed by compare-and-swap.
type record struct {
	mu      sync.Mutex
	epoch   int64
	members []string
	away    bool // unreachable
}

func (r *record) swap(epoch int64, change func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.away:
		return api.Errorf(api.Unavailable, "the API is away")
	case r.epoch != epoch:
		return api.Errorf(api.Denied, "epoch %d, not %d", r.epoch, epoch)
	}
	change()
	r.epoch++
	return nil
}

func (r *record) state() (int64, []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.epoch, slices.Clone(r.members)
}

// cluster is a volume with a local replica and remote replicas.
type cluster struct {
	t     *testing.T
	size  int64
	rec   record
	loop  *uring.Loop
	dial  *Dialer
	disk  *stack.Disk
	local string
	far   []*far
	proxy []*proxy
	e     *engine.Engine
	inc   int64
	// members of the engine, as at the open.
	members []engine.Named
	watch   *engine.Watch
	stalls  stalls
	serving atomic.Pointer[engine.Engine] // the last engine
	alone   bool                          // the next engine has one member, and notes no intents
	// reported answers whether the API reported a snapshot; nil: the engine does not ask.
	reported func(context.Context, stack.Snapshot) (bool, error)
}

func newCluster(t *testing.T, size int64, others int, withLocal bool) *cluster {
	c := &cluster{t: t, size: size, loop: startLoop(t)}
	volume := string(api.NewUID())
	if withLocal {
		disk, err := stack.Add(context.Background(), filepath.Join(t.TempDir(), "disk"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = disk.Close() })
		c.disk, c.local = disk, string(api.NewUID())
		if err := disk.CreateReplica(context.Background(), stack.Spec{UID: c.local, Volume: "v", VolumeUID: volume,
			Size: size}); err != nil {
			t.Fatal(err)
		}
		c.rec.members = append(c.rec.members, c.local)
	}
	for range others {
		f := newFar(t, size, nil)
		c.far = append(c.far, f)
		c.proxy = append(c.proxy, newProxy(t, f.at))
		c.rec.members = append(c.rec.members, f.uid)
	}
	addr := map[string]string{}
	for i, p := range c.proxy {
		addr["far"+strconv.Itoa(i)] = p.ln.Addr().String()
	}
	c.dial = &Dialer{Node: "near"}
	c.dial.Address = func(_ context.Context, node string) (string, error) { return addr[node], nil }
	t.Cleanup(c.dial.Close)
	c.watch = newWatch(t)
	return c
}

func (c *cluster) member(uid string) engine.Named {
	if uid == c.local {
		r, err := c.disk.OpenReplica(context.Background(), uid, c.loop)
		if err != nil {
			c.t.Fatal(err)
		}
		return engine.Named{Name: uid, Local: true, Member: c.watched(uid, NewBackend(r, c.loop))}
	}
	for i, f := range c.far {
		if f.uid == uid {
			m := c.dial.Member(Options{Node: "far" + strconv.Itoa(i), Replica: uid, Volume: f.volume, Loop: c.loop})
			return engine.Named{Name: uid, Member: c.watched(uid, m)}
		}
	}
	c.t.Fatalf("no replica %s", uid)
	return engine.Named{}
}

func (c *cluster) watched(uid string, on engine.Cutter) *engine.WatchedMember {
	return c.watch.Member(on, engine.WatchOptions{Loop: c.loop, Replica: uid, Timeout: c.stalls.get, OnStall: func(why error) {
		if e := c.serving.Load(); e != nil {
			e.Suspect(uid, why)
		}
	}})
}

// attach claims the volume.
func (c *cluster) attach() error {
	epoch, members := c.rec.state()
	if err := c.rec.swap(epoch, func() {}); err != nil {
		return err
	}
	c.inc++
	cfg := engine.Config{Loop: c.loop, Size: c.size, Epoch: epoch + 1, Incarnation: c.inc, Track: !c.alone, Resync: true, Lenient: true,
		Reported: c.reported,
		Drop: func(_ context.Context, epoch int64, m string) error {
			err := c.rec.swap(epoch, func() {
				c.rec.members = slices.DeleteFunc(c.rec.members, func(n string) bool { return n == m })
			})
			if now, left := c.rec.state(); err != nil && now == epoch+1 && !slices.Contains(left, m) {
				return nil
			}
			return err
		},
		Add: func(_ context.Context, epoch int64, m string) error {
			err := c.rec.swap(epoch, func() { c.rec.members = append(c.rec.members, m) })
			if now, left := c.rec.state(); err != nil && now == epoch+1 && slices.Contains(left, m) {
				return nil
			}
			return err
		},
		OnDrop: func(m string, why error) { c.t.Logf("dropped: %v", why) }}
	for _, uid := range members {
		cfg.Members = append(cfg.Members, c.member(uid))
	}
	e, err := engine.Open(context.Background(), cfg)
	if err != nil {
		for _, m := range cfg.Members {
			_ = m.Member.Close()
		}
		return err
	}
	e.SetWhole(epoch+1, len(members) == len(c.far)+1 || c.local == "" && len(members) == len(c.far))
	c.e, c.members = e, cfg.Members
	c.serving.Store(e)
	return nil
}

// back has a dropped replica join again.
func (c *cluster) back(uid string) (engine.Progress, error) {
	m := c.member(uid)
	p, err := c.e.Join(context.Background(), m, engine.JoinOptions{})
	if err != nil {
		_ = m.Member.Close()
	}
	return p, err
}

// content reads a whole, closed replica.
func (c *cluster) content(uid string) []byte {
	disk := c.disk
	for _, f := range c.far {
		if f.uid == uid {
			disk = f.disk
			if err := f.s.Release(uid); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	v, err := disk.OpenView(uid)
	if err != nil {
		c.t.Fatal(err)
	}
	defer v.Close()
	b := make([]byte, c.size)
	if _, err := v.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		c.t.Fatal(err)
	}
	return b
}

func (c *cluster) equal(model []byte) {
	c.t.Helper()
	_, members := c.rec.state()
	for _, uid := range members {
		have := c.content(uid)
		for b := 0; b < len(have); b += block.Size {
			if !bytes.Equal(have[b:b+block.Size], model[b:b+block.Size]) {
				c.t.Errorf("member %s differs at %d", uid, b)
				break
			}
		}
	}
}

// TestReturn has a replica go and come back: the join copies the writes in between, and little more.
func TestReturn(t *testing.T) {
	suite.Slow(t)
	const size = int64(256) << 20
	c := newCluster(t, size, 2, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	model := make([]byte, size)
	rng := rand.New(rand.NewPCG(7, 7))
	write := func(off, n int64) {
		buf := block.AlignedBuffer(int(n))
		for i := range buf {
			buf[i] = byte(rng.Uint32())
		}
		copy(model[off:], buf)
		r := &block.Request{Op: block.OpWrite, Off: off, Len: n, Buf: buf}
		if err := Do(context.Background(), c.loop, c.e, r); err != nil {
			t.Fatal(err)
		}
	}
	for off := int64(0); off < size; off += 1 << 20 {
		write(off, 1<<20)
	}
	f := c.far[0]
	f.stop()
	c.proxy[0].cut()
	c.drop(f.uid)
	for range size / 100 / block.Size { // one block in a hundred
		write(rng.Int64N(size/block.Size)*block.Size, block.Size)
	}
	f.start()
	g := &guest{t: t, m: c.e, loop: c.loop, rng: rng, model: model[:8<<20]}
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.run(3000, 8)
	}()
	began := time.Now()
	p, err := c.back(f.uid)
	within(t, "end of what was begun", done)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("back after %v: %+v, %.2f %% travelled", time.Since(began), p, 100*float64(p.Sent)/float64(size))
	if p.Sent > size/100*2+int64(len(g.model)) { // the guest may be there first
		t.Errorf("%d bytes travelled", p.Sent)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	if epoch, members := c.rec.state(); len(members) != 3 {
		t.Errorf("epoch %d, members %v", epoch, members)
	}
	c.equal(model)
}

// faults has replicas hang, die, be cut off and come back at random, and the API go away, while a guest with a model
// works.
func faults(t *testing.T, seed uint64, others int, local bool, rounds int) {
	const size = 32 << 20 // two regions
	c := newCluster(t, size, others, local)
	rng := rand.New(rand.NewPCG(seed, 99))
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	c.stalls.set(400*time.Millisecond, 2*time.Second) // abandoned members rejoin
	g := &guest{t: t, m: c.e, loop: c.loop, rng: rng, model: make([]byte, size)}
	all := slices.Clone(c.rec.members)
	for range rounds {
		k := rng.IntN(len(c.far))
		what := rng.IntN(5)
		wait := time.Duration(rng.IntN(60)) * time.Millisecond
		undo := make(chan struct{})
		go func() {
			defer close(undo)
			timer := time.NewTimer(wait)
			<-timer.C
			switch what {
			case 0:
				c.proxy[k].cut()
			case 1: // the process is killed and restarts at once
				c.far[k].stop()
				c.proxy[k].cut()
				c.far[k].start()
			case 2: // the replica stays away for longer than the stall timeout
				c.far[k].stop()
				c.proxy[k].cut()
				timer.Reset(time.Second)
				<-timer.C
				c.far[k].start()
			case 3: // the replica hangs, and continues late
				c.proxy[k].freeze(true)
				timer.Reset(900 * time.Millisecond)
				<-timer.C
				c.proxy[k].freeze(false)
			case 4:
				c.rec.mu.Lock()
				c.rec.away = true
				c.rec.mu.Unlock()
				c.proxy[k].cut()
				timer.Reset(300 * time.Millisecond)
				<-timer.C
				c.rec.mu.Lock()
				c.rec.away = false
				c.rec.mu.Unlock()
			}
		}()
		g.run(400+rng.IntN(400), 12)
		<-undo
		if t.Failed() {
			t.Fatalf("seed %d: fault %d of replica %d", seed, what, k)
		}
		if rng.IntN(3) > 0 {
			_, members := c.rec.state()
			for _, uid := range all {
				if !slices.Contains(members, uid) {
					if _, err := c.back(uid); err != nil {
						t.Logf("seed %d: %v", seed, err)
					}
				}
			}
		}
		now, members := c.rec.state()
		c.e.SetWhole(now, len(members) == len(all))
	}
	c.stalls.set(endless, endless)
	for deadline := time.Now().Add(5 * time.Minute); ; {
		_, members := c.rec.state()
		if len(members) == len(all) {
			break
		}
		for _, uid := range all {
			if !slices.Contains(members, uid) {
				if _, err := c.back(uid); err != nil && time.Now().After(deadline) {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
		}
	}
	g.run(200, 12)
	if err := c.e.Close(); err != nil {
		t.Errorf("seed %d: %v", seed, err)
	}
	c.equal(g.model)
	if t.Failed() {
		t.Fatalf("seed %d", seed)
	}
}

// TestFaults runs a few random schedules; DROVER_FAULTS sets the number, DROVER_SEED selects a single schedule.
func TestFaults(t *testing.T) {
	for seed := range suite.Seeds(t, suite.Count(t, "DROVER_FAULTS", 2, 50)) {
		shape := []struct {
			others int
			local  bool
		}{{2, true}, {1, true}, {2, false}, {3, false}}[seed%4]
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { faults(t, seed, shape.others, shape.local, 6) })
	}
}

// TestIOWaitsUntilAReplicaIsBack stops every replica: I/O waits, and continues when one replica is back.
func TestIOWaitsUntilAReplicaIsBack(t *testing.T) {
	suite.Slow(t)
	c := newCluster(t, testSize, 2, false)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, m: c.e, loop: c.loop, rng: rand.New(rand.NewPCG(5, 5)), model: make([]byte, testSize)}
	g.run(200, 8)
	c.stalls.set(2*time.Second, 10*time.Second)
	for i, f := range c.far {
		f.stop()
		c.proxy[i].cut()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.run(100, 8)
	}()
	timer := time.NewTimer(4 * time.Second)
	select {
	case <-done:
		t.Fatal("I/O went on without a replica")
	case <-timer.C:
	}
	c.far[1].start()
	timer.Reset(5 * time.Minute)
	select {
	case <-done:
	case <-timer.C:
		t.Error("I/O does not go on with a replica") // perhaps waits for the other replica
	}
	c.far[0].start()
	within(t, "end of what was begun", done)
	if err := c.e.Close(); err != nil {
		t.Error(err)
	}
	c.equal(g.model)
}

// TestUnclean ends an engine in the middle of its work: the next engine resyncs the members before it serves.
func TestUnclean(t *testing.T) {
	c := newCluster(t, testSize, 2, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, m: c.e, loop: c.loop, rng: rand.New(rand.NewPCG(6, 6)), model: make([]byte, testSize)}
	g.run(500, 16)
	old := c.e
	// One member gets a write that the other members lack, as if the engine had died in between.
	_, members := c.rec.state()
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	stray := c.member(members[1])
	if err := stray.Member.Adopt(context.Background(), 1, 5, members); err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(block.Size)
	for i := range buf {
		buf[i] = 0xaa
	}
	if err := Do(context.Background(), c.loop, stray.Member, &block.Request{Op: block.OpWrite, Off: 8192,
		Len: block.Size, Buf: buf}); err != nil {
		t.Fatal(err)
	}
	if err := stray.Member.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	one := c.content(members[0])
	c.equal(one)
}

// TestGoneForLong: while all replicas are gone, waiting I/O fails after a time, if the user wants so. Later I/O fails,
// too, until a replica is back.
func TestGoneForLong(t *testing.T) {
	suite.Slow(t)
	c := newCluster(t, testSize, 2, false)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(block.Size)
	write := func() error {
		return Do(context.Background(), c.loop, c.e, &block.Request{Op: block.OpWrite, Len: block.Size, Buf: buf})
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	c.far[1].stop()
	c.proxy[1].cut()
	c.drop(c.far[1].uid) // one after the other: the last member has no stall timeout
	if err := write(); err != nil {
		t.Fatal(err)
	}
	c.stalls.set(2*time.Second, 10*time.Second)
	c.far[0].stop()
	c.proxy[0].cut()
	failed := make(chan error, 2)
	go func() { failed <- write() }()
	go func() {
		in := block.AlignedBuffer(block.Size)
		failed <- Do(context.Background(), c.loop, c.e, &block.Request{Op: block.OpRead, Off: 8192, Len: block.Size, Buf: in})
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	for n := 0; n < 2; {
		select {
		case err := <-failed:
			if err == nil {
				t.Fatal("I/O went on without a replica")
			}
			n++
		case <-tick.C:
			if _, err := c.e.FailAfter(context.Background(), 300*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			if time.Since(began) > 5*time.Minute {
				t.Fatal("I/O waits still")
			}
		}
	}
	if err := write(); err == nil {
		t.Fatal("I/O that came later went on without a replica")
	}
	c.far[0].start()
	for {
		<-tick.C
		if fails, err := c.e.FailAfter(context.Background(), 300*time.Millisecond); err != nil {
			t.Fatal(err)
		} else if !fails {
			break
		}
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	c.far[1].start()
	if err := c.e.Close(); err != nil {
		t.Error(err)
	}
}

// TestBothGone: both replicas fail the same writes at once, so no member can vouch for a drop. The time limit of
// waiting I/O holds here, too.
func TestBothGone(t *testing.T) {
	suite.Slow(t)
	c := newCluster(t, testSize, 2, false)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	write := func(value byte) error {
		buf := block.AlignedBuffer(block.Size)
		for i := range buf {
			buf[i] = value
		}
		return Do(context.Background(), c.loop, c.e, &block.Request{Op: block.OpWrite, Len: block.Size, Buf: buf})
	}
	if err := write(1); err != nil {
		t.Fatal(err)
	}
	c.stalls.set(2*time.Second, 10*time.Second)
	for _, p := range c.proxy {
		p.freeze(true) // both replicas get the write, and do not answer
	}
	failed := make(chan error, 1)
	go func() { failed <- write(2) }()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; {
		if _, err := c.e.FailAfter(context.Background(), 300*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-failed:
			if err == nil {
				t.Fatal("a write went on without a replica")
			}
		case <-tick.C:
			if time.Since(began) > 5*time.Minute {
				t.Fatal("a write waits still")
			}
			continue
		}
		break
	}
	for _, p := range c.proxy {
		p.cut()
		p.freeze(false)
	}
	for {
		<-tick.C
		if fails, err := c.e.FailAfter(context.Background(), 300*time.Millisecond); err != nil {
			t.Fatal(err)
		} else if !fails {
			break
		}
	}
	if err := write(3); err != nil {
		t.Fatal(err)
	}
	if err := c.e.Close(); err != nil {
		t.Error(err)
	}
	model := make([]byte, testSize)
	for i := range block.Size {
		model[i] = 3
	}
	c.equal(model)
}
