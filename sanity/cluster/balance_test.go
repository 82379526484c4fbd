package cluster

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// TestBalance: replicas of an attached and of a detached volume move to a new zone, each new replica healthy before
// the old replica is deleted, one at a time; the replicas of a volume without balance stay. Then nothing moves.
func TestBalance(t *testing.T) {
	c := start(t, Options{Nodes: 4, Settings: map[string]string{"replica-auto-balance-wait-interval": "2"}})
	for _, m := range c.Nodes {
		c.command(t, "node", "set", m.Name, "--zone", "east")
	}
	how := func(mode string) func(*api.VolumeSpec) {
		return func(s *api.VolumeSpec) { s.ReplicaAutoBalance = mode }
	}
	n := c.Nodes
	busy := on(t, c, "busy", how("least-effort"), n[0], n[1])
	idle := on(t, c, "idle", how("ignored"), n[0], n[1])
	still := on(t, c, "still", how("disabled"), n[0], n[1])
	must(t, c.Set(t.Context(), "replica-auto-balance", "best-effort"))
	for _, l := range []*loaded{idle, still} {
		l.attach(n[0])
		l.works(100)
		l.halt()
		c.detach(t, l.name)
	}
	busy.attach(n[0])
	busy.works(100)
	awaitVolume(t, c, "busy", "spread", func(v *api.Volume) bool {
		return meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionBalanced)
	})
	before := map[string][]string{}
	for _, l := range []*loaded{busy, idle, still} {
		before[l.name] = nodesOf(t, c, l.name)
	}

	// A node gets another zone. The rate limit slows the moves until the test has killed a data process.
	must(t, c.Set(t.Context(), "replica-copy-rate-limit", "1"))
	c.command(t, "node", "set", n[3].Name, "--zone", "west")
	fewest, most, killed := 99, 0, false
	moved := func(l *loaded) bool {
		var v api.Volume
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &v))
		at := nodesOf(t, c, l.name)
		fewest, most = min(fewest, len(v.Status.Members)), max(most, len(at))
		if len(at) == 3 && !killed { // the move is in progress
			kill(t, n[3], "data")
			killed = true
			must(t, c.Set(t.Context(), "replica-copy-rate-limit", "0"))
		}
		return slices.Contains(at, n[3].Name) && len(at) == 2 && len(v.Status.Members) == 2 &&
			v.Status.Robustness == api.RobustHealthy && meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionBalanced)
	}
	began := time.Now()
	for _, l := range []*loaded{busy, idle} {
		eventually(t, "a replica of "+l.name+" moves to the other zone", func() bool { return moved(l) })
		t.Logf("%s: %v after the zone was there: %v -> %v", l.name, time.Since(began), before[l.name], nodesOf(t, c, l.name))
	}
	// The engine may drop a slow member for a while.
	if most > 3 || !killed || fewest < 2 && len(dropped(t, c, "busy"))+len(dropped(t, c, "idle")) == 0 {
		t.Errorf("between %d members and %d replicas while one moved", fewest, most)
	}
	if at := nodesOf(t, c, "busy"); !slices.Contains(at, n[0].Name) {
		t.Errorf("the replica went from the node that uses the volume: %v", at)
	}
	if at := nodesOf(t, c, "still"); !slices.Equal(at, before["still"]) {
		t.Errorf("a volume that is not balanced moved to %v", at)
	}
	busy.works(100)

	// Nothing moves any more, also after another reconcile of the nodes.
	settled := map[string]string{}
	for _, l := range []*loaded{busy, idle} {
		settled[l.name] = fmt.Sprint(replicaNames(t, c, l.name))
	}
	c.command(t, "node", "set", n[2].Name, "--zone", "east", "--tags", "new")
	_, err := await.Until(soon(t), c.Objects, n[2].Name, func(m *api.Node) (bool, error) { return len(m.Spec.Tags) > 0, nil })
	must(t, err)
	busy.works(2000)
	for name, was := range settled {
		if now := fmt.Sprint(replicaNames(t, c, name)); now != was {
			t.Errorf("volume %s had the replicas %s and has %s", name, was, now)
		}
	}
	busy.halt()
	c.detach(t, "busy")
	for _, l := range []*loaded{busy, idle, still} {
		l.attach(n[3])
		l.works(50)
		l.halt()
		c.detach(t, l.name)
	}
}

func replicaNames(t *testing.T, c *Cluster, volume string) (names []string) {
	for _, r := range replicasOf(t, c, volume) {
		names = append(names, r.Name)
	}
	slices.Sort(names)
	return names
}
