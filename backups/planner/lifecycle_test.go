package planner

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// begin creates a backup that its node has begun.
func (w *world) begin(name string, v *api.Volume, snapshot, node string) *api.Backup {
	w.T.Helper()
	w.addBackup(name, v.Name, snapshot)
	b := w.awaitSource(name, node)
	apitest.EditStatus(w.Server, b, func(b *api.Backup) {
		b.Status = api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupInProgress, OwnerID: node, Progress: 30}}
	})
	return b
}

// TestUnableNodeLosesItsBackup: a backup moves to another node when the disk is not ready, when the node falls silent,
// and when the replica is no member any more. Without another node the backup waits, and begins again when the node is
// back.
func TestUnableNodeLosesItsBackup(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	v := w.addVolume("v", "n1", "n2")
	w.addSnapshot(v, "s")
	w.begin("b", v, "s", "n1")
	w.stays("b", "the node makes the backup")
	w.editNode("n1", func(n *api.NodeStatus) { n.Disks[0].Ready = false })
	w.awaitSource("b", "n2")

	w.editNode("n1", func(n *api.NodeStatus) { n.Disks[0].Ready = true })
	w.editNode("n2", func(n *api.NodeStatus) { n.Heartbeat, n.HeartbeatSeconds = metav1.Now(), 1 })
	b := w.awaitSource("b", "n2") // n2 is not silent yet, and reports progress
	apitest.EditStatus(w.Server, b, func(b *api.Backup) { b.Status.Progress++ })
	w.awaitSource("b", "n1")

	apitest.EditStatus(w.Server, v, func(v *api.Volume) { v.Status.Members = []string{"v.n2"} })
	b = w.awaitState("b", api.BackupPending, "replica v.n2: node n2 gives no sign of life")
	if b.Spec.Source != nil || b.Status.OwnerID != "" || b.Status.Attempts != 1 {
		t.Errorf("%+v, %+v", b.Spec.Source, b.Status)
	}
	w.editNode("n2", func(n *api.NodeStatus) { n.Heartbeat = heartbeat() })
	w.complete(w.awaitSource("b", "n2"))
	w.editNode("n2", func(n *api.NodeStatus) { n.Disks[0].Ready = false })
	w.stays("b", "the backup is completed")
}

// TestMissedHeartbeatsOfTheControllerDoNotCount: a node is silent only after the controller could have seen a heartbeat.
func TestMissedHeartbeatsOfTheControllerDoNotCount(t *testing.T) {
	now := time.Now()
	n := &api.Node{Status: api.NodeStatus{Heartbeat: metav1.NewTime(now.Add(-time.Minute)), HeartbeatSeconds: 10}}
	for _, c := range []struct {
		began time.Duration
		want  time.Duration
	}{{time.Hour, -20 * time.Second}, {30 * time.Second, 10 * time.Second}} {
		r := &backupReconciler{began: now.Add(-c.began)}
		if got := r.silentIn(n, now); got != c.want {
			t.Errorf("began %v ago: silent in %v, want %v", c.began, got, c.want)
		}
	}
}

// TestSnapshotsOfEndedBackupsAreDeleted: the planner deletes the snapshots that it took, except for the base of the next
// backup; with the volume the base is deleted, too.
func TestSnapshotsOfEndedBackupsAreDeleted(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := w.addVolume("v", "n1")
	takeOne := func(name string) (*api.Backup, *api.Snapshot) {
		t.Helper()
		s := w.cut(w.awaitSnapshot(w.addBackup(name, "v", "")), v)
		return w.awaitSource(name, "n1"), s
	}
	first, s1 := takeOne("first")
	w.complete(first)
	failed, s2 := takeOne("failed")
	apitest.EditStatus(w.Server, failed, func(b *api.Backup) {
		b.Status.State, b.Status.BackupCreatedAt = api.BackupError, time.Now().UTC().Format(time.RFC3339)
	})
	awaitLeaving(w, s2, &api.SnapshotList{})
	second, s3 := takeOne("second")
	w.isKept(s1, "the base of the next backup")
	w.complete(second)
	awaitLeaving(w, s1, &api.SnapshotList{})
	w.isKept(s3, "the new base")
	w.Delete(v)
	awaitLeaving(w, s3, &api.SnapshotList{})
}

// isKept fails the test if a snapshot is being deleted.
func (w *world) isKept(s *api.Snapshot, what string) {
	w.T.Helper()
	var now api.Snapshot
	err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(s), &now)
	if err != nil || now.DeletionTimestamp != nil {
		w.T.Errorf("snapshot %s, %s, is deleted: %v, %+v", s.Name, what, err, now.ObjectMeta)
	}
}

// TestFailedBackupsExpire: a failed backup is deleted when the time of the setting after its end is over, and never with
// 0, or without a known end.
func TestFailedBackupsExpire(t *testing.T) {
	w := newWorld(t)
	setting := &api.Setting{ObjectMeta: apitest.Named(settingFailedTTL), Value: "0"}
	w.Create(setting)
	w.addBackup("b", "none", "")
	b := w.awaitState("b", api.BackupError, "does not exist")
	apitest.EditStatus(w.Server, b, func(b *api.Backup) {
		b.Status.BackupCreatedAt = time.Now().Add(-10 * time.Minute).UTC().Format(time.RFC3339)
	})
	w.stays("b", "the setting is 0")
	w.addBackup("c", "none", "")
	c := w.awaitState("c", api.BackupError, "does not exist")
	apitest.EditStatus(w.Server, c, func(b *api.Backup) { b.Status.BackupCreatedAt = "" })
	apitest.Edit(w.Server, setting, func(s *api.Setting) { s.Value = "200000000" }) // more than a time.Duration holds
	apitest.Await(w.Server, setting, &api.SettingList{}, "in the cache of the planner", func(s *api.Setting) bool {
		var seen api.Setting
		return w.cached.Get(w.Ctx, client.ObjectKeyFromObject(s), &seen) == nil && seen.Value == s.Value
	})
	w.stays("b", "the time is not over")
	apitest.Edit(w.Server, setting, func(s *api.Setting) { s.Value = "5" })
	w.AwaitDeleted(b, &api.BackupList{})
	w.stays("c", "the end is not known")
}

// TestBackupsThatNeverBeganAreDeleted: the planner removes a backup without a source, and the snapshot that it took.
func TestBackupsThatNeverBeganAreDeleted(t *testing.T) {
	w := newWorld(t)
	w.addBackup("failed", "none", "")
	w.Delete(w.awaitState("failed", api.BackupError, "does not exist"))
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("failed")}, &api.BackupList{})

	w.addNodes("n1")
	w.addTarget("t")
	w.addVolume("v", "n1")
	b := w.addBackup("b", "v", "")
	s := w.awaitSnapshot(b)
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	awaitLeaving(w, s, &api.SnapshotList{})
}

// TestDeletedBackupOfALostNodeIsLeftToTheTarget: the planner leaves a deleted backup to the node that makes the backup,
// until the node is silent; then to the owner of the target, because the store may have a trace. So it does with a backup
// that lost its node before the deletion.
func TestDeletedBackupOfALostNodeIsLeftToTheTarget(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	target := w.addTarget("t")
	v := w.addVolume("v", "n1")
	w.addSnapshot(v, "s")
	b := w.begin("b", v, "s", "n1")
	later := w.begin("later", v, "s", "n1")
	w.Delete(b)
	w.editNode("n1", func(n *api.NodeStatus) { n.Disks[0].Ready = false })
	w.stays("b", "the node answers, with or without the disk")
	w.awaitState("later", api.BackupPending, "")
	w.Delete(later)
	w.stays("later", "the owner of the target deletes the backup")
	w.editNode("n1", func(n *api.NodeStatus) {
		n.Heartbeat, n.Disks[0].Ready = metav1.NewTime(time.Now().Add(-time.Hour)), true
	})
	w.awaitBackup("b", "without a source", func(b *api.Backup) bool { return b.Spec.Source == nil })
	w.stays("b", "the owner of the target deletes the backup")
	w.Delete(target)
	w.AwaitDeleted(b, &api.BackupList{})
	w.AwaitDeleted(later, &api.BackupList{})
}

// TestUnbegunBackupOfALostNodeIsDeleted: the store has no trace of a backup that a silent node has not begun.
func TestUnbegunBackupOfALostNodeIsDeleted(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	w.addSnapshot(w.addVolume("v", "n1"), "s")
	w.addBackup("b", "v", "s")
	b := w.awaitSource("b", "n1")
	w.Delete(b)
	w.stays("b", "the node answers")
	w.editNode("n1", func(n *api.NodeStatus) {
		n.Heartbeat, n.Disks[0].Ready = metav1.NewTime(time.Now().Add(-time.Hour)), false
	})
	w.AwaitDeleted(b, &api.BackupList{})
}

// TestStoredBackupsAreDeletedInTheStore: the planner leaves a deleted backup to the owner of its target, in every state
// that the owner writes. Without the target, the planner removes the backup, and the store keeps it.
func TestStoredBackupsAreDeletedInTheStore(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	target := w.addTarget("t")
	v := w.addVolume("v", "n1")
	w.addSnapshot(v, "s")
	w.begin("made", v, "s", "n1")
	made := w.awaitSource("made", "n1")
	w.complete(made)
	found := &api.Backup{ObjectMeta: apitest.Named("found"), Spec: api.BackupSpec{Volume: "elsewhere", BackupTargetName: "t",
		SnapshotID: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}}
	w.Create(found)
	w.awaitBackup("found", "has its finalizer", func(b *api.Backup) bool { return len(b.Finalizers) == 1 })
	for _, b := range []*api.Backup{made, found} {
		w.Delete(b)
		apitest.EditStatus(w.Server, b, func(b *api.Backup) { b.Status.State = api.BackupDeleting })
	}
	w.editNode("n1", func(n *api.NodeStatus) {
		n.Heartbeat, n.Disks[0].Ready = metav1.NewTime(time.Now().Add(-time.Hour)), false
	})
	w.stays("made", "the owner deletes the backup")
	w.stays("found", "the owner deletes the backup")
	w.Delete(target)
	w.AwaitDeleted(made, &api.BackupList{})
	w.AwaitDeleted(found, &api.BackupList{})
}
