package host

import (
	"context"
	"errors"
	"io"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// healVolume stores chunks again that damaged backups of the volume lost and src has. The full backup has done so for
// whole chunks, but not for fragments.
func (m *maker) healVolume(ctx context.Context, r *repo.Repository, b *api.Backup, src block.DigestSource,
	o repo.WriterOptions) error {
	var list api.BackupList
	err := m.List(ctx, &list, client.UnsafeDisableDeepCopy, client.MatchingLabels{
		api.LabelVolume: api.LabelValue(b.Spec.Volume), api.LabelBackupTarget: api.LabelValue(b.Target())})
	if err != nil {
		return err
	}
	var damaged []blob.ID
	for i := range list.Items {
		s := &list.Items[i].Status
		if id, err := blob.Parse(s.SnapshotID); err == nil && s.Damaged && list.Items[i].Target() == b.Target() {
			damaged = append(damaged, id)
		}
	}
	if len(damaged) == 0 {
		return nil
	}
	healed, err := mover.Heal(ctx, r, damaged, o, func(_ context.Context, d manifest.Description, number int64,
		_ blob.ID, p []byte) (bool, error) {
		if d.Name != b.Spec.Volume || number*block.ChunkSize+int64(len(p)) > src.Size() {
			return false, nil
		}
		n, err := src.ReadAt(p, number*block.ChunkSize)
		return n == len(p), ignoreEnd(err)
	})
	m.log.Info("damaged backups of the volume were healed", "backup", b.Name, "blobs", healed)
	return err
}

// ignoreEnd returns nil for the end of a source, with which the last chunk comes.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
