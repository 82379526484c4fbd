package host

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
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
	d.releaseHold(w) // a disk that failed for good delays no deletion
	return nil
}

func (d *removal) deleteSnapshots(ctx context.Context) error {
	opened, err := d.openTarget(ctx, d.b)
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
	return d.requestSweep(ctx, opened.Target)
}

// requestSweep asks the owner of the target to free the space of what the backup uploaded.
func (d *removal) requestSweep(ctx context.Context, target *api.BackupTarget) error {
	_, err := await.EditStatus(ctx, d.Client, target.Name, func(t *api.BackupTarget) (bool, error) {
		if t.UID != target.UID {
			return false, nil
		}
		now := metav1.Now() // later than an earlier request, which a sweep that runs now may end
		t.Status.SweepRequested = &now
		return true, nil
	})
	return client.IgnoreNotFound(err)
}
