package replicas

import (
	"testing"

	"drover.io/drover/api"
)

// TestDeviceRecordHasTheBootOfAReplicaThatJoined: a replica of another node joins an attached volume. The device record has
// the boot of that node: the next data process takes no replica whose machine restarted in between.
func TestDeviceRecordHasTheBootOfAReplicaThatJoined(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	v := volume("v", 16<<20)
	v.Spec.Nodes = []string{"a"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	w.attachTo("a", "v")
	edit(w, v, func(v *api.Volume) { v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "b"} })
	w.volumeIs("v", "whole", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	found := false
	for _, s := range nodes[0].data.attachments.Sessions() {
		for _, m := range s.Members {
			if m.Node == "b" {
				found = m.Boot != ""
			}
		}
	}
	if !found {
		t.Error("the device record lacks the boot of node b")
	}
	w.detachFrom("v")
}
