package planner

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
)

// delays is a queue that records how long requests wait.
type delays struct {
	backlog.Queue
	of map[reconcile.Request][]time.Duration
}

func (d delays) AddAfter(r reconcile.Request, after time.Duration) { d.of[r] = append(d.of[r], after) }

// TestBackupVolumeWaitsForFurtherBackups: no change of a Backup makes the reconciler write the BackupVolume at once, so
// that thousands of found backups bring few writes of their BackupVolumes.
func TestBackupVolumeWaitsForFurtherBackups(t *testing.T) {
	q := delays{of: map[reconcile.Request][]time.Duration{}}
	b := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Spec: api.BackupSpec{Volume: "v", BackupTargetName: "t"}}
	h := sumLater()
	h.Create(t.Context(), event.CreateEvent{Object: b}, q)
	h.Update(t.Context(), event.UpdateEvent{ObjectOld: b, ObjectNew: b}, q)
	h.Delete(t.Context(), event.DeleteEvent{Object: b}, q)
	got := q.of[requestBackupVolume("v", "t")]
	if len(got) != 3 {
		t.Fatalf("three changes bring the requests %v", q.of)
	}
	for _, after := range got {
		if after <= 0 {
			t.Errorf("a request waits for %v, want a time in which further changes come", after)
		}
	}
}
