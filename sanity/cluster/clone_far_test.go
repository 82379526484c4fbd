package cluster

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestClonesElsewhere: the node of the source may not have a clone, or has no room. The clone is used at once on
// another node, and moves there under load; then the source and its node may be lost.
func TestClonesElsewhere(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n1, n2, n3 := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	src := on(t, c, "src", nil, n1)
	src.attach(n1)
	src.works(500)
	moment := src.load.Before()
	c.command(t, "snapshot", "create", "src", "then")
	src.load.After(moment)
	src.works(200)

	clone := func(name, from string, change func(*api.VolumeSpec)) {
		t.Helper()
		v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 1, DataSource: from}}
		v.Name = name
		change(&v.Spec)
		began := time.Now()
		must(t, c.Objects.Create(t.Context(), v))
		awaitVolume(t, c, name, "made", func(v *api.Volume) bool { return len(v.Status.Members) > 0 })
		t.Logf("%s: there after %v", name, time.Since(began))
	}
	device := func(name string, m *Machine) string {
		t.Helper()
		began := time.Now()
		c.attach(t, name, m.Name)
		t.Logf("%s: attached on %s after %v", name, m.Name, time.Since(began))
		var a api.Attachment
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: name}, &a))
		return a.Status.Device
	}
	topology := func(s *api.VolumeSpec) { s.Nodes = []string{n2.Name} }

	// The topology wants another node: a read there succeeds before the data is there, and the volume works during
	// the move.
	clone("far", "snap://src/then", topology)
	must(t, moment.Verify(device("far", n2)))
	settled(t, c, "far", n2.Name)
	must(t, moment.Verify(deviceOf(t, c, "far")))
	c.detach(t, "far")

	// Used on the node of the source meanwhile.
	clone("here", "snap://src/then", topology)
	must(t, moment.Verify(device("here", n1)))
	settled(t, c, "here", n2.Name)
	must(t, moment.Verify(deviceOf(t, c, "here")))
	c.detach(t, "here")

	// Nothing may be shared in the end.
	clone("copy", "snap://src/then", func(s *api.VolumeSpec) { topology(s); s.CloneMode = api.CloneFull })
	settled(t, c, "copy", n2.Name)

	// No room where the source is, and two replicas.
	var n api.Node
	n.Name = n1.Name
	edit(t, c, &n, func(n *api.Node) { n.Spec.Disks[0].ReservedBytes = 1 << 60 })
	fullFor(t, c, n1)
	clone("room", "snap://src/then", func(s *api.VolumeSpec) { s.NumberOfReplicas = 2 })
	c.command(t, "snapshot", "create", "room", "own") // of a clone in progress
	settled(t, c, "room", n2.Name, n3.Name)

	// A clone of the volume's present data; the volume is deleted at once.
	src.halt()
	c.detach(t, "src")
	clone("last", "vol://src", topology)
	c.command(t, "snapshot", "delete", "then")
	c.command(t, "volume", "delete", "src")
	settled(t, c, "last", n2.Name)
	last := &loaded{t: t, c: c, name: "last", load: src.load}

	must(t, n1.PowerOff())
	for _, name := range []string{"far", "here", "copy", "room"} {
		if err := moment.Verify(device(name, n2)); err != nil {
			t.Errorf("volume %s: %v", name, err)
		}
		c.detach(t, name)
	}
	c.command(t, "volume", "create", "of-own", "--from", "snap://room/own")
	must(t, moment.Verify(device("of-own", n3)))
	last.attach(n3)
	last.works(50)
	last.halt()
}

// fullFor waits until the controller, too, knows of a full node and places no volume there.
func fullFor(t *testing.T, c *Cluster, m *Machine) {
	t.Helper()
	probes := 0
	eventually(t, "the controller places nothing on "+m.Name, func() bool {
		v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 1, Nodes: []string{m.Name}}}
		v.Name = fmt.Sprint("probe-", probes)
		probes++
		must(t, c.Objects.Create(t.Context(), v))
		refused := false
		awaitVolume(t, c, v.Name, "placed or refused", func(v *api.Volume) bool {
			refused = meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionScheduled)
			return refused || len(v.Status.Members) > 0
		})
		c.command(t, "volume", "delete", v.Name)
		return refused
	})
}

func deviceOf(t *testing.T, c *Cluster, volume string) string {
	t.Helper()
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: volume}, &a))
	return a.Status.Device
}
