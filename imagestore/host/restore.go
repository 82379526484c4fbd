package host

import (
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// restoreBackup makes a copy from a backup, or with repair repairs the copy below replicas.
func (n *copyReconciler) restoreBackup(ctx context.Context, t *transfer, slot slotFunc, image *api.BackingImageSpec,
	on block.Layers, spec importer.Spec, repair bool,
) (got importer.Result, err error) {
	if n.opts.OpenBackup == nil {
		return got, api.Errorf(api.Unsupported, "this node restores no backups")
	}
	if err := slot(ctx); err != nil {
		return got, err
	}
	t.setState(api.ImageStarting, "")
	b, err := n.opts.OpenBackup(ctx, image.SourceParameters[api.RestoreBackupURL])
	if err != nil {
		return got, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	t.setState(api.ImageInProgress, "")
	if repair {
		spare := importer.RepairSpec(spec)
		return importer.RepairFromOrigin(ctx, on, spec, spare, &t.progress,
			func(ctx context.Context) (importer.Result, error) {
				return importer.Restore(ctx, on, spare, b, nil, &t.progress)
			})
	}
	return importer.Restore(ctx, on, spec, b, func(ctx context.Context, img block.Image) error {
		if spec.Checksum == "" {
			return nil
		}
		x, ok := on.(block.Exporter)
		if !ok {
			return api.Errorf(api.Unsupported, "disk %s cannot compare the checksum", on.UID())
		}
		return compareChecksum(ctx, x, img)
	}, &t.progress)
}
