package replicas

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
)

// TestCutFindsMembersThatDiffer: after a cut the engine compares the members in the new layer, and an event tells of a
// difference that no checksum shows.
func TestCutFindsMembersThatDiffer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.three()[2]
	v := volume("v", 32<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	whole := func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	}
	w.attachTo("a", "v")
	w.volumeIs("v", "healthy", whole)
	w.fill("v", "the same on both", 8<<20)
	w.detachFrom("v")
	c.stop()
	c.overwrite(string(w.replicaOn("v", "c").Spec.UID), 4<<20)
	c.start()
	w.attachTo("a", "v")
	w.volumeIs("v", "healthy again", whole)
	w.snapshot("v", "s1")
	w.tells("v", "ReplicasDiffer", "s1")
	w.detachFrom("v")
}

// overwrite changes a block in the head of a closed replica, as no engine would.
func (o *other) overwrite(replica string, off int64) {
	o.w.t.Helper()
	f, err := os.OpenFile(filepath.Join(o.dir, "disk", "replicas", replica, "head.data"), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt([]byte("of this replica alone"), off)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		o.w.t.Fatal(err)
	}
}
