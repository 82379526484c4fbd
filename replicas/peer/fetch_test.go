package peer

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/stack"
)

const imageSize = 32 << 20

// image makes a layer on a disk.
func image(t *testing.T, disk *stack.Disk) string {
	t.Helper()
	layer := string(api.NewUID())
	w, err := disk.Create(t.Context(), layer, imageSize)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, imageSize)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	if _, err := w.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	return layer
}

// hydrate lets a disk read a layer of another disk, unless the source is lost.
func hydrate(t *testing.T, to, from *stack.Disk, layer string, lost *atomic.Bool) {
	t.Helper()
	to.Sources(nil, func(_ context.Context, l stack.RemoteLayer, off int64, buf []byte, _ func([]byte) error) error {
		if lost.Load() {
			return api.Errorf(api.Unavailable, "the source is off")
		}
		src, err := from.Open(l.UID)
		if err != nil {
			return err
		}
		defer src.Close()
		_, err = src.ReadAt(buf, off)
		return err
	})
	root, _, err := from.Digest(layer)
	if err != nil {
		t.Fatal(err)
	}
	src, err := from.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	sums, err := from.Sums(layer)
	if err != nil {
		t.Fatal(err)
	}
	if err := to.Hydrate(t.Context(), layer, root, src, sums); err != nil {
		t.Fatal(err)
	}
}

// onImage makes a replica on a layer.
func onImage(t *testing.T, disk *stack.Disk, volume, layer string) string {
	t.Helper()
	uid := string(api.NewUID())
	spec := stack.Spec{UID: uid, Volume: "v", VolumeUID: volume, Size: imageSize, Layers: []string{layer}}
	if err := disk.CreateReplica(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	return uid
}

func newDisk(t *testing.T) *stack.Disk {
	t.Helper()
	disk, err := stack.Add(t.Context(), filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = disk.Close() })
	return disk
}

// imaged is an engine with two members on an image: "far" has the image, and the engine's own node reads the image
// there.
type imaged struct {
	t       *testing.T
	loop    Loop
	e       *engine.Engine
	far     *far
	lost    atomic.Bool // the source of the image, not the member
	dropped chan string
}

func newImaged(t *testing.T, timeout engine.StallTimeout) *imaged {
	w := &imaged{t: t, far: newFar(t, imageSize, nil), dropped: make(chan string, 9)}
	layer := image(t, w.far.disk)
	w.far.uid = onImage(t, w.far.disk, w.far.volume, layer)
	disk := newDisk(t)
	hydrate(t, disk, w.far.disk, layer, &w.lost)
	near := onImage(t, disk, w.far.volume, layer)
	loop := startLoop(t)
	r, err := disk.OpenReplica(t.Context(), near, loop)
	if err != nil {
		t.Fatal(err)
	}
	w.loop = loop
	m := member(t, newDialer(t, w.far.at), w.far, loop, nil)
	watch := newWatch(t)
	watched := func(on engine.Cutter, replica string, timeout engine.StallTimeout) engine.Member {
		return watch.Member(on, engine.WatchOptions{Loop: loop, Replica: replica,
			Timeout: func() engine.StallTimeout { return timeout }})
	}
	w.e, err = engine.Open(t.Context(), engine.Config{Loop: loop, Size: imageSize, Epoch: 7, Incarnation: 1, Track: true,
		Drop:   func(context.Context, int64, string) error { return nil },
		OnDrop: func(name string, why error) { w.dropped <- name },
		Members: []engine.Named{
			{Name: near, Local: true, Member: watched(NewBackend(r, loop), near, timeout)},
			{Name: w.far.uid, Member: watched(m, w.far.uid, engine.StallTimeout{Min: time.Second, Max: 2 * time.Second})},
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.e.Hurry()
		_ = w.e.Close()
	})
	return w
}

func (w *imaged) start(op block.Op, off int64) chan error {
	done := make(chan error, 1)
	r := &block.Request{Op: op, Off: off, Len: block.Size, Buf: block.AlignedBuffer(block.Size), Done: func(q *block.Request) { done <- q.Err }}
	w.loop.Post(func() { w.e.Submit(r) })
	return done
}

// TestImagesNodeDiesWhileAReadWaits: the only other machine with the image and a replica dies, while a read waits for a
// block of the image. The engine drops the replica, and writes continue.
func TestImagesNodeDiesWhileAReadWaits(t *testing.T) {
	suite.Slow(t)
	w := newImaged(t, engine.StallTimeout{Min: endless, Max: endless})
	if err := within(t, "a block of the image", w.start(block.OpRead, 0)); err != nil {
		t.Fatal(err)
	}
	w.lost.Store(true)
	w.far.stop()
	defer w.far.start()
	read := w.start(block.OpRead, 16<<20)
	write := w.start(block.OpWrite, 0)
	if err := within(t, "answer to a write", write); err != nil {
		t.Error(err)
	}
	if name := within(t, "drop", w.dropped); name != w.far.uid {
		t.Errorf("the replica that lives was dropped, %s", name)
	}
	select {
	case err := <-read:
		t.Errorf("the read of a block that nobody has ended: %v", err)
	default:
	}
}

// TestSlowSourceCostsNoMember: a replica whose image has a silent source stays a member, and another member answers the
// read. A busy machine can be slower than the short stall timeout, but not each time.
func TestSlowSourceCostsNoMember(t *testing.T) {
	suite.Slow(t)
	for range 5 {
		w := newImaged(t, engine.StallTimeout{Min: 300 * time.Millisecond, Max: 600 * time.Millisecond})
		w.lost.Store(true)
		if err := within(t, "a block of the image", w.start(block.OpRead, 16<<20)); err != nil {
			t.Fatal(err)
		}
		for range 8 { // stall timeouts
			time.Sleep(300 * time.Millisecond)
			if err := within(t, "answer to a write", w.start(block.OpWrite, 0)); err != nil {
				t.Fatal(err)
			}
		}
		if len(w.dropped) == 0 {
			return
		}
	}
	t.Error("a sound replica was dropped each time since the source of its image is slow")
}

// TestRemoteReplicaTellsWhatItFetches: a replica on another machine answers reads of unfetched blocks at once, and
// calls in bounded time.
func TestRemoteReplicaTellsWhatItFetches(t *testing.T) {
	suite.Slow(t)
	f, source := newFar(t, imageSize, nil), newDisk(t)
	var lost atomic.Bool
	layer := image(t, source)
	hydrate(t, f.disk, source, layer, &lost)
	f.uid = onImage(t, f.disk, f.volume, layer)
	lost.Store(true)
	loop := startLoop(t)
	m := member(t, newDialer(t, f.at), f, loop, nil)
	adoptAs(t, m, 1, 1)
	read := &block.Request{Op: block.OpRead, Len: block.Size, Buf: block.AlignedBuffer(block.Size)}
	if err := Do(t.Context(), loop, m, read); !errors.Is(err, stack.ErrNotFetched) {
		t.Errorf("a read of what is not fetched: %v", err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Second) // a longer call would be a stall
	defer cancel()
	if _, err := m.Digests(soon, 0, 1<<20); !errors.Is(err, stack.ErrNotFetched) {
		t.Errorf("digests of what is not fetched: %v", err)
	}
	if err := m.Adopt(t.Context(), 2, 1, []string{f.uid}); err != nil {
		t.Errorf("the next epoch: %v", err)
	}
	lost.Store(false)
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		err := Do(t.Context(), loop, m, read)
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("a read of what came: %v", err)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestReadOfAnOlderNodeWaitsForTheFetch: a node of an older version does not know the answer "not fetched". The server
// keeps the node's read until the block is fetched.
func TestReadOfAnOlderNodeWaitsForTheFetch(t *testing.T) {
	suite.Slow(t)
	f, source := newFar(t, imageSize, nil), newDisk(t)
	var lost atomic.Bool
	layer := image(t, source)
	hydrate(t, f.disk, source, layer, &lost)
	f.uid = onImage(t, f.disk, f.volume, layer)
	lost.Store(true)
	g := newGreedyOf(t, f, f.uid, f.volume, notFetchedSince-1)
	var b [headerSize]byte
	h := header{kind: kindRead, session: 1, id: 3, n: block.Size}
	h.encode(&b)
	if _, err := g.nc.Write(b[:]); err != nil {
		t.Fatal(err)
	}
	if err := g.nc.SetReadDeadline(time.Now().Add(4 * notFetchedPause)); err != nil {
		t.Fatal(err)
	}
	if _, err := g.r.Peek(1); err == nil {
		t.Fatal("an older node got an answer to a read of what is not fetched")
	}
	lost.Store(false)
	if err := g.nc.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if h, data := g.next(); h.id != 3 || len(data) != block.Size {
		t.Errorf("answer %d of %d bytes", h.id, len(data))
	}
}

// drained is a replica that notifies the test of each drain.
type drained struct {
	*Backend
	seen chan bool
}

func (d *drained) Drain(ctx context.Context) error {
	d.seen <- true
	return d.Backend.Drain(ctx)
}

// TestWritesOfTheFormerSessionAreDrained: when a new session replaces a former session, the server drains the former
// session's last writes.
func TestWritesOfTheFormerSessionAreDrained(t *testing.T) {
	seen := make(chan bool, 9)
	f := newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			r, loop, err := open(ctx, uid, volume)
			if err != nil {
				return nil, nil, err
			}
			return &drained{Backend: r.(*Backend), seen: seen}, loop, nil
		}
	})
	d, loop := newDialer(t, f.at), startLoop(t)
	old, now := member(t, d, f, loop, nil), member(t, d, f, loop, nil)
	adoptAs(t, old, 1, 1)
	if len(seen) > 0 {
		t.Error("the first session drains something")
	}
	adoptAs(t, now, 1, 2)
	if len(seen) == 0 {
		t.Error("writes of the former session may come after the answer to the adoption of the new one")
	}
	_ = old.Close()
	if err := now.Close(); err != nil {
		t.Error(err)
	}
}

// newGreedyOf is a client of some version with a session of a replica.
func newGreedyOf(t *testing.T, f *far, replica, volume string, version int) *greedy {
	t.Helper()
	g := dialGreedy(t, f)
	g.say(header{kind: kindHello}, hello{Version: version, MinVersion: minVersion, Node: "greedy"})
	_, b := g.next()
	var h hello
	if err := json.Unmarshal(b, &h); err != nil || h.Version < notFetchedSince {
		t.Fatalf("hello %s: %v", b, err)
	}
	g.say(header{kind: kindOpen, session: 1, id: 1}, openRequest{replica, volume})
	g.next()
	g.say(header{kind: kindAdopt, session: 1, id: 2}, adoption{1, 1, []string{replica}})
	g.next()
	return g
}
