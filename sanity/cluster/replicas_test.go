package cluster

import (
	"context"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// loaded is an attached volume under load.
type loaded struct {
	t      *testing.T
	c      *Cluster
	name   string
	node   *Machine
	device string
	epoch  int64 // of the attachment
	load   *Load
	stop   context.CancelFunc
	ended  chan error
}

// newLoaded makes a volume with replicas on as many nodes.
func newLoaded(t *testing.T, c *Cluster, name string, size int64, replicas int32) *loaded {
	t.Helper()
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: replicas}}
	v.Name = name
	must(t, c.Objects.Create(t.Context(), v))
	awaitVolume(t, c, name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == int(replicas) })
	return &loaded{t: t, c: c, name: name, load: NewLoad(size, 16<<20)}
}

// attach attaches the volume to a node, checks the content, and begins the load.
func (l *loaded) attach(m *Machine) {
	l.t.Helper()
	l.c.attach(l.t, l.name, m.Name)
	var a api.Attachment
	must(l.t, l.c.Objects.Get(l.t.Context(), client.ObjectKey{Name: l.name}, &a))
	l.node, l.device, l.epoch = m, a.Status.Device, a.Status.Epoch
	must(l.t, l.load.Verify(l.device, false))
	l.begin()
}

func (l *loaded) begin() {
	ctx, stop := context.WithCancel(context.Background())
	l.stop, l.ended = stop, make(chan error, 1)
	go func() { l.ended <- l.load.Run(ctx, l.device) }()
	l.t.Cleanup(stop)
}

// halt ends the load; nothing may have gone wrong.
func (l *loaded) halt() {
	l.t.Helper()
	l.stop()
	must(l.t, <-l.ended)
	must(l.t, l.load.Verify(l.device, false))
}

// manyWrites is how many writes the load makes without a pace.
const manyWrites = 500

// hurry shortens the pace of the load while the test waits for n writes, until the returned function is called.
func (l *loaded) hurry(n int64) func() {
	was := l.load.Pace.Load()
	if n >= manyWrites {
		l.load.Pace.Store(0)
	} else {
		l.load.Pace.Store(was / 10)
	}
	return func() { l.load.Pace.Store(was) }
}

// works waits for some more writes.
func (l *loaded) works(n int64) {
	l.t.Helper()
	defer l.hurry(n)()
	was := l.load.Writes()
	eventually(l.t, "I/O of volume "+l.name+" goes on", func() bool {
		select {
		case err := <-l.ended:
			l.t.Fatalf("volume %s: %v", l.name, err)
		default:
		}
		return l.load.Writes() >= was+n
	})
}

// worksWithin reports whether there are some more writes soon.
func (l *loaded) worksWithin(limit time.Duration, n int64) bool {
	l.t.Helper()
	defer l.hurry(n)()
	was, tick := l.load.Writes(), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for late := time.After(limit); l.load.Writes() < was+n; {
		select {
		case err := <-l.ended:
			l.t.Fatalf("volume %s: %v", l.name, err)
		case <-late:
			return false
		case <-tick.C:
		}
	}
	return true
}

// TestLostMember: the API reports a member lost by the engine within two minutes, for a busy and for an idle volume.
func TestLostMember(t *testing.T) {
	c := startAlone(t, Options{Nodes: 3})
	busy := newLoaded(t, c, "busy", 64<<20, 3)
	idle := newLoaded(t, c, "idle", 64<<20, 3)
	busy.attach(c.Nodes[0])
	idle.attach(c.Nodes[0])
	idle.halt()
	busy.works(100)
	lost := c.Nodes[2]
	must(t, lost.PowerOff())
	began := time.Now()
	for _, x := range []struct {
		name string
		most time.Duration
	}{{"busy", 2 * time.Minute}, {"idle", 2 * time.Minute}} {
		awaitVolume(t, c, x.name, "smaller", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
		t.Logf("%s: out of the members after %v", x.name, time.Since(began))
		v := awaitVolume(t, c, x.name, "degraded", func(v *api.Volume) bool {
			return v.Status.Robustness == api.RobustDegraded
		})
		took := time.Since(began)
		t.Logf("%s: degraded after %v: %s", x.name, took, v.Status.Message)
		if took > x.most {
			t.Errorf("volume %s is said to be degraded after %v", x.name, took)
		}
	}
	busy.works(100)
	must(t, lost.PowerOn())
	must(t, lost.Serve(t.Context()))
	began = time.Now()
	for _, name := range []string{"busy", "idle"} {
		awaitVolume(t, c, name, "healthy", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustHealthy })
		t.Logf("%s: healthy %v after the node came back", name, time.Since(began))
	}
	busy.halt()
}
