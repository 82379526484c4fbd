package replicas

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestMergeFails: the file of a layer cannot be changed for a while, so that the space of a deleted snapshot does not come
// back. It is told, over a restart too, and is over when the merge succeeds.
func TestMergeFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("stuck", 64<<20)
	w.create(attachment("stuck"))
	w.attached("stuck")
	for i, name := range []string{"s1", "s2"} {
		w.fill("stuck", name+strings.Repeat("x", (2-i)<<20), 0)
		w.snapshot("stuck", name)
	}
	s1 := w.snapshotIs("s1", "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
	s2 := w.snapshotIs("s2", "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
	file := func(s *api.Snapshot) string {
		return filepath.Join(w.dir, "disk", "layers", string(s.Status.Layer), "data")
	}
	if out, err := exec.Command("chattr", "+i", file(s1), file(s2)).CombinedOutput(); err != nil {
		t.Skipf("files cannot be made immutable here: %v: %s", err, out)
	}
	free := func() {
		for _, s := range []*api.Snapshot{s1, s2} {
			_ = exec.Command("chattr", "-i", file(s)).Run() // of what is there yet
		}
	}
	t.Cleanup(free)
	w.remove(s1)
	gone(w, s1, &api.SnapshotList{}) // at once all the same
	text := w.conditionIs("stuck", api.ConditionMerged, "False")
	if !strings.Contains(text, "not permitted") {
		t.Error(text)
	}
	w.tells("stuck", "MergeFailed", "not permitted")
	if r := w.memberOf("stuck"); !strings.Contains(r.Status.MergeError, "not permitted") {
		t.Errorf("the replica says %q", r.Status.MergeError)
	}
	w.reads("stuck", 0, "s2xx")
	w.snapshot("stuck", "s3") // what is not merged is in nobody's way

	w.detach("stuck")
	w.stopData()
	w.startData()
	w.conditionIs("stuck", api.ConditionMerged, "False")
	free()
	w.conditionIs("stuck", api.ConditionMerged, "True")
	w.tells("stuck", "Merged", "")
	if r := w.memberOf("stuck"); r.Status.MergeError != "" {
		t.Errorf("the replica still says %q", r.Status.MergeError)
	}
	w.snapshotIs("s2", "in its new layer", func(s *api.Snapshot) bool {
		return s.Status.ReadyToUse && s.Status.Layer != s2.Status.Layer && s.Status.Checksum != s2.Status.Checksum
	})
	w.holds("stuck", 0, "s2xx")
}
