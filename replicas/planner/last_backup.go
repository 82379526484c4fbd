package planner

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// describeLastBackup writes the newest whole backup of the volume, in any target, into the status. An activated standby
// volume without one has the backup that it began with.
func describeLastBackup(ctx context.Context, c client.Client, v *api.Volume) error {
	var list api.BackupList
	if err := c.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name},
		client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list the backups of volume %s: %w", v.Name, err)
	}
	st := &v.Status
	st.LastBackup, st.LastBackupAt = "", ""
	if last := newestBackupOf(v, list.Items); last != nil {
		st.LastBackup, st.LastBackupAt = last.Name, last.CutText()
	} else if st.Standby != nil && st.Standby.Held != nil {
		st.LastBackup, st.LastBackupAt = st.Standby.Held.Backup, st.Standby.Held.SnapshotCreatedAt
	}
	return nil
}

// newestBackupOf returns the whole backup of v with the newest snapshot; nil: none.
func newestBackupOf(v *api.Volume, backups []api.Backup) (last *api.Backup) {
	for i := range backups {
		if b := &backups[i]; b.ProtectsVolume(v) && (last == nil || b.NewerThan(last)) {
			last = b
		}
	}
	return last
}
