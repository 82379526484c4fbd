package cluster

import (
	"context"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// on makes a volume whose replicas are on some nodes, free to move anywhere later.
func on(t *testing.T, c *Cluster, name string, change func(*api.VolumeSpec), nodes ...*Machine) *loaded {
	t.Helper()
	v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: int32(len(nodes))}}
	for _, m := range nodes {
		v.Spec.Nodes = append(v.Spec.Nodes, m.Name)
	}
	v.Name = name
	if change != nil {
		change(&v.Spec)
	}
	must(t, c.Objects.Create(t.Context(), v))
	v = awaitVolume(t, c, name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == len(nodes) })
	edit(t, c, v, func(v *api.Volume) { v.Spec.Nodes = nil })
	return &loaded{t: t, c: c, name: name, load: NewLoad(64<<20, 16<<20)}
}

// nodesOf lists the nodes with a replica of a volume.
func nodesOf(t *testing.T, c *Cluster, volume string) (nodes []string) {
	for n := range replicasOf(t, c, volume) {
		nodes = append(nodes, n)
	}
	slices.Sort(nodes)
	return nodes
}

// TestLocality: with best-effort a replica follows the volume to the attached node, under load, and another replica
// is deleted; a strict-local volume attaches only on the node with its data.
func TestLocality(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n1, n2, n3 := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	local := func(how string) func(*api.VolumeSpec) {
		return func(s *api.VolumeSpec) { s.DataLocality = how }
	}
	isLocal := func(name string, nodes ...string) {
		t.Helper()
		settled(t, c, name, nodes...)
		v := awaitVolume(t, c, name, "local", func(v *api.Volume) bool {
			return meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionLocal)
		})
		if int(v.Spec.NumberOfReplicas) != len(nodes) {
			t.Errorf("volume %s wants %d replicas", name, v.Spec.NumberOfReplicas)
		}
	}

	// Two replicas elsewhere, then a replica here.
	two := on(t, c, "two", local("best-effort"), n1, n2)
	two.attach(n3)
	two.works(100)
	awaitVolume(t, c, "two", "local", func(v *api.Volume) bool {
		return meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionLocal)
	})
	eventually(t, "the replica that is not needed goes", func() bool { return len(nodesOf(t, c, "two")) == 2 })
	was := nodesOf(t, c, "two")
	if !slices.Contains(was, n3.Name) {
		t.Errorf("the replicas are on %v", was)
	}
	two.works(100)
	isLocal("two", was...)

	// A single replica, with a snapshot: both move, and a clone reads the snapshot on the new node.
	one := on(t, c, "one", local("best-effort"), n1)
	one.attach(n1)
	one.works(200)
	moment := one.load.Before()
	c.command(t, "snapshot", "create", "one", "then")
	one.load.After(moment)
	one.works(200)
	one.halt()
	isLocal("one", n1.Name)
	c.detach(t, "one")
	one.attach(n2)
	one.works(100)
	isLocal("one", n2.Name)
	one.works(100)
	one.halt()
	c.detach(t, "one")
	eventually(t, "the snapshot is ready", func() bool {
		var s api.Snapshot
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "then"}, &s))
		return s.Status.ReadyToUse
	})
	c.command(t, "volume", "create", "of-then", "--from", "snap://one/then")
	c.attach(t, "of-then", n2.Name)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "of-then"}, &a))
	must(t, moment.Verify(a.Status.Device))
	c.detach(t, "of-then")

	// The node takes no replica: the condition says why, and no other node gets a replica.
	var n api.Node
	n.Name = n3.Name
	edit(t, c, &n, func(n *api.Node) { n.Spec.Schedulable = new(bool) })
	full := on(t, c, "full", local("best-effort"), n1)
	full.attach(n3)
	v := awaitVolume(t, c, "full", "told why", func(v *api.Volume) bool {
		cond := meta.FindStatusCondition(v.Status.Conditions, api.ConditionLocal)
		return cond != nil && cond.Reason == "NoDisk"
	})
	cond := meta.FindStatusCondition(v.Status.Conditions, api.ConditionLocal)
	if !strings.Contains(cond.Message, "scheduling is turned off") {
		t.Errorf("the condition says %q", cond.Message)
	}
	full.works(100)
	if at := nodesOf(t, c, "full"); !slices.Equal(at, []string{n1.Name}) {
		t.Errorf("replicas were made on %v", at)
	}
	edit(t, c, &n, func(n *api.Node) { n.Spec.Schedulable = nil })
	isLocal("full", n3.Name)
	full.halt()
	two.halt()

	// strict-local
	bad := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 2, DataLocality: "strict-local"}}
	bad.Name = "bad"
	if err := c.Objects.Create(t.Context(), bad); err == nil || !strings.Contains(err.Error(), "one replica") {
		t.Errorf("two replicas, strict-local: %v", err)
	}
	strict := on(t, c, "strict", local("strict-local"), n2)
	if out, err := c.try(t, "volume", "attach", "strict", "--node", n3.Name); err == nil ||
		!strings.Contains(out, "its data is on node \""+n2.Name) {
		t.Errorf("attach elsewhere: %v: %s", err, out)
	}
	forced := &api.Attachment{Spec: api.AttachmentSpec{Volume: "strict", Node: n3.Name, Purpose: "workload"}}
	forced.Name = "strict"
	must(t, c.Objects.Create(t.Context(), forced))
	_, err := await.Until(soon(t), c.Objects, "strict", func(a *api.Attachment) (bool, error) {
		return strings.Contains(a.Status.Message, "strict-local and its data is on node "+n2.Name), nil
	})
	must(t, err)
	must(t, c.Objects.Delete(context.Background(), forced))
	eventually(t, "the attachment goes", func() bool {
		return client.IgnoreNotFound(c.Objects.Get(t.Context(), client.ObjectKey{Name: "strict"}, &a)) == nil &&
			c.Objects.Get(t.Context(), client.ObjectKey{Name: "strict"}, &a) != nil
	})
	strict.attach(n2)
	strict.works(100)
	strict.halt()
	c.detach(t, "strict")
}
