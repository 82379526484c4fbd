package replicas

import (
	"testing"

	"drover.io/drover/api"
)

// TestClaimOfADeadOfflineEngineEndsAfterDeletion: a process dies in an offline engine, and the node stays the
// engine's node of the volume. The next process releases the claim, also of a deleted volume with snapshots.
func TestClaimOfADeadOfflineEngineEndsAfterDeletion(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := w.make("v", 16*mib)
	s := w.snapshot("v", "s1")
	w.remove(volume("v", 0))
	w.volumeIs("v", "kept for its snapshot", says("stays for 1 snapshots"))
	editStatus(w, v, func(v *api.Volume) { v.Status.EngineNode = testNode }) // as after a kill of the process
	w.volumeIs("v", "without an engine", func(v *api.Volume) bool { return v.Status.EngineNode == "" })
	w.remove(s)
	gone(w, v, &api.VolumeList{})
}
