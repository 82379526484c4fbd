package host

import (
	"context"
	"errors"
	"iter"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// healVolume stores chunks again that damaged backups of the volume lost and src has. The full backup has done so for
// whole chunks, but not for fragments.
func (m *maker) healVolume(ctx context.Context, opened *targets.Opened, b *api.Backup, src block.DigestSource,
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
	open := func(context.Context) (block.Source, error) { return openSource{src}, nil }
	sources := mover.Sources{AtPlaces: func(_ context.Context, d manifest.Description) iter.Seq2[mover.OpenSource, error] {
		return func(yield func(mover.OpenSource, error) bool) {
			if d.Kind == manifest.Volume && d.Name == b.Spec.Volume {
				yield(open, nil)
			}
		}
	}}
	healed, err := mover.Heal(ctx, opened.Repository, damaged, o, sources)
	if healed > 0 {
		m.log.Info("damaged backups of the volume were healed", "backup", b.Name, "blobs", healed)
		err = errors.Join(err, targets.AddHealed(ctx, m.Client, opened.Target, healed))
	}
	return err
}

// openSource is a source that its opener closes.
type openSource struct{ block.DigestSource }

// Close implements io.Closer.
func (openSource) Close() error { return nil }
