package cluster

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestReplicasAreAddedUnderLoad: a volume attached on the node of its only replica gets more replicas while the
// volume works, also over kills of the data process; and fewer.
func TestReplicasAreAddedUnderLoad(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	l := on(t, c, "grows", nil, c.Nodes[0])
	l.attach(c.Nodes[0])
	l.works(100)
	before := l.load.Before()
	c.command(t, "snapshot", "create", "grows", "before")
	l.load.After(before)
	l.works(50)
	replicas := func(n int32) {
		t.Helper()
		edit(t, c, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "grows"}}, func(v *api.Volume) { v.Spec.NumberOfReplicas = n })
	}
	whole := func(n int) {
		t.Helper()
		awaitVolume(t, c, "grows", "whole", func(v *api.Volume) bool {
			return len(v.Status.Members) == n && v.Status.Robustness == api.RobustHealthy
		})
	}
	replicas(3)
	l.works(20)
	must(t, c.Nodes[0].Kill("data"))
	whole(3)
	l.works(50)
	between := l.load.Before()
	c.command(t, "snapshot", "create", "grows", "between")
	l.load.After(between)
	must(t, c.Nodes[0].Kill("data"))
	l.works(50)
	replicas(1)
	whole(1)
	l.works(50)
	replicas(3)
	whole(3)
	l.works(50)
	l.halt()
	c.detach(t, "grows")
	must(t, c.Nodes[0].PowerOff())
	instants := map[string]*Instant{"before": before, "between": between}
	for name := range instants { // the planner may still choose the lost node for the clones
		v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 1, DataSource: "snap://grows/" + name}}
		v.Name = "of-" + name
		must(t, c.Objects.Create(t.Context(), v))
	}
	for name, at := range instants {
		awaitVolume(t, c, "of-"+name, "made elsewhere", func(v *api.Volume) bool { return len(v.Status.Members) > 0 })
		c.attach(t, "of-"+name, c.Nodes[1].Name)
		if err := at.Verify(deviceOf(t, c, "of-"+name)); err != nil {
			t.Errorf("snapshot %s: %v", name, err)
		}
		c.detach(t, "of-"+name)
	}
	l.attach(c.Nodes[2])
	l.works(20)
	l.halt()
	c.detach(t, "grows")
}

// TestReplicaDeletedByHand: a user deletes the object of a replica that a volume needs, and no data is lost: another
// replica first takes the place.
func TestReplicaDeletedByHand(t *testing.T) {
	c := start(t, Options{Nodes: 2})
	idle := on(t, c, "idle", nil, c.Nodes[0])
	idle.attach(c.Nodes[0])
	idle.works(100)
	idle.halt()
	c.detach(t, "idle")
	alone := on(t, c, "alone", nil, c.Nodes[0])
	both := on(t, c, "both", nil, c.Nodes...)
	alone.attach(c.Nodes[0])
	both.attach(c.Nodes[0])
	alone.works(50)
	both.works(50)
	was := map[string]bool{}
	for _, name := range []string{"idle", "alone", "both"} {
		for _, r := range replicasOf(t, c, name) {
			was[r.Name] = true
			must(t, c.Objects.Delete(t.Context(), &r))
		}
	}
	for _, l := range []*loaded{idle, alone, both} {
		n := len(was) / 4
		if l == both {
			n *= 2
		}
		eventually(t, "others have taken the place of the replicas of volume "+l.name, func() bool {
			var v api.Volume
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &v))
			var list api.ReplicaList
			must(t, c.Objects.List(t.Context(), &list))
			return len(v.Status.Members) == n && v.Status.Robustness == api.RobustHealthy &&
				!slices.ContainsFunc(list.Items, func(r api.Replica) bool { return r.Spec.Volume == l.name && was[r.Name] })
		})
	}
	alone.works(50)
	both.works(50)
	for _, l := range []*loaded{alone, both} {
		l.halt()
		c.detach(t, l.name)
	}
	for _, l := range []*loaded{idle, alone, both} {
		l.attach(c.Nodes[1])
		l.works(20)
		l.halt()
		c.detach(t, l.name)
	}
}
