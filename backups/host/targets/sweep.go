package targets

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// sweepResult is the outcome of a sweep.
type sweepResult struct {
	request metav1.Time // SweepRequested at the start
	stats   repo.SweepStats
	usage   *api.UsageFact // nil: not known
	err     error
}

// sweepPatience is how long a sweep waits for sessions before the status says so: most backups end sooner.
const sweepPatience = time.Minute

// sweepWait brings from a sweep to the reconciler for whom the sweep waits.
type sweepWait struct {
	now  func() time.Time
	wake func() // wakes the reconciler

	mu    sync.Mutex
	since time.Time
	why   error
}

// note is repo.SweepOptions.Waits.
func (w *sweepWait) note(why error) {
	w.mu.Lock()
	if w.since.IsZero() {
		w.since = w.now()
	}
	news := w.now().Sub(w.since) >= sweepPatience && (w.why == nil || w.why.Error() != why.Error())
	if news {
		w.why = why
	}
	w.mu.Unlock()
	if news {
		w.wake()
	}
}

// reason is for whom the sweep waits; nil: for nobody, or not long yet.
func (w *sweepWait) reason() error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.why
}

// measureUsage adds up the index of a repository.
func measureUsage(ctx context.Context, r *repo.Repository, now time.Time) (*api.UsageFact, error) {
	u, err := r.Usage(ctx)
	if err != nil {
		return nil, err
	}
	return &api.UsageFact{At: metav1.NewTime(now), UsedBytes: u.StoredBytes, UniqueBytes: u.UniqueBytes,
		UsedText: api.SizeText(u.StoredBytes)}, nil
}

// withRepository calls do with the repository of a target, which it opens from the store: the repository in use by
// others may no longer be the store's.
func (r *Repositories) withRepository(ctx context.Context, t *api.BackupTarget,
	do func(*repo.Repository) error) (err error) {
	if t.Status.RepositoryID == "" {
		return api.Errorf(api.Unavailable, "the repository is not known yet")
	}
	secret, err := r.readSecret(ctx, t)
	if err != nil {
		return err
	}
	c, err := r.connect(ctx, t, secret)
	if err != nil {
		return err
	}
	defer r.closeConnection(c)
	opened, err := c.open(ctx, t.Status.RepositoryID)
	if err != nil {
		return err
	}
	return do(opened)
}

// sweep deletes the packs that no backup needs.
func (r *Repositories) sweep(ctx context.Context, t *api.BackupTarget, wait *sweepWait, o Options) sweepResult {
	result := sweepResult{request: *t.Status.SweepRequested}
	result.err = r.withRepository(ctx, t, func(opened *repo.Repository) error {
		options := repo.SweepOptions{Poll: o.SweepPoll, Threshold: int(t.Spec.SweepThreshold), Waits: wait.note,
			RecordAge: o.RecordAge, Writer: o.Memory.maintenanceWriter()}
		backups, err := backupsOf(ctx, r.live, t.Name)
		if err != nil {
			return err
		}
		for _, b := range backups {
			if id, ok := snapshotOf(b); ok && b.GetDeletionTimestamp() == nil {
				options.Known = append(options.Known, id)
			}
		}
		// A store that lists nothing is believed only if no object contradicts.
		options.Empty = len(backups) == 0
		if result.stats, err = opened.Sweep(ctx, options); err != nil {
			return err
		}
		if result.usage, err = measureUsage(ctx, opened, o.Now()); err != nil { // a visit measures again
			r.log.Warn("the use of a swept backup target is not known", "target", t.Name, "err", err)
		}
		return nil
	})
	return result
}

// deletionResult is the outcome of a deletion: of the snapshots ids, and of all snapshots of Backup objects.
type deletionResult struct {
	ids     []blob.ID
	objects []api.UID
	kept    map[blob.ID]string // snapshots that another cluster restores, and who
	err     error
}

// deleteSnapshots deletes snapshots from the repository: ids, and those whose tags name one of the Backup objects. It
// keeps those of ids that another cluster restores: without them, reads of a volume there would wait for ever.
func (r *Repositories) deleteSnapshots(ctx context.Context, t *api.BackupTarget, ids []blob.ID,
	objects []api.UID) deletionResult {
	result := deletionResult{objects: objects}
	result.err = r.withRepository(ctx, t, func(opened *repo.Repository) (err error) {
		left, err := SnapshotsOf(ctx, opened, objects...)
		if err != nil {
			return err
		}
		if result.kept, err = opened.RestoredByOthers(ctx); err != nil {
			return err
		}
		for _, id := range ids {
			if _, kept := result.kept[id]; !kept {
				result.ids = append(result.ids, id)
			}
		}
		deleted := slices.Clone(result.ids)
		for i := range left {
			if slices.Contains(ids, left[i].ID) {
				continue
			}
			if holder, kept := result.kept[left[i].ID]; kept {
				return api.Errorf(api.Busy, "%s restores snapshot %.8s in another cluster", holder, left[i].ID)
			}
			deleted = append(deleted, left[i].ID)
		}
		return opened.DeleteSnapshots(ctx, deleted...)
	})
	return result
}

// isPassing reports whether the cause of a failed sweep may pass without a person.
func isPassing(err error) bool {
	kind := api.KindOf(err)
	return kind == api.Busy || kind == api.Unavailable || kind == api.Other || errors.Is(err, context.DeadlineExceeded)
}
