package host

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
)

// removal removes what an unfinished backup left in the repository and on the disk.
type removal struct {
	*maker
	b     api.StoredBackup
	begun bool
}

// run is the workFunc.
func (d *removal) run(ctx context.Context, w *work) error {
	if d.begun {
		if err := d.deleteSnapshots(ctx); err != nil {
			return err
		}
	}
	d.releaseHold(w) // a disk that failed or hangs delays no deletion
	return nil
}

func (d *removal) deleteSnapshots(ctx context.Context) error {
	opened, err := d.repositories.OpenToWrite(ctx, d.b.Target())
	if api.Is(err, api.NotFound) { // without the target, the store keeps the snapshots
		return nil
	} else if err != nil {
		return err
	}
	defer opened.Close()
	list, err := targets.SnapshotsOf(ctx, opened.Repository, api.UID(d.b.GetUID()))
	if err != nil {
		return err
	}
	for _, s := range list {
		if err := opened.Repository.DeleteSnapshots(ctx, s.ID); err != nil {
			return err
		}
	}
	return targets.RequestSweep(ctx, d.Client, opened.Target)
}
