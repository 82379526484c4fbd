package cluster

import (
	"testing"

	"drover.io/drover/api"
)

// TestImageOfVolume: an image of a replicated volume is used at once on a node without a replica of the volume, and
// outlives the node with its first copy.
func TestImageOfVolume(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n1, n2, n3 := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	src := on(t, c, "src", nil, n1, n2)
	src.attach(n1)
	src.works(200)
	moment := src.load.Before()
	c.command(t, "snapshot", "create", "src", "then")
	src.load.After(moment)
	src.works(200)
	c.command(t, "image", "create", "golden", "--from", "snap://src/then")

	v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, BackingImage: "golden", Nodes: []string{n3.Name}}}
	v.Name = "of-golden"
	must(t, c.Objects.Create(t.Context(), v))
	awaitVolume(t, c, v.Name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	c.attach(t, v.Name, n3.Name)
	must(t, moment.Verify(deviceOf(t, c, v.Name)))

	// The node with the first copy is lost: by now the volume reads a copy on its own node.
	eventually(t, "the volume reads its own copy", func() bool {
		return replicasOf(t, c, "of-golden")[n3.Name].Status.Message == ""
	})
	lost := n1
	if ready(t, c, "golden", 1).Status.Export.Node == n2.Name {
		lost = n2
	}
	src.halt()
	c.detach(t, "src")
	must(t, lost.PowerOff())
	must(t, moment.Verify(deviceOf(t, c, "of-golden")))
	c.detach(t, "of-golden")
}
