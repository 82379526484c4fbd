package cluster

import (
	"fmt"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestDrainOfSnapshots: the only replica of a volume leaves its node with its snapshots, for a detached volume and
// for a volume attached elsewhere; clones read the snapshots on the new node after the loss of the old node.
func TestDrainOfSnapshots(t *testing.T) {
	suite.Long(t) // TestDrain moves replicas, replicas.TestEvict moves snapshots
	c := start(t, Options{Nodes: 3})
	leaving, other := c.Nodes[0], c.Nodes[1]
	moments := map[string]map[string]*Instant{}
	var all []*loaded
	for _, name := range []string{"idle", "busy"} {
		v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 1, Nodes: []string{leaving.Name}}}
		v.Name = name
		must(t, c.Objects.Create(t.Context(), v))
		v = awaitVolume(t, c, name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
		edit(t, c, v, func(v *api.Volume) { v.Spec.Nodes = nil })
		l := &loaded{t: t, c: c, name: name, load: NewLoad(64<<20, 16<<20)}
		all = append(all, l)
		l.attach(leaving)
		moments[name] = map[string]*Instant{}
		for i := range 3 {
			l.works(200)
			snap := fmt.Sprintf("%s-%d", name, i)
			at := l.load.Before()
			c.command(t, "snapshot", "create", name, snap)
			l.load.After(at)
			moments[name][snap] = at
		}
		l.works(200)
		l.halt()
		c.detach(t, name)
	}
	idle, busy := all[0], all[1]
	busy.attach(other)
	busy.works(50)

	c.command(t, "node", "drain", leaving.Name)
	for _, l := range all {
		eventually(t, "volume "+l.name+" leaves the node", func() bool {
			var v api.Volume
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &v))
			reps := replicasOf(t, c, l.name)
			_, there := reps[leaving.Name]
			return !there && len(reps) == 1 && len(v.Status.Members) == 1 && v.Status.Robustness == api.RobustHealthy
		})
	}
	busy.works(50)
	busy.halt()
	c.detach(t, "busy")
	must(t, leaving.PowerOff())

	for _, l := range []*loaded{idle, busy} {
		for snap, at := range moments[l.name] {
			eventually(t, "snapshot "+snap+" is ready", func() bool {
				var s api.Snapshot
				must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: snap}, &s))
				return s.Status.ReadyToUse && s.Status.Error == ""
			})
			c.command(t, "volume", "create", "of-"+snap, "--from", "snap://"+l.name+"/"+snap)
			c.attach(t, "of-"+snap, other.Name)
			var a api.Attachment
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "of-" + snap}, &a))
			if err := at.Verify(a.Status.Device); err != nil {
				t.Errorf("snapshot %s: %v", snap, err)
			}
			c.detach(t, "of-"+snap)
		}
		l.attach(other)
		l.works(20)
		l.halt()
		c.detach(t, l.name)

		// The volume reverts to the middle snapshot, and the oldest snapshot is deleted.
		c.command(t, "snapshot", "revert", l.name+"-1")
		c.attach(t, l.name, other.Name)
		var a api.Attachment
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: l.name}, &a))
		if err := moments[l.name][l.name+"-1"].Verify(a.Status.Device); err != nil {
			t.Errorf("volume %s after its revert: %v", l.name, err)
		}
		c.command(t, "snapshot", "delete", l.name+"-0")
		c.detach(t, l.name)
	}
}
