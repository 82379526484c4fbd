package peer

import (
	"context"
	"runtime"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// call sends a call of session 1.
func (g *greedy) call(id uint64, call string) {
	g.t.Helper()
	if err := writeControl(g.nc, header{kind: kindCall, session: 1, id: id}, []byte(call)); err != nil {
		g.t.Fatal(err)
	}
}

// prepareFrame is a call that prepares a cut, for no snapshot.
func prepareFrame() string { return "prepare-cut\n" + `{"layer":"` + string(api.NewUID()) + `"}` }

// awaitHang waits until the disk hangs in a call.
func (d *stuckDisk) awaitHang(name string) {
	for d.hung(name) == 0 {
		runtime.Gosched()
	}
}

// TestCutThatIsGivenUpIsNotPrepared: a prepare waits for an adoption, and the engine gives the cut up meanwhile. The
// replica has no prepared cut afterwards.
func TestCutThatIsGivenUpIsNotPrepared(t *testing.T) {
	for name, end := range map[string]func(g *greedy){
		"by an abort":                 func(g *greedy) { g.call(9, "abort-cut\n{}") },
		"by the close of its session": func(g *greedy) { g.say(header{kind: kindClose, session: 1, id: 9}, none{}) },
	} {
		t.Run(name, func(t *testing.T) {
			d, opened := &stuckDisk{}, make(chan *Backend, 1)
			defer d.resume()
			f := newFar(t, testSize, func(o *ServerOptions) {
				open := o.Open
				o.Linger = time.Hour
				o.Open = d.open(func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
					r, l, err := open(ctx, uid, volume)
					if err == nil {
						opened <- r.(*Backend)
					}
					return r, l, err
				})
			})
			g := f.hold(t, []string{"meta\n{}"}, false)
			d.hang("adopt")
			g.say(header{kind: kindAdopt, session: 1, id: 7}, adoption{1, 2, []string{f.uid}})
			d.awaitHang("adopt")
			g.call(8, prepareFrame())
			end(g)
			if h, _ := g.next(); h.id != 9 {
				t.Fatalf("the answer to request %d", h.id)
			}
			d.resume()
			for range 2 { // to the adoption and to the prepare
				_ = g.answer()
			}
			b := <-opened
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.cut != nil {
				t.Error("the replica has a prepared cut that the engine has given up")
			}
		})
	}
}

// TestPrepareGivesAnEarlierOneUp: two prepares wait for an adoption. The replica prepares the second cut alone.
func TestPrepareGivesAnEarlierOneUp(t *testing.T) {
	d := &stuckDisk{}
	defer d.resume()
	f := newFar(t, testSize, func(o *ServerOptions) { o.Open = d.open(o.Open) })
	g := f.hold(t, []string{"meta\n{}"}, false)
	d.hang("adopt")
	g.say(header{kind: kindAdopt, session: 1, id: 9}, adoption{1, 2, []string{f.uid}})
	d.awaitHang("adopt")
	g.call(10, prepareFrame())
	g.call(11, prepareFrame())
	g.call(12, "meta\n{}")
	_ = g.answer() // the server has read all frames
	d.resume()
	errs := errorsOf(g, 3)
	if errs[1] == nil || errs[0] != nil || errs[2] != nil {
		t.Errorf("the adoption, the first and the second prepare: %v", errs)
	}
}

// TestPrepareThatIsGivenUpLeavesTheLaterCut: a prepare that the engine has given up runs after a later prepare. The
// engine commits the later cut.
func TestPrepareThatIsGivenUpLeavesTheLaterCut(t *testing.T) {
	f, loop := newFar(t, testSize, nil), startLoop(t)
	r, err := f.disk.OpenReplica(t.Context(), f.uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	b := NewBackend(r, loop)
	if err := b.Adopt(t.Context(), 1, 1, []string{f.uid}); err != nil {
		t.Fatal(err)
	}
	late, later := stack.Snapshot{Layer: string(api.NewUID())}, stack.Snapshot{Layer: string(api.NewUID())}
	if err := b.PrepareCut(t.Context(), later); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.PrepareCut(ended, late); !api.Is(err, api.Unavailable) {
		t.Errorf("the prepare that was given up: %v", err)
	}
	if err := b.DoCut(t.Context(), later.Layer); err != nil {
		t.Error(err)
	}
	if layers := b.Meta().Layers; !slices.Equal(layers, []string{later.Layer}) {
		t.Errorf("layers: %v", layers)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// TestOpenThatIsGivenUpEnds: an engine gives a probe up while the server opens the replica. The open ends, although the
// connection lives.
func TestOpenThatIsGivenUpEnds(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan error, 1)
	f := newFar(t, testSize, func(o *ServerOptions) {
		o.Open = func(ctx context.Context, _, _ string) (Replica, Loop, error) {
			close(begun)
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, nil, api.Errorf(api.Unavailable, "the open has ended: %w", ctx.Err())
		}
	})
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	probed := make(chan error, 1)
	go func() {
		_, _, err := m.Probe(ctx)
		probed <- err
	}()
	within(t, "open", begun)
	cancel()
	if err := within(t, "end of the probe", probed); !api.Is(err, api.Unavailable) {
		t.Errorf("the probe: %v", err)
	}
	within(t, "end of the open", ended)
	_ = m.Close()
}
