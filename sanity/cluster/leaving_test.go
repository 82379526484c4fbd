package cluster

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestAttachedBeforeItMoved: a replica is to move to another disk of its node, and the volume is attached before the
// move. The replica moves with its snapshot while the volume works.
func TestAttachedBeforeItMoved(t *testing.T) {
	c := start(t, Options{Nodes: 1, Disks: []Disk{{Tags: []string{"near"}}, {Tags: []string{"far"}}}})
	n := c.Nodes[0]
	l := on(t, c, "v", func(s *api.VolumeSpec) { s.DiskSelector = []string{"near"}; s.DataLocality = "strict-local" }, n)
	edit(t, c, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}, func(v *api.Volume) { v.Spec.DiskSelector = nil })
	l.attach(n)
	l.works(100)
	then := l.load.Before()
	c.command(t, "snapshot", "create", "v", "then")
	l.load.After(then)
	l.works(100)
	l.halt()
	c.detach(t, "v")
	was := replicasOf(t, c, "v")[n.Name]

	must(t, n.Freeze("data")) // the move cannot begin
	c.command(t, "disk", "evict", n.Disks[0].Path)
	eventually(t, "a replica is to take the place of the other", func() bool {
		var list api.ReplicaList
		must(t, c.Objects.List(t.Context(), &list))
		return len(list.Items) == 2
	})
	a := &api.Attachment{Spec: api.AttachmentSpec{Volume: "v", Node: n.Name, Purpose: "workload"}}
	a.Name = "v"
	must(t, c.Objects.Create(t.Context(), a))
	must(t, n.Thaw("data"))
	got := awaitAttached(t, c, "v")
	l.device, l.epoch = got.Status.Device, got.Status.Epoch
	must(t, l.load.Verify(l.device, false))
	l.begin()
	eventually(t, "the replica is on the other disk", func() bool {
		var list api.ReplicaList
		must(t, c.Objects.List(t.Context(), &list))
		return len(list.Items) == 1 && list.Items[0].Spec.Disk != was.Spec.Disk
	})
	awaitVolume(t, c, "v", "where it may stay", func(v *api.Volume) bool {
		return v.Status.Robustness == api.RobustHealthy &&
			meta.FindStatusCondition(v.Status.Conditions, api.ConditionEvicted) == nil
	})
	l.works(50)
	l.halt()
	c.detach(t, "v")
	must(t, n.Disks[0].Remove()) // the volume needs nothing there
	l.attach(n)
	l.works(20)
	l.halt()
	c.detach(t, "v")
	c.command(t, "volume", "create", "of-then", "--from", "snap://v/then")
	c.attach(t, "of-then", n.Name)
	must(t, then.Verify(deviceOf(t, c, "of-then")))
	c.detach(t, "of-then")
}

// TestStrictLocalStays: a strict-local volume attached on a drained node stays, the user reads the reason, and the
// volume moves once detached.
func TestStrictLocalStays(t *testing.T) {
	c := start(t, Options{Nodes: 2})
	n := c.Nodes[0]
	l := on(t, c, "v", func(s *api.VolumeSpec) { s.DataLocality = "strict-local" }, n)
	l.attach(n)
	l.works(50)
	c.command(t, "node", "drain", n.Name)
	awaitVolume(t, c, "v", "said to stay", func(v *api.Volume) bool {
		cond := meta.FindStatusCondition(v.Status.Conditions, api.ConditionEvicted)
		return cond != nil && cond.Reason == "Attached" && strings.Contains(cond.Message, "detach it first")
	})
	for _, args := range [][]string{{"node", "show", n.Name}, {"volume", "show", "v"}} {
		if out := c.command(t, args...); !strings.Contains(out, "detach it first") {
			t.Errorf("drover %v does not say why the volume stays:\n%s", args, out)
		}
	}
	eventually(t, "an event says that the volume stays", func() bool {
		return strings.Contains(c.command(t, "volume", "show", "v"), "EvictionWaits")
	})
	l.works(50)
	l.halt()
	c.detach(t, "v")
	settled(t, c, "v", c.Nodes[1].Name)
	eventually(t, "nothing is there any more", func() bool {
		return !strings.Contains(c.command(t, "node", "show", n.Name), "Still there")
	})
	l.attach(c.Nodes[1])
	l.works(20)
	l.halt()
	c.detach(t, "v")
}

// TestDeadDisk: a user can remove a lost disk once its replicas are rebuilt elsewhere.
func TestDeadDisk(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n := c.Nodes
	l := on(t, c, "v", nil, n[0], n[1])
	l.attach(n[0])
	l.works(50)
	dead := n[1].Disks[0]
	must(t, dead.Remove())
	eventually(t, "the disk is not ready", func() bool {
		var now api.Node
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: n[1].Name}, &now))
		return slices.ContainsFunc(now.Status.Disks, func(d api.DiskStatus) bool { return d.Path == dead.Path && !d.Ready })
	})
	l.works(50)
	v := &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}
	edit(t, c, v, func(v *api.Volume) { v.Spec.Nodes = nil })
	c.command(t, "disk", "evict", dead.Path)
	settled(t, c, "v", n[0].Name, n[2].Name)
	c.command(t, "disk", "remove", dead.Path)
	eventually(t, "nothing is left of it", func() bool {
		var list api.ReplicaList
		must(t, c.Objects.List(t.Context(), &list))
		return !slices.ContainsFunc(list.Items, func(r api.Replica) bool { return r.Spec.Node == n[1].Name })
	})
	l.works(50)
	l.halt()
	c.detach(t, "v")
}
