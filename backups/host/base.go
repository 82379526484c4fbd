package host

import (
	"cmp"
	"context"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// findBase implements content: the newest backup of the volume in the target whose snapshot the replica and the
// repository still have.
func (c *volumeSnapshot) findBase(ctx context.Context, r *repo.Repository, disk block.SnapshotDisk) (base *blob.ID,
	changed []int64, reread bool, err error) {
	if c.b.Spec.BackupMode == api.BackupFull {
		return nil, nil, true, nil
	}
	base, changed, err = c.findUsableBase(ctx, r, disk, c.b.Spec.Source)
	return base, changed, false, err
}

func (c *volumeSnapshot) findUsableBase(ctx context.Context, r *repo.Repository, disk block.SnapshotDisk,
	src *api.ExportFact) (*blob.ID, []int64, error) {
	var list api.BackupList
	err := c.List(ctx, &list, client.UnsafeDisableDeepCopy, client.MatchingLabels{
		api.LabelVolume: api.LabelValue(src.Volume), api.LabelBackupTarget: api.LabelValue(c.b.Target())})
	if err != nil {
		return nil, nil, err
	}
	target, err := sourceCut(src)
	if err != nil {
		return nil, nil, err
	}
	for _, b := range baseCandidates(list.Items, src.VolumeUID, c.b.Target()) {
		created, err := time.Parse(time.RFC3339, b.Status.SnapshotCreatedAt)
		if err != nil || created.IsZero() {
			continue // the replica may have another try of the snapshot
		}
		base := block.SnapshotCut{UID: string(b.Status.SnapshotUID), Created: created}
		var changed []int64
		err = retryBusy(ctx, mergeTimeout, func() (err error) {
			changed, err = disk.ChangedChunks(ctx, string(src.Replica), base, target)
			return err
		})
		if api.Is(err, api.NotFound) {
			continue
		} else if err != nil {
			return nil, nil, err
		}
		id, err := blob.Parse(b.Status.SnapshotID)
		if err != nil {
			continue
		}
		if _, err := r.FindSnapshot(ctx, id); api.Is(err, api.NotFound) {
			continue
		} else if err != nil {
			return nil, nil, err
		}
		return &id, changed, nil
	}
	return nil, nil, nil
}

// baseCandidates are the backups of a volume in a target that know their snapshot, the newest first. A backup that was
// found in the store is none: nobody here knows that its session ended without an error. A copy is none: its facts may
// come from such a backup. A damaged backup is none: its chunks that the store lost would be those of the new backup.
func baseCandidates(all []api.Backup, volume api.UID, target string) (list []*api.Backup) {
	for i := range all {
		b := &all[i]
		s := &b.Status
		if s.State == api.BackupCompleted && !s.Damaged && b.Spec.SnapshotID+b.Spec.CopyOf == "" && s.VolumeUID == volume &&
			b.Target() == target && s.SnapshotUID != "" &&
			b.DeletionTimestamp.IsZero() {
			list = append(list, b)
		}
	}
	slices.SortFunc(list, func(x, y *api.Backup) int { // the times are RFC 3339 in UTC
		return cmp.Or(y.CutAt().Compare(x.CutAt()),
			-cmp.Compare(x.Status.BackupCreatedAt, y.Status.BackupCreatedAt), cmp.Compare(x.Name, y.Name))
	})
	return list
}
