package cluster

import (
	"slices"
	"testing"

	"drover.io/drover/api"
)

// TestDiskErrors: disks fail under a working volume, first on another node and then on the engine's node: every
// request to the disk ends with an error, or the file system takes no more writes. No I/O of the volume fails, the
// volume can be detached, and the replicas return with their disks.
func TestDiskErrors(t *testing.T) {
	c := start(t, Options{Nodes: 3, Disks: []Disk{{Size: 1 << 30}}})
	n1, n2 := c.Nodes[0], c.Nodes[1]
	l := newLoaded(t, c, "v", 64<<20, 3)
	for _, x := range []struct {
		name  string
		fails func(*MachineDisk) error
	}{
		{"errors", (*MachineDisk).loseUnsynced},
		{"read-only", (*MachineDisk).ReadOnly},
	} {
		l.attach(n1)
		l.works(100)
		awaitVolume(t, c, "v", "healthy", whole)
		l.works(100)
		for i, m := range []*Machine{n2, n1} {
			if i > 0 { // a member dropped as slow must not be the last
				awaitVolume(t, c, "v", x.name+": without "+n2.Name, func(v *api.Volume) bool {
					at := replicasOf(t, c, "v")
					return len(v.Status.Members) == 2 && slices.Contains(v.Status.Members, at[n1.Name].Name) &&
						slices.Contains(v.Status.Members, at[c.Nodes[2].Name].Name)
				})
			}
			must(t, x.fails(m.Disks[0]))
			awaitVolume(t, c, "v", x.name+": smaller", func(v *api.Volume) bool {
				return len(v.Status.Members) == 2-i && v.Status.Robustness != api.RobustHealthy
			})
			l.works(100)
		}
		l.halt()
		c.detach(t, "v")
		for _, m := range []*Machine{n2, n1} {
			must(t, m.PowerOff())
			must(t, m.PowerOn())
			must(t, m.Serve(t.Context()))
		}
		awaitVolume(t, c, "v", x.name+": whole again", whole)
		for _, m := range c.Nodes {
			l.attach(m)
			l.works(20)
			l.halt()
			c.detach(t, "v")
		}
	}
}
