package replicas

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// TestAttachBesideAGrowthThatFails: a volume with several replicas whose expansion fails can be attached and written
// at the old size, and the message says why the volume does not grow.
func TestAttachBesideAGrowthThatFails(t *testing.T) {
	t.Parallel()
	const large = 20 << 40
	f, err := os.Create(filepath.Join(t.TempDir(), "probe"))
	if err != nil {
		t.Fatal(err)
	}
	err = f.Truncate(large)
	_ = f.Close()
	if !errors.Is(err, syscall.EFBIG) {
		t.Skipf("the file system has files of any size: %v", err)
	}
	w := newWorld(t)
	w.three()
	w.set("storage-over-provisioning-percentage", "100000000")
	v := volume("v", 16<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "b"}
	w.create(v)
	w.volumeIs("v", "whole", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustHealthy })
	edit(w, v, func(v *api.Volume) { v.Spec.Size = large })
	for i, node := range []string{"a", "b"} {
		w.volumeIs("v", "to grow", func(v *api.Volume) bool {
			return meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionExpanded)
		})
		dev := w.attachTo(node, "v")
		writeDevice(t, dev, int64(i)*mib, pattern(mib))
		a := await(w, attachment("v"), &api.AttachmentList{}, "not growing",
			func(a *api.Attachment) bool { return strings.Contains(a.Status.Message, "file too large") })
		if !a.Status.Ready || a.Status.Device != dev || a.Status.Size != 16<<20 {
			t.Errorf("%+v", a.Status)
		}
		w.detachFrom("v")
	}
}
