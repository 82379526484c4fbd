package cluster

import (
	"os"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestRebuildInterrupted: a rebuild from two members under load survives every interruption: kills of the data
// processes of the replica and of the engine, a power-off of the replica's machine, an expansion, a deletion of the
// replica's object. A detached volume is attached at once during a rebuild.
func TestRebuildInterrupted(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	const size, rest = 96 << 20, 16 << 20 // the load writes below rest
	l := on(t, c, "v", func(s *api.VolumeSpec) { s.Size = size }, c.Nodes[0], c.Nodes[1])
	l.load = NewLoad(size, rest)
	l.attach(c.Nodes[0])
	f, err := os.OpenFile(l.device, os.O_WRONLY|os.O_SYNC, 0)
	must(t, err)
	b := make([]byte, size-rest)
	fillPattern(b, rest)
	_, err = f.WriteAt(b, rest)
	must(t, err)
	must(t, f.Close())

	must(t, c.Set(t.Context(), "replica-copy-rate-limit", "2")) // the rebuild takes 40 s
	n3 := c.Nodes[2]
	third := func() api.Replica { return replicasOf(t, c, "v")[n3.Name] }
	underWay := func(what string) {
		t.Helper()
		eventually(t, "the rebuild is under way "+what, func() bool {
			var a api.Attachment
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &a))
			for _, r := range a.Status.Rebuilds {
				if r.Replica == third().Name && r.Done > 0 && r.Done < r.Total {
					return true
				}
			}
			return false
		})
	}
	edit(t, c, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}, func(v *api.Volume) { v.Spec.NumberOfReplicas = 3 })
	underWay("at first")
	must(t, n3.Kill("data"))
	l.works(50)
	underWay("after its process was killed")
	must(t, c.Nodes[0].Kill("data"))
	l.works(50)
	underWay("after the engine's process was killed")
	must(t, n3.PowerOff())
	l.works(50)
	must(t, n3.PowerOn())
	must(t, n3.Serve(t.Context()))
	underWay("after its machine was off")
	c.command(t, "volume", "expand", "v", "128Mi")
	l.works(50)
	r := third()
	must(t, c.Objects.Delete(t.Context(), &r))
	eventually(t, "another one is made", func() bool { now := third(); return now.Name != "" && now.Name != r.Name })
	underWay("of another replica")
	must(t, c.Set(t.Context(), "replica-copy-rate-limit", "0"))
	kill(t, n3, "data") // the rebuild begins again, without a limit
	grown := func(v *api.Volume) bool { return whole(v) && v.Status.Size == 128<<20 }
	awaitVolume(t, c, "v", "whole", grown)
	l.works(50)
	l.halt()
	checkPattern(t, l.device, rest, size-rest)
	c.detach(t, "v")

	// The volume is detached, and the third replica is gone.
	must(t, c.Set(t.Context(), "replica-copy-rate-limit", "4"))
	r = third()
	edit(t, c, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}, func(v *api.Volume) { v.Spec.NumberOfReplicas = 2 })
	awaitVolume(t, c, "v", "smaller", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
	edit(t, c, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}, func(v *api.Volume) { v.Spec.NumberOfReplicas = 3 })
	eventually(t, "it is being made whole", func() bool {
		var v api.Volume
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &v))
		return v.Status.EngineNode != "" && len(v.Status.Members) == 2
	})
	began := time.Now()
	for _, m := range c.Nodes { // on each node in turn
		l.attach(m)
		t.Logf("attached to %s after %v", m.Name, time.Since(began))
		l.works(20)
		l.halt()
		checkPattern(t, l.device, rest, size-rest)
		must(t, c.Set(t.Context(), "replica-copy-rate-limit", "0")) // for rebuilds from now on
		c.detach(t, "v")
		began = time.Now()
	}
	awaitVolume(t, c, "v", "whole again", grown)
	for _, m := range c.Nodes {
		l.attach(m)
		l.halt()
		checkPattern(t, l.device, rest, size-rest)
		c.detach(t, "v")
	}
}
