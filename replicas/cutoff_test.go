package replicas

import (
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestCutOffFromTheAPI: the node of an attached volume is cut off from the API alone, and the engine continues.
// Another node can attach the volume all the same, with every acknowledged write, and without the former node's
// replica.
func TestCutOffFromTheAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	v := volume("v", 16<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "b"}
	w.create(v)
	w.volumeIs("v", "whole", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	old := w.attachTo("b", "v")
	w.sh("dd if=/dev/urandom of=" + old + " bs=1M count=4 oflag=direct status=none")
	sum := func(dev string) string { return strings.Fields(w.sh("sha256sum < " + dev))[0] }
	want := sum(old)
	nodes[1].deafen()
	nodes[1].mute()
	w.abandon(attachment("v"))
	if now := sum(w.attachTo("c", "v")); now != want {
		t.Error("the volume does not hold what was acknowledged")
	}
}
