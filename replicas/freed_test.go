package replicas

import (
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestSpaceHeldByCopy: a full copy pins the layers of its source; the space of a snapshot deleted meanwhile is free
// once the copy is complete, without another step.
func TestSpaceHeldByCopy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create(&api.Setting{ObjectMeta: named("replica-copy-rate-limit"), Value: "1"})
	const size = 128 << 20
	w.make("freed", size)
	w.create(attachment("freed"))
	w.attached("freed")
	const much = 64 << 20 // a minute of copying: the copy still runs when the snapshot is deleted
	text := strings.Repeat("0123456789abcdef", much/16)
	w.fill("freed", "old"+text[3:], 0)
	s := w.snapshot("freed", "s")
	w.fill("freed", "new"+text[3:], 0)
	c := volume("freed-c", size)
	c.Spec.DataSource, c.Spec.CloneMode = "snap://freed/s", api.CloneFull
	w.create(c)
	w.volumeIs("freed-c", "begun", func(v *api.Volume) bool {
		var list api.ReplicaList
		if err := w.c.List(w.ctx, &list); err != nil {
			t.Fatal(err)
		}
		for _, r := range list.Items {
			if r.Spec.Volume == "freed-c" && r.Status.Pinned {
				return true
			}
		}
		return false
	})
	w.remove(s)
	gone(w, s, &api.SnapshotList{})
	w.set("replica-copy-rate-limit", "0")
	w.volumeState("freed-c", api.VolumeDetached)
	w.layersUse("whole", 2*much) // a's and c's
	w.reads("freed", 0, "new3")
	w.detach("freed")
	w.holds("freed-c", 0, "old3")
}
