package replicas

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestCloneWaitsForItsSource: a clone without a usable source waits; after the setting's time the clone has failed,
// and says why. Once the source is usable, the clone continues without a request.
func TestCloneWaitsForItsSource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	src := volume("a", 16*mib)
	src.Spec.DiskSelector = []string{"nowhere"}
	w.create(src)
	v := volume("c", 16*mib)
	v.Spec.DataSource = "vol://a"
	w.create(v)
	w.volumeIs("c", "waiting", func(v *api.Volume) bool {
		st := v.Status.CloneStatus
		return st != nil && st.State == api.CloneInitiated && st.WaitingSince != nil
	})
	editStatus(w, v, func(v *api.Volume) {
		v.Status.CloneStatus.WaitingSince = &metav1.Time{Time: time.Now().Add(-2 * time.Hour)}
	})
	now := w.volumeIs("c", "failed", func(v *api.Volume) bool { return v.Status.CloneStatus.State == api.CloneFailed })
	if !says("for 1h0m0s its source could not be used: ")(now) || now.Status.State != api.VolumeFaulted {
		t.Errorf("%s, %s", now.Status.State, now.Status.Message)
	}
	edit(w, src, func(v *api.Volume) { v.Spec.DiskSelector = nil })
	now = w.volumeIs("c", "there", func(v *api.Volume) bool { return v.Status.State == api.VolumeDetached })
	if st := now.Status.CloneStatus; st.State != api.CloneCompleted || st.WaitingSince != nil || st.Message != "" {
		t.Errorf("%+v", st)
	}
}

// TestAttachmentOfADeletedVolume: an attachment of a deleted volume, refused by the node, does not keep the volume.
func TestAttachmentOfADeletedVolume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 16*mib)
	s := w.snapshot("a", "s")
	w.remove(volume("a", 0))
	v := w.volumeIs("a", "kept", says("stays for 1 snapshots"))
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !time.Now().After(v.DeletionTimestamp.Add(time.Second)) { // the times of objects have seconds
		<-tick.C
	}
	w.create(attachment("a"))
	await(w, attachment("a"), &api.AttachmentList{}, "refused", func(a *api.Attachment) bool {
		return a.Status.Message != ""
	})
	w.remove(s)
	gone(w, v, &api.VolumeList{})
}
