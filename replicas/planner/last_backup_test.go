package planner

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestOnlyWholeBackupsOfTheVolumeCount: the last backup of a volume is the newest that can be restored and is of this
// very volume. Anything else would hide that the volume has no backup.
func TestOnlyWholeBackupsOfTheVolumeCount(t *testing.T) {
	v := &api.Volume{Status: api.VolumeStatus{UID: "u"}}
	for what, c := range map[string]struct {
		change func(*api.Backup) // of backup 3 of 3
		want   string
	}{
		"the newest":       {func(*api.Backup) {}, "b3"},
		"in progress":      {func(b *api.Backup) { b.Status.State = api.BackupInProgress }, "b2"},
		"failed":           {func(b *api.Backup) { b.Status.State = api.BackupError }, "b2"},
		"damaged":          {func(b *api.Backup) { b.Status.Damaged = true }, "b2"},
		"being deleted":    {func(b *api.Backup) { b.DeletionTimestamp = &metav1.Time{} }, "b2"},
		"of a namesake":    {func(b *api.Backup) { b.Status.VolumeUID = "other" }, "b2"},
		"of Longhorn":      {func(b *api.Backup) { b.Status.VolumeUID = "" }, "b2"},
		"of an older time": {func(b *api.Backup) { b.Status.SnapshotCreatedAt = "2025-01-01T00:00:00Z" }, "b2"},
	} {
		var backups []api.Backup
		for _, n := range []int{3, 1, 2} {
			b := backupOfTest(n)
			b.Status.VolumeUID = "u"
			if n == 3 {
				c.change(b)
			}
			backups = append(backups, *b)
		}
		if got := newestBackupOf(v, backups); got == nil || got.Name != c.want {
			t.Errorf("%s: %+v, want %s", what, got, c.want)
		}
	}
	b := backupOfTest(1)
	if got := newestBackupOf(&api.Volume{}, []api.Backup{*b}); got != nil {
		t.Errorf("a volume without a UID has the backup %s", got.Name)
	}
}
