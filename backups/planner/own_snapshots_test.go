package planner

import (
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
)

// instant is the time of snapshot number n.
func instant(n int) string {
	return time.Date(2026, 1, 1, 0, 0, n, 500, time.UTC).Format(time.RFC3339Nano)
}

// backupNumber is a completed backup of volume v with the own snapshot number n, unless changes make another of it.
func backupNumber(n int, changes ...func(*api.Backup)) api.Backup {
	b := api.Backup{Spec: api.BackupSpec{Volume: "v", BackupTargetName: "t"}}
	b.Name, b.UID = "b"+string(rune('0'+n)), types.UID(string(rune('0'+n)))
	b.Status = api.BackupStatus{SnapshotName: b.OwnSnapshotName(), SnapshotCreatedAt: instant(n), VolumeUID: "of-v"}
	b.Status.State, b.Status.SnapshotID = api.BackupCompleted, "stored"
	for _, change := range changes {
		change(&b)
	}
	return b
}

// snapshotNumber is the snapshot that was taken for backup number n.
func snapshotNumber(n int) api.Snapshot {
	b := backupNumber(n)
	s := api.Snapshot{Spec: api.SnapshotSpec{Volume: "v", Labels: map[string]string{api.LabelBackup: b.Name}}}
	s.Name, s.Status.VolumeUID = b.OwnSnapshotName(), "of-v"
	return s
}

// TestSnapshotsStayWhileABackupNeedsThem: the planner deletes a snapshot that it took if the backup has ended and no
// next backup builds on the snapshot, and no other snapshot.
func TestSnapshotsStayWhileABackupNeedsThem(t *testing.T) {
	deleted := metav1.Now()
	in := func(target string) func(*api.Backup) { return func(b *api.Backup) { b.Spec.BackupTargetName = target } }
	failed := func(b *api.Backup) {
		b.Status = api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupError}}
	}
	running := func(b *api.Backup) {
		b.Status = api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupInProgress}}
	}
	isDeleted := func(b *api.Backup) { b.DeletionTimestamp = &deleted }
	foreign := func(b *api.Backup) { b.Status.SnapshotName = "elsewhere"; b.Spec.SnapshotID = "stored" }
	unknown := func(b *api.Backup) { b.Status.State = "Later" } // of a later version
	ofUser := func(b *api.Backup) { b.Spec.SnapshotName, b.Status.SnapshotName = "mine", "mine" }
	mine := api.Snapshot{Spec: api.SnapshotSpec{Volume: "v"}, Status: api.SnapshotStatus{VolumeUID: "of-v"}}
	mine.Name = "mine"
	similar := mine
	similar.Name = "backup-5"
	leaving := snapshotNumber(1)
	leaving.DeletionTimestamp = &deleted
	all := []api.Snapshot{snapshotNumber(1), snapshotNumber(2), snapshotNumber(3)}
	for _, c := range []struct {
		name      string
		leaves    bool // the volume
		backups   []api.Backup
		snapshots []api.Snapshot
		want      string // numbers of the disposable snapshots
	}{
		{"the newest completed is the base", false, []api.Backup{backupNumber(3), backupNumber(1), backupNumber(2)}, all, "1 2"},
		{"a base in each target", false, []api.Backup{backupNumber(1), backupNumber(2, in("u")), backupNumber(3, in("u"))},
			all, "2"},
		{"an unfinished one needs its own, the base stays", false,
			[]api.Backup{backupNumber(1), backupNumber(2), backupNumber(3, running)}, all, "1"},
		{"another one that has not ended names the snapshot", false, []api.Backup{backupNumber(1), backupNumber(2),
			backupNumber(3), backupNumber(9, running, func(b *api.Backup) { b.Spec.SnapshotName = "backup-1" })}, all, "2"},
		{"new", false, []api.Backup{backupNumber(1), backupNumber(2), backupNumber(3, running,
			func(b *api.Backup) { b.Status.State = "" })}, all, "1"},
		{"a failed one is no base", false, []api.Backup{backupNumber(1), backupNumber(2), backupNumber(3, failed)}, all, "1 3"},
		{"a deleted one is no base", false, []api.Backup{backupNumber(1), backupNumber(2), backupNumber(3, isDeleted)}, all,
			"1 3"},
		{"deleted and unfinished: the node still reads", false,
			[]api.Backup{backupNumber(1), backupNumber(2), backupNumber(3, running, isDeleted)}, all, "1"},
		{"the backup does not exist", false, []api.Backup{backupNumber(1)}, all, "2 3"},
		{"no backup exists", false, nil, all, "1 2 3"},
		{"an unknown state", false, []api.Backup{backupNumber(1), backupNumber(2, unknown)}, all, "1 3"},
		{"another cluster's backup has no snapshot here", false, []api.Backup{backupNumber(1), backupNumber(2),
			backupNumber(3, foreign)}, all, "1 3"},
		{"of an earlier volume", false, []api.Backup{backupNumber(2), backupNumber(3,
			func(b *api.Backup) { b.Status.VolumeUID = "earlier" })}, all, "1 3"},
		{"found again in the store", false, []api.Backup{backupNumber(3, func(b *api.Backup) {
			b.UID, b.Spec.SnapshotID = "9", "stored"
		})}, all, "1 2"},
		{"a snapshot of a user is the base", false, []api.Backup{backupNumber(1), backupNumber(2, ofUser)},
			append(slices.Clone(all), mine), "1 2 3"},
		{"snapshots of users", false, nil, []api.Snapshot{mine, similar}, ""},
		{"being deleted", false, nil, []api.Snapshot{leaving}, ""},
		{"the volume is deleted", true, []api.Backup{backupNumber(1), backupNumber(2), backupNumber(3, running)}, all, "1 2"},
	} {
		var got []string
		for _, s := range disposableSnapshots(!c.leaves, c.backups, c.snapshots) {
			got = append(got, strings.TrimPrefix(s.Name, "backup-"))
		}
		slices.Sort(got)
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v are deleted, want %s", c.name, got, c.want)
		}
	}
}
