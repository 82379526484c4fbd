package host

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/tags"
)

// adoptSnapshot finds a complete snapshot of the object, and deletes other snapshots of the object.
func adoptSnapshot(ctx context.Context, r *repo.Repository, b api.StoredBackup, made *completed) (found bool,
	err error) {
	list, err := targets.SnapshotsOf(ctx, r, api.UID(b.GetUID()))
	if err != nil {
		return false, err
	}
	for _, s := range list {
		if !found {
			complete, err := mover.IsComplete(ctx, r, s)
			if err != nil {
				return false, err
			}
			if complete {
				found, made.adopted = true, true
				made.snapshot = s.ID
				made.facts, _ = tags.Parse(s.Tags)
				continue
			}
		}
		if err := r.DeleteSnapshots(ctx, s.ID); err != nil {
			return false, err
		}
	}
	return found, nil
}

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
