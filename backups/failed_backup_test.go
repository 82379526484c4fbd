package backups_test

import (
	"context"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestSnapshotOfAFailedBackupIsNotFound: a snapshot that the mover did not confirm, and could not delete, may lack
// blobs. It does not come back as a completed Backup, and the deletion of the failed Backup deletes the snapshot.
func TestSnapshotOfAFailedBackupIsNotFound(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, "snapshots/") {
			return api.Errorf(api.Unsupported, "append only")
		}
		return nil
	}, func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "snapshots/") {
			return api.Errorf(api.Unavailable, "no answer")
		}
		return nil
	})
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupError)
	at := metav1.NewTime(time.Now().Truncate(time.Second))
	apitest.Edit(w.Server, w.target, func(t *api.BackupTarget) { t.Spec.SyncRequestedAt = &at })
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "synced", func(t *api.BackupTarget) bool {
		return t.Status.SyncedRequest.Equal(&at)
	})
	var list api.BackupList
	must(t, w.Client.List(w.Ctx, &list))
	for i := range list.Items {
		if o := &list.Items[i]; o.Status.State == api.BackupCompleted {
			t.Errorf("backup %s is completed with snapshot %.8s", o.Name, o.Status.SnapshotID)
		}
	}
	w.store.set(nil, nil)
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "to be swept", func(t *api.BackupTarget) bool {
		return t.Status.SweepRequested != nil
	})
	if n := w.objects("snapshots/"); n != 0 {
		t.Errorf("the deletion of the failed Backup left %d snapshots", n)
	}
}
