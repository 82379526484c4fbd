package targets

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// deletionBatch is how many snapshots a job deletes at most.
const deletionBatch = 1000

func (d *deletionResult) has(id blob.ID) bool { return slices.Contains(d.ids, id) }

// isToDelete reports whether the store has, or may have, a trace of a Backup that a user deleted.
func isToDelete(b *api.Backup) bool {
	return b.DeletionTimestamp != nil && b.Ended() && controllerutil.ContainsFinalizer(b, api.Finalizer)
}

// addTraceless adds the deleted Backups without a snapshot, and drops Backups that exist no more. A Backup that failed
// may have left packs, for the next sweep.
func (rec *targetRecord) addTraceless(backups []*api.Backup) {
	exists := map[types.UID]bool{}
	for _, b := range backups {
		exists[b.UID] = true
		_, known := rec.deleted[b.UID]
		if _, has := snapshotOf(b); known || has || !isToDelete(b) {
			continue
		}
		rec.deleted[b.UID] = false
		rec.wantsSweep = rec.wantsSweep || b.Spec.Source != nil
	}
	for uid := range rec.deleted {
		if !exists[uid] {
			delete(rec.deleted, uid)
		}
	}
}

// startDeletion starts the deletion of the snapshots of deleted Backups, or tells why they wait, and returns when the
// next attempt is due; zero: none.
func (r *targetReconciler) startDeletion(ctx context.Context, t *api.BackupTarget, rec *targetRecord,
	backups []*api.Backup, now time.Time) (next time.Time, err error) {
	var waiting []*api.Backup
	for _, b := range backups {
		_, has := snapshotOf(b)
		if _, deleted := rec.deleted[b.UID]; has && !deleted && isToDelete(b) {
			waiting = append(waiting, b)
		}
	}
	message := ""
	switch {
	case len(waiting) == 0 || rec.deletion.isRunning():
		return time.Time{}, nil
	case t.Spec.ReadOnly:
		message = fmt.Sprintf("backup target %s: is read-only; set readOnly to false, or delete the BackupTarget to keep "+
			"the backup in the store", t.Name)
	case now.Before(rec.deleteAgain):
		next = rec.deleteAgain
		message = fmt.Sprintf("backup target %s: %s", t.Name, rec.deleteMessage)
	default:
		var ids []blob.ID
		for _, b := range waiting[:min(len(waiting), deletionBatch)] {
			id, _ := snapshotOf(b)
			ids = append(ids, id)
		}
		target := t.DeepCopy()
		rec.deletion = startJob(ctx, r.jobs, t.Name, "deletion", func(ctx context.Context) deletionResult {
			return r.repositories.deleteSnapshots(ctx, target, ids)
		})
		return time.Time{}, nil
	}
	for _, b := range waiting {
		if err := r.writeWaiting(ctx, b, api.ClipMessage(message)); err != nil {
			return next, err
		}
	}
	return next, nil
}

// writeWaiting tells in the status of a deleted Backup why the deletion waits.
func (r *targetReconciler) writeWaiting(ctx context.Context, cached *api.Backup, message string) error {
	if cached.Status.State == api.BackupDeleting && cached.Status.Message == message {
		return nil
	}
	b := cached.DeepCopy()
	b.Status.State, b.Status.Message = api.BackupDeleting, message
	err := r.Status().Update(ctx, b)
	return ignoreRace(api.Explain(err, "backup %s: write the status", b.Name), err)
}

// releaseBackups removes the finalizers of Backups without a trace in the store. The status of the target already asks
// for a sweep.
func (r *targetReconciler) releaseBackups(ctx context.Context, rec *targetRecord, backups []*api.Backup) (
	again bool, err error) {
	for _, cached := range backups {
		if released, deleted := rec.deleted[cached.UID]; !deleted || released {
			continue
		}
		b := cached.DeepCopy()
		controllerutil.RemoveFinalizer(b, api.Finalizer)
		err := r.Update(ctx, b)
		if apierrors.IsConflict(err) {
			again = true
			continue
		}
		if ignoreRace(err, err) != nil {
			return false, api.Explain(err, "backup %s: remove the finalizer", b.Name)
		}
		rec.deleted[b.UID] = true
		r.log.Info("backup deleted", "backup", b.Name, "volume", b.Spec.Volume)
	}
	return again, nil
}
