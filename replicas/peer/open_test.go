package peer

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
)

// collect reads answers until the test has enough, and notes their errors by the ids of the requests.
func (g *greedy) collect(to map[uint64]error, enough func() bool) {
	g.t.Helper()
	_ = g.nc.SetReadDeadline(time.Now().Add(time.Minute))
	for !enough() {
		var hb [headerSize]byte
		h, err := readHeader(g.r, &hb)
		var b []byte
		if err == nil {
			b, err = readPayload(g.r, &h)
		}
		if err != nil {
			g.t.Fatal(err)
		}
		to[h.id] = nil
		if h.status != 0 {
			to[h.id] = decodeFault(b)
		}
	}
}

// awaitReading waits until the server has read all frames, by a ping, whose answer has the id 0.
func (g *greedy) awaitReading(to map[uint64]error) {
	g.t.Helper()
	if err := writeControl(g.nc, header{kind: kindPing}, nil); err != nil {
		g.t.Fatal(err)
	}
	g.collect(to, func() bool { _, is := to[0]; return is })
	delete(to, 0)
}

// isOpening reports whether an open of a replica is in progress.
func (s *Server) isOpening(replica string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opens[replica] != nil
}

// TestOpensOfAReplicaWaitForEachOther: two engines open a replica at the same time, and a third engine gives its open
// up. The third open ends at once, and both others succeed.
func TestOpensOfAReplicaWaitForEachOther(t *testing.T) {
	opened, goOn := make(chan struct{}, 9), make(chan struct{})
	letGo := sync.OnceFunc(func() { close(goOn) })
	f := newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			r, l, err := open(ctx, uid, volume)
			if opened <- struct{}{}; err == nil {
				<-goOn
			}
			return r, l, err
		}
	})
	t.Cleanup(letGo)
	g := dialGreedy(t, f)
	g.say(header{kind: kindHello}, hello{Version: Version, MinVersion: minVersion, Node: "greedy"})
	g.next()
	g.say(header{kind: kindOpen, session: 1, id: 1}, openRequest{f.uid, f.volume})
	within(t, "open", opened)
	g.say(header{kind: kindOpen, session: 2, id: 2}, openRequest{f.uid, f.volume})
	g.say(header{kind: kindOpen, session: 3, id: 3}, openRequest{f.uid, f.volume})
	g.say(header{kind: kindClose, session: 3, id: 4}, none{})
	errs := map[uint64]error{}
	g.collect(errs, func() bool { return len(errs) == 2 })
	if !api.Is(errs[3], api.Busy) && !api.Is(errs[3], api.Unavailable) {
		t.Errorf("the open that was given up: %v", errs[3])
	}
	g.awaitReading(errs)
	letGo()
	g.collect(errs, func() bool { return len(errs) == 4 })
	if errs[1] != nil || errs[2] != nil {
		t.Errorf("the first open: %v; the second: %v", errs[1], errs[2])
	}
}

// TestOpensThatAreGivenUpLeaveTheQueue: a session ends on a hanging disk. Engines open the replica meanwhile, and give
// up. When the disk continues, only the engine that still waits opens the replica.
func TestOpensThatAreGivenUpLeaveTheQueue(t *testing.T) {
	d, opens := &stuckDisk{}, atomic.Int64{}
	defer d.resume()
	f := newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = d.open(func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			opens.Add(1)
			return open(ctx, uid, volume)
		})
	})
	const given, live = 8, 99
	g := f.hold(t, []string{"meta\n{}"}, false)
	d.hang("close")
	g.say(header{kind: kindClose, session: 1, id: 9}, none{})
	d.awaitHang("close")
	for i := range uint64(given) {
		g.say(header{kind: kindOpen, session: uint32(10 + i), id: 10 + i}, openRequest{f.uid, f.volume})
		for !f.s.isOpening(f.uid) { // the first open has the turn
			runtime.Gosched()
		}
	}
	for i := range uint64(given) {
		g.say(header{kind: kindClose, session: uint32(10 + i), id: 20 + i}, none{})
	}
	g.say(header{kind: kindOpen, session: live, id: live}, openRequest{f.uid, f.volume})
	errs := map[uint64]error{}
	g.collect(errs, func() bool { return len(errs) == 2*given }) // while the disk hangs
	g.awaitReading(errs)
	d.resume()
	g.collect(errs, func() bool { return len(errs) == 2*given+2 })
	if errs[live] != nil {
		t.Errorf("the engine that still waits: %v", errs[live])
	}
	if n := opens.Load(); n != 2 {
		t.Errorf("the replica was opened %d times", n)
	}
}

// TestGivenUpOpenOpensNothing: an open gets its turn after its engine has given the open up. The server does not open
// the replica.
func TestGivenUpOpenOpensNothing(t *testing.T) {
	f := newFar(t, testSize, func(o *ServerOptions) {
		o.Open = func(context.Context, string, string) (Replica, Loop, error) {
			t.Error("the replica is opened")
			return nil, nil, api.Errorf(api.Busy, "no")
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.s.openTarget(ctx, &session{}, f.uid, f.volume); !api.Is(err, api.Unavailable) {
		t.Errorf("the open: %v", err)
	}
}
