package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestFaults runs random schedules of faults under verified load on attached volumes, one per node: no I/O may fail,
// and no acknowledged write may be lost. DROVER_SCHEDULES is the number of schedules, DROVER_SEED repeats a run.
func TestFaults(t *testing.T) {
	suite.Long(t)
	c := start(t, Options{Nodes: 3})
	seed := suite.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	const size = 64 << 20
	type loaded struct {
		name, device string
		load         *Load
		ended        chan error
	}
	var all []*loaded
	for i, m := range c.Nodes {
		l := &loaded{name: fmt.Sprintf("v%d", i+1), load: NewLoad(size, 16<<20), ended: make(chan error, 1)}
		l.load.Workers = 2
		v := &api.Volume{Spec: api.VolumeSpec{Size: size, Nodes: []string{m.Name}}}
		v.Name = l.name
		must(t, c.Objects.Create(t.Context(), v))
		c.attach(t, l.name, m.Name)
		var a api.Attachment
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &a))
		l.device = a.Status.Device
		all = append(all, l)
	}
	three := &loaded{name: "three", load: NewLoad(size, 16<<20), ended: make(chan error, 1)}
	three.load.Workers = 2
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 3}}
	v.Name = three.name
	must(t, c.Objects.Create(t.Context(), v))
	awaitVolume(t, c, three.name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == 3 })
	c.attach(t, three.name, c.Nodes[0].Name)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: three.name}, &a))
	three.device = a.Status.Device
	all = append(all, three)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for _, l := range all {
		go func() { l.ended <- l.load.Run(ctx, l.device) }()
	}
	for i := range suite.Count(t, "DROVER_SCHEDULES", 1, 10) {
		err := c.Schedule(t.Context(), r, func(what string) { t.Logf("schedule %d: %s", i, what) })
		must(t, err)
		for _, l := range all {
			was := l.load.Writes()
			deadline := time.After(readyTime)
			tick := time.NewTicker(20 * time.Millisecond)
			for l.load.Writes() < was+20 {
				select {
				case <-tick.C:
				case err := <-l.ended:
					t.Fatalf("volume %s: %v", l.name, err)
				case <-deadline:
					t.Fatalf("volume %s: no I/O for %v after the faults are over", l.name, l.load.Idle())
				}
			}
			tick.Stop()
		}
	}
	stop()
	for _, l := range all {
		err := <-l.ended
		must(t, errors.Join(err, l.load.Verify(l.device, false)))
		t.Logf("volume %s: %d writes, longest request %v", l.name, l.load.Writes(), l.load.Worst())
	}
	must(t, c.connect())
	var now api.Volume
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: three.name}, &now))
	t.Logf("volume three: members %v, %s", now.Status.Members, now.Status.Message)
	for i, l := range all {
		c.detach(t, l.name)
		for k, m := range c.Nodes { // the local member serves reads: all members have the same data
			if l != three && k != i {
				continue
			}
			c.attach(t, l.name, m.Name)
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &a))
			must(t, l.load.Verify(a.Status.Device, false))
			c.detach(t, l.name)
		}
	}
}
