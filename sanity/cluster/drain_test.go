package cluster

import (
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestDrain: a drain rebuilds a node's replicas elsewhere before their deletion, for attached and detached volumes,
// with several replicas and with a single replica.
func TestDrain(t *testing.T) {
	c := start(t, Options{Nodes: 4})
	leaving, other := c.Nodes[0], c.Nodes[1]
	several := on(t, c, "several", nil, leaving, other, c.Nodes[2])
	idle := on(t, c, "idle", nil, leaving, other)
	alone := on(t, c, "alone", nil, leaving)
	far := on(t, c, "far", nil, leaving)
	here := on(t, c, "here", nil, leaving)
	for _, l := range []*loaded{idle, alone} { // the volumes need data
		l.attach(leaving)
		l.works(200)
		l.halt()
		c.detach(t, l.name)
	}
	used := on(t, c, "used", nil, leaving, other) // with the engine on the node
	used.attach(leaving)
	used.works(100)
	several.attach(other)
	far.attach(other)
	here.attach(leaving)
	several.works(100)
	far.works(100)

	c.command(t, "node", "drain", leaving.Name)
	began := time.Now()
	for _, l := range []*loaded{several, idle, alone, far, used, here} {
		eventually(t, "volume "+l.name+" leaves the node", func() bool {
			var v api.Volume
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &v))
			reps := replicasOf(t, c, l.name)
			_, there := reps[leaving.Name]
			return !there && len(v.Status.Members) == len(reps) && len(reps) == int(v.Spec.NumberOfReplicas) &&
				v.Status.Robustness == api.RobustHealthy
		})
		t.Logf("%s: moved %v after the drain began", l.name, time.Since(began))
	}
	// Volumes attached on the node leave, too: no replica keeps the disk in use.
	eventually(t, "the disk of the node is empty", func() bool {
		var list api.ReplicaList
		must(t, c.Objects.List(t.Context(), &list))
		return !slices.ContainsFunc(list.Items, func(r api.Replica) bool { return r.Spec.Node == leaving.Name })
	})
	here.works(100)
	several.works(100)
	far.works(100)
	used.works(100)
	several.halt()
	far.halt()
	used.halt()
	here.halt()
	c.detach(t, "here")
	c.detach(t, "used")
	c.detach(t, "several")
	c.detach(t, "far")

	// All data exists without the node.
	must(t, leaving.PowerOff())
	for _, l := range []*loaded{several, idle, alone, far, here, used} {
		l.attach(c.Nodes[3])
		l.works(20)
		l.halt()
		c.detach(t, l.name)
	}
}
