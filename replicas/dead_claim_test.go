package replicas

import (
	"testing"

	"drover.io/drover/api"
)

// TestClaimOfADeadOfflineEngineEndsAfterDeletion: a process that died in an offline engine leaves its node as the engine's
// node of the volume. The next process releases the claim, of a deleted volume with snapshots, too.
func TestClaimOfADeadOfflineEngineEndsAfterDeletion(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := w.make("v", 16*mib)
	s := w.snapshot("v", "s1")
	w.remove(volume("v", 0))
	w.volumeIs("v", "kept for its snapshot", says("stays for 1 snapshots"))
	editStatus(w, v, func(v *api.Volume) { v.Status.EngineNode = testNode }) // as a process leaves it that is killed now
	w.volumeIs("v", "without an engine", func(v *api.Volume) bool { return v.Status.EngineNode == "" })
	w.remove(s)
	gone(w, v, &api.VolumeList{})
}
