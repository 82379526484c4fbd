package cluster

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

// TestPowerLoss cuts the power of machines at random, with a loss of all unsynced data, under verified load on
// volumes with three replicas: of a node with replicas, of a node with an engine, of all nodes at once. Afterwards
// each volume has the flushed data, and every node's replica has the same data. DROVER_POWER is the number of
// schedules, DROVER_SEED repeats a run.
func TestPowerLoss(t *testing.T) {
	n := suite.Count(t, "DROVER_POWER", 1, 10)
	seed := suite.Seed(t)
	r := rand.New(rand.NewPCG(seed, 3))
	c := start(t, Options{Nodes: 3, Disks: []Disk{{Size: 1 << 30}}})
	var all []*loaded
	for i, m := range c.Nodes {
		l := newLoaded(t, c, fmt.Sprintf("v%d", i+1), 64<<20, 3)
		l.load = NewLoad(64<<20, 8<<20)
		l.load.Workers = 2
		all = append(all, l)
		l.attach(m)
	}
	began := time.Now()
	for i := range n {
		c.powerSchedule(t, r, all, i)
	}
	for _, l := range all {
		l.halt()
		t.Logf("volume %s: %d writes", l.name, l.load.Writes())
		c.detach(t, l.name)
	}
	t.Logf("%d schedules in %v", n, time.Since(began))
}

// powerSchedule cuts the power of some machines, turns the machines on again, and checks the volumes.
func (c *Cluster) powerSchedule(t *testing.T, r *rand.Rand, all []*loaded, i int) {
	t.Helper()
	for _, l := range all {
		l.works(30)
	}
	var cut []*Machine
	for _, m := range c.Nodes {
		if r.IntN(3) == 0 {
			cut = append(cut, m)
		}
	}
	if len(cut) == 0 || r.IntN(4) == 0 {
		cut = c.Nodes
	}
	if r.IntN(4) == 0 { // the server is away meanwhile
		must(t, c.Control.Kill("serve"))
		c.Control.Gone()
	}
	off := map[*Machine]bool{}
	var names []string
	var wg sync.WaitGroup
	errs := make([]error, len(cut))
	for k, m := range cut {
		off[m], names = true, append(names, m.Name)
		wg.Go(func() { errs[k] = m.CutPower() })
	}
	wg.Wait()
	for _, err := range errs {
		must(t, err)
	}
	away := time.Duration(r.IntN(6000)) * time.Millisecond
	t.Logf("schedule %d: power of %v is cut for %v", i, names, away)
	time.Sleep(away) // the time without power
	if len(c.Control.Pids("serve")) == 0 {
		must(t, c.Control.Serve(t.Context()))
		must(t, c.connect())
	}
	for k, m := range cut {
		wg.Go(func() {
			if errs[k] = m.PowerOn(); errs[k] == nil {
				errs[k] = m.Serve(t.Context())
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		must(t, err)
	}
	for _, l := range all {
		must(t, c.afterPower(t, l, off[l.node]))
	}
}

// afterPower waits until a volume works again. After a power loss of the engine, the node attaches the volume again.
func (c *Cluster) afterPower(t *testing.T, l *loaded, lost bool) error {
	if lost {
		l.stop()
		<-l.ended // the device is gone: an error, or the end of the last request
		a, err := await.Until(soon(t), c.Objects, l.name, func(a *api.Attachment) (bool, error) {
			return a.Status.Ready && a.Status.Epoch > l.epoch, nil
		})
		if err != nil {
			var v api.Volume
			_ = c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &v)
			return fmt.Errorf("volume %s is not attached again: %w: %+v", l.name, err, v.Status)
		}
		l.device, l.epoch = a.Status.Device, a.Status.Epoch
		eventually(t, "the device of "+l.name+" is there", func() bool {
			_, err := os.Stat(l.device)
			return err == nil
		})
		if err := l.load.Verify(l.device, true); err != nil {
			return fmt.Errorf("volume %s: %w", l.name, err)
		}
		l.begin()
	}
	l.works(10)
	v, err := await.Until(soon(t), c.Objects, l.name, func(v *api.Volume) (bool, error) {
		return v.Status.Robustness == api.RobustHealthy, nil
	})
	if err != nil {
		return fmt.Errorf("volume %s is not whole again: %w: %+v", l.name, err, v)
	}
	// The volume moves on: the next node's engine reads from the next node's replica.
	l.halt()
	c.detach(t, l.name)
	for k, m := range c.Nodes {
		if m == l.node {
			l.attach(c.Nodes[(k+1)%len(c.Nodes)])
			break
		}
	}
	c.tellDropped(t, l.name)
	v, err = await.Until(soon(t), c.Objects, l.name, func(v *api.Volume) (bool, error) {
		return len(v.Status.Members) == 3, nil
	})
	if err != nil {
		return fmt.Errorf("volume %s is not whole after it moved: %w: %+v", l.name, err, v)
	}
	return nil
}

// tellDropped logs why a volume was attached without some of its members.
func (c *Cluster) tellDropped(t *testing.T, volume string) {
	t.Helper()
	var v api.Volume
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: volume}, &v))
	if len(v.Status.Members) == 3 {
		return
	}
	var list eventsv1.EventList
	must(t, c.Objects.List(t.Context(), &list))
	for _, e := range list.Items {
		if e.Regarding.Name == volume && e.Reason == "ReplicaDropped" && time.Since(e.EventTime.Time) < 10*time.Second {
			t.Logf("%s was attached with %d members: %s", volume, len(v.Status.Members), e.Note)
		}
	}
}
