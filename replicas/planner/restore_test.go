package planner

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// TestReplicaHoldsItsHiddenImage: the hidden image of a volume stays while any replica lacks the layer, or may lack it:
// the deletion of the image would lose the data.
func TestReplicaHoldsItsHiddenImage(t *testing.T) {
	v := &api.Volume{Spec: api.VolumeSpec{FromBackup: urlOfTest}, Status: api.VolumeStatus{UID: "u"}}
	for _, c := range []struct {
		what   string
		change func(*api.Replica, *api.BackingImage)
		want   bool
	}{
		{"whole", func(*api.Replica, *api.BackingImage) {}, true},
		{"whole, and stale", func(r *api.Replica, _ *api.BackingImage) { r.Status.Mode = api.ReplicaStale }, true},
		{"without the image", func(r *api.Replica, i *api.BackingImage) { r.Labels, i.Status.Copies = nil, nil }, true},
		{"new", func(r *api.Replica, _ *api.BackingImage) { r.Status.Mode = "" }, false},
		{"being created", func(r *api.Replica, _ *api.BackingImage) { r.Status.Mode = api.ReplicaCreating }, false},
		{"failed", func(r *api.Replica, _ *api.BackingImage) { r.Status.Mode = api.ReplicaFailed }, false},
		{"reads elsewhere", func(r *api.Replica, _ *api.BackingImage) { r.Status.Fetching = "90 %" }, false},
		{"copy in progress", func(_ *api.Replica, i *api.BackingImage) {
			i.Status.Copies[0].State = api.ImageInProgress
		}, false},
		{"copy on another disk", func(_ *api.Replica, i *api.BackingImage) { i.Status.Copies[0].Disk = "d2" }, false},
	} {
		r := &api.Replica{Spec: api.ReplicaSpec{Disk: "d1"}, Status: api.ReplicaStatus{Mode: api.ReplicaCurrent}}
		r.Labels = map[string]string{api.LabelImage: v.RestoreImage()}
		img := &api.BackingImage{Status: api.BackingImageStatus{State: api.ImageReady,
			Copies: []api.ImageCopySummary{{Disk: "d1", State: api.ImageReady}}}}
		c.change(r, img)
		if got := holdsRestored(v, r, img); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// TestVolumeSaysThatReadsWait: a volume has the condition of its hidden image, and none without the image.
func TestVolumeSaysThatReadsWait(t *testing.T) {
	v := &api.Volume{Status: api.VolumeStatus{RestoreStatus: &api.RestoreStatus{}}}
	img := &api.BackingImage{Status: api.BackingImageStatus{ByteProgress: api.ByteProgress{BytesDone: 4, BytesTotal: 9}}}
	for _, stalled := range []bool{true, false} {
		api.SetCondition(&img.Status.Conditions, 1, api.ConditionStalled, stalled, api.ReasonReadsWait, "the store is away")
		describeRestore(v, img)
		if v.Status.RestoreStatus.ByteProgress != img.Status.ByteProgress {
			t.Errorf("the restore has %+v", v.Status.RestoreStatus.ByteProgress)
		}
		if meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionStalled) != stalled {
			t.Errorf("stalled %v: %+v", stalled, v.Status.Conditions)
		}
	}
	img.Status.Conditions = nil
	describeRestore(v, img)
	if len(v.Status.Conditions) > 0 {
		t.Errorf("after the restore: %+v", v.Status.Conditions)
	}
}

const urlOfTest = "file:///store?backup=b&volume=v"
