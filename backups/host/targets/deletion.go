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
)

// deletionBatch is how many snapshots a job deletes at most.
const deletionBatch = 1000

// has reports whether the job deleted all that the store had of a Backup.
func (d *deletionResult) has(b *api.Backup) bool {
	if id, ok := snapshotOf(b); ok {
		return slices.Contains(d.ids, id)
	}
	return slices.Contains(d.objects, api.UID(b.UID))
}

// isToDelete reports whether the store has, or may have, a trace of a Backup that a user deleted.
func isToDelete(b *api.Backup) bool {
	return b.DeletionTimestamp != nil && b.Ended() && controllerutil.ContainsFinalizer(b, api.Finalizer)
}

// addTraceless adds the deleted Backups of which the store cannot have a trace: no node began them, or the target never
// had a repository. It drops Backups that exist no more.
func (rec *targetRecord) addTraceless(t *api.BackupTarget, backups []*api.Backup) {
	exists := map[types.UID]bool{}
	for _, b := range backups {
		exists[b.UID] = true
		_, known := rec.deleted[b.UID]
		_, has := snapshotOf(b)
		if known || has || !isToDelete(b) || b.Spec.Source != nil && t.Status.RepositoryID != "" {
			continue
		}
		rec.deleted[b.UID] = false
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
		if _, deleted := rec.deleted[b.UID]; !deleted && isToDelete(b) {
			waiting = append(waiting, b)
		}
	}
	var message string
	if waiting, next, err = r.keepRestoring(ctx, waiting, now); err != nil {
		return next, err
	}
	switch {
	case len(waiting) == 0 || rec.deletion.isRunning():
		return next, nil
	case t.Status.Format == api.FormatLonghorn:
		r.keepLonghorn(t, rec, waiting)
		return next, nil
	case t.Spec.ReadOnly:
		message = fmt.Sprintf("backup target %s: is read-only; set readOnly to false, or delete the BackupTarget to keep "+
			"the backup in the store", t.Name)
	case now.Before(rec.deleteAgain):
		next = rec.deleteAgain
		message = fmt.Sprintf("backup target %s: %s", t.Name, rec.deleteMessage)
	default:
		var wish deletionResult
		for _, b := range waiting[:min(len(waiting), deletionBatch)] {
			if id, has := snapshotOf(b); has {
				wish.ids = append(wish.ids, id)
			} else { // a failed attempt may have left a snapshot that its status does not name
				wish.objects = append(wish.objects, api.UID(b.UID))
			}
		}
		target := t.DeepCopy()
		rec.deletion = startJob(ctx, r.jobs, t.Name, "deletion", func(ctx context.Context) deletionResult {
			wish.err = r.repositories.deleteSnapshots(ctx, target, wish.ids, wish.objects)
			return wish
		})
		return next, nil
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
