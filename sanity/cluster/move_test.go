package cluster

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// metric is the value of a machine's metric whose line begins with series, such as
// `drover_volume_members{volume="v"`.
func (c *Cluster) metric(t *testing.T, m *Machine, series string) (value float64) {
	t.Helper()
	eventually(t, series+" on "+m.Name, func() bool {
		r, err := http.Get("http://" + m.IP + ":9100/metrics")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return false
		}
		for line := range strings.Lines(string(body)) {
			if f := strings.Fields(line); len(f) == 2 && strings.HasPrefix(line, series) {
				value, err = strconv.ParseFloat(f[1], 64)
				return err == nil
			}
		}
		return false
	})
	return value
}

// TestRollingRestart restarts the nodes in turn while a volume with three replicas works: nodes without the engine as
// machines, the engine's node by its processes, as an upgrade does. No I/O fails, and rebuilds copy only regions with
// missed writes.
func TestRollingRestart(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	const size = 512 << 20
	l := newLoaded(t, c, "v", size, 3)
	l.attach(c.Nodes[0])
	awaitVolume(t, c, "v", "healthy", whole)
	counted := func() (fulls, deltas, compared, sent float64) {
		m := c.Nodes[0]
		return c.metric(t, m, `drover_volume_rebuilds_total{kind="full",process="data",volume="v"}`),
			c.metric(t, m, `drover_volume_rebuilds_total{kind="delta",process="data",volume="v"}`),
			c.metric(t, m, `drover_volume_rebuild_bytes_total{process="data",volume="v",what="compared"}`),
			c.metric(t, m, `drover_volume_rebuild_bytes_total{process="data",volume="v",what="sent"}`)
	}
	f0, d0, c0, s0 := counted() // the making of the volume
	for _, m := range c.Nodes[1:] {
		l.works(100)
		must(t, m.PowerOff())
		awaitVolume(t, c, "v", "smaller", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
		l.works(100)
		must(t, m.PowerOn())
		must(t, m.Serve(t.Context()))
		began := time.Now()
		awaitVolume(t, c, "v", "healthy", whole)
		t.Logf("%s is back, and the volume whole after %v", m.Name, time.Since(began))
	}
	// Each is counted a moment after the volume is whole.
	eventually(t, "two rebuilds are counted", func() bool { _, d, _, _ := counted(); return d-d0 >= 2 })
	f1, d1, c1, s1 := counted()
	t.Logf("compared %.1f MiB, sent %.1f MiB, of %d MiB twice", (c1-c0)/(1<<20), (s1-s0)/(1<<20), size>>20)
	// The load writes to 16 MiB, which is a region. On a busy machine a slow member returns once more.
	if f1 != f0 || d1-d0 < 2 || c1-c0 == 0 || c1-c0 > (d1-d0+1)*(64<<20) || s1-s0 > c1-c0 {
		t.Errorf("rebuilds: full %v, delta %v, compared %v, sent %v", f1-f0, d1-d0, c1-c0, s1-s0)
	}
	engine := c.Nodes[0]
	must(t, engine.Stop())
	must(t, engine.Kill("data"))
	must(t, engine.Serve(t.Context()))
	l.works(100)
	awaitVolume(t, c, "v", "healthy", whole)
	must(t, c.Control.Stop())
	must(t, c.Control.Serve(t.Context()))
	must(t, c.connect())
	l.works(100)
	l.halt()
	t.Logf("%d writes, longest request %v", l.load.Writes(), l.load.Worst())
	c.detach(t, "v")
	for _, m := range c.Nodes { // all hold the same
		l.attach(m)
		l.halt()
		c.detach(t, "v")
	}
}

// TestTakenOver cuts the engine's node off from all other machines. A forced detach takes the volume away, and the
// volume works on another node, with every acknowledged write. Back again, the first engine has acknowledged no more
// writes, its I/O fails, and in the end all replicas have the same data.
func TestTakenOver(t *testing.T) {
	c := startAlone(t, Options{Nodes: 3})
	l := newLoaded(t, c, "v", 64<<20, 3)
	l.attach(c.Nodes[0])
	awaitVolume(t, c, "v", "healthy", whole)
	l.works(200)
	c.Net.Isolate(c.Nodes[0], c.Machines()...)
	// I/O in progress has ended by then, also on a busy machine.
	eventually(t, "I/O stands still", func() bool { return l.load.Idle() > 10*time.Second })
	i, acked := l.load.Before(), l.load.Writes()
	began := time.Now()
	c.command(t, "volume", "detach", "v", "--force")
	t.Logf("detached after %v", time.Since(began))
	c.attach(t, "v", c.Nodes[1].Name)
	t.Logf("attached elsewhere after %v", time.Since(began))
	l.load.After(i)
	second := &loaded{t: t, c: c, name: "v", load: NewLoad(64<<20, 16<<20)}
	a := awaitAttached(t, c, "v")
	if a.Spec.Node != c.Nodes[1].Name {
		t.Fatalf("attached to %s", a.Spec.Node)
	}
	must(t, i.Verify(a.Status.Device))
	for n := range second.load.blocks { // the second load continues from the blocks found
		seen := i.acked[n]
		second.load.blocks[n] = blockState{issued: seen, acked: seen, seen: seen}
	}
	second.node, second.device, second.epoch = c.Nodes[1], a.Status.Device, a.Status.Epoch
	second.begin()
	second.works(200)
	if n := l.load.Writes(); n != acked {
		t.Errorf("the engine that was replaced acknowledged %d writes", n-acked)
	}
	c.Net.Heal()
	select {
	case err := <-l.ended:
		if err == nil {
			t.Error("the I/O of the engine that was replaced did not fail")
		}
		t.Logf("the first node's I/O: %.200v", fmt.Sprint(err))
	case <-time.After(readyTime):
		t.Fatal("the I/O of the engine that was replaced waits still")
	}
	if n := l.load.Writes(); n != acked {
		t.Errorf("the engine that was replaced acknowledged %d writes", n-acked)
	}
	awaitVolume(t, c, "v", "healthy", whole)
	second.works(100)
	second.halt()
	c.detach(t, "v")
	for _, m := range c.Nodes {
		second.attach(m)
		second.halt()
		c.detach(t, "v")
	}
}

func awaitAttached(t *testing.T, c *Cluster, volume string) (a api.Attachment) {
	t.Helper()
	eventually(t, "volume "+volume+" is attached", func() bool {
		return c.Objects.Get(t.Context(), client.ObjectKey{Name: volume}, &a) == nil && a.Status.Ready
	})
	return a
}
