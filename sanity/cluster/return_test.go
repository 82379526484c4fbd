package cluster

import (
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

// TestReturn logs how long a volume takes to become healthy again after its node is reachable again: after a cut of
// the network, a frozen process, and a machine that was off. The time should not depend on the length of the absence.
func TestReturn(t *testing.T) {
	suite.Long(t)
	c := start(t, Options{Nodes: 3})
	busy := newLoaded(t, c, "busy", 64<<20, 3)
	idle := newLoaded(t, c, "idle", 64<<20, 3)
	busy.attach(c.Nodes[0])
	idle.attach(c.Nodes[0])
	idle.halt()
	lost := c.Nodes[2]
	type absence struct {
		name        string
		away        time.Duration // after the replica was dropped
		lose, mends func() error
	}
	isolate := func() error { c.Net.Isolate(lost, c.Machines()...); return nil }
	heal := func() error { c.Net.Heal(); return nil }
	absences := []absence{
		{"cut off", 2 * time.Second, isolate, heal},
		{"serve and data killed", 5 * time.Second,
			func() error { return lost.Kill("serve", "data") },
			func() error { lost.Gone(); return lost.Serve(t.Context()) }},
		{"off", 10 * time.Second, lost.PowerOff, func() error {
			if err := lost.PowerOn(); err != nil {
				return err
			}
			return lost.Serve(t.Context())
		}},
	}
	if suite.All() {
		absences = append(absences, absence{"cut off for longer", 25 * time.Second, isolate, heal},
			absence{"frozen", 5 * time.Second, func() error { return lost.Freeze("data") },
				func() error { return lost.Thaw("data") }})
	}
	for _, x := range absences {
		must(t, x.lose())
		for _, name := range []string{"busy", "idle"} {
			awaitVolume(t, c, name, "smaller", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
		}
		away := time.NewTimer(x.away)
		<-away.C
		began := time.Now()
		must(t, x.mends())
		ready := time.Now()
		var both sync.WaitGroup
		for _, name := range []string{"busy", "idle"} {
			both.Go(func() {
				_, err := await.Until(soon(t), c.Objects, name, func(v *api.Volume) (bool, error) {
					return len(v.Status.Members) == 3 && v.Status.Robustness == api.RobustHealthy, nil
				})
				if err != nil {
					t.Errorf("%s: volume %s is not whole: %v", x.name, name, err)
				}
				t.Logf("%s: %s is whole after %v, %v of these until the node's program was ready", x.name, name,
					time.Since(began).Round(time.Millisecond), ready.Sub(began).Round(time.Millisecond))
			})
		}
		both.Wait()
		busy.works(50)
	}
	busy.halt()
}
