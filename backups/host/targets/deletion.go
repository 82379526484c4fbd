package targets

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// deletionBatch is how many snapshots a job deletes at most.
const deletionBatch = 1000

// has reports whether the job deleted all that the store had of a backup.
func (d *deletionResult) has(b api.StoredBackup) bool {
	if id, ok := snapshotOf(b); ok {
		return slices.Contains(d.ids, id)
	}
	return slices.Contains(d.objects, api.UID(b.GetUID()))
}

// isToDelete reports whether the store has, or may have, a trace of a backup that a user deleted, and no node works at
// the backup: it has ended, or lost its node.
func isToDelete(b api.StoredBackup) bool {
	node, _ := b.SourceDisk()
	lost := node == "" && !api.IsCopy(b) && api.HasBegun(b)
	return b.GetDeletionTimestamp() != nil && (b.Ended() || lost) && controllerutil.ContainsFinalizer(b, api.Finalizer)
}

// addTraceless adds the deleted Backups of which the store cannot have a trace: no node began them, or the target never
// had a repository. It drops Backups that exist no more.
func (rec *targetRecord) addTraceless(t *api.BackupTarget, backups []api.StoredBackup) {
	exists := map[types.UID]bool{}
	for _, b := range backups {
		exists[b.GetUID()] = true
		_, known := rec.deleted[b.GetUID()]
		_, has := snapshotOf(b)
		if known || has || !isToDelete(b) || (api.HasBegun(b) || api.IsCopy(b)) && t.Status.RepositoryID != "" {
			continue
		}
		rec.deleted[b.GetUID()] = false
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
	backups []api.StoredBackup, now time.Time) (next time.Time, err error) {
	var waiting []api.StoredBackup
	for _, b := range backups {
		if _, deleted := rec.deleted[b.GetUID()]; deleted || !isToDelete(b) {
			continue
		}
		if why := explainNeed(b, backups, t.HasUnlisted()); why != "" { // the deletion of a Backup wakes the reconciler
			if err := r.writeWaiting(ctx, b, why); err != nil {
				return next, err
			}
			continue
		}
		waiting = append(waiting, b)
	}
	var message string
	if waiting, next, err = r.keepRestoring(ctx, rec, waiting, now); err != nil {
		return next, err
	}
	switch {
	case len(waiting) == 0 || rec.deletion != nil:
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
		var ids []blob.ID
		var objects []api.UID
		for _, b := range waiting[:min(len(waiting), deletionBatch)] {
			if id, has := snapshotOf(b); has {
				ids = append(ids, id)
			}
			if b.FoundSnapshot() == "" { // an attempt may have left a snapshot that the status does not name
				objects = append(objects, api.UID(b.GetUID()))
			}
		}
		target := t.DeepCopy()
		rec.deletion = startJob(ctx, r.jobs, t.Name, "deletion", func(ctx context.Context) deletionResult {
			return r.repositories.deleteSnapshots(ctx, target, ids, objects)
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

// explainNeed says which Backups need a deleted image's backup: a restore of their volumes brings the image back. It is
// empty if another backup of the same content stays, or the user forces the deletion. hasUnlisted: backups without an
// object may need the image, too.
func explainNeed(b api.StoredBackup, backups []api.StoredBackup, hasUnlisted bool) string {
	image, is := b.(*api.BackupBackingImage)
	_, force := b.GetAnnotations()[api.AnnotationForceDelete]
	if _, stored := snapshotOf(b); !is || force || !stored {
		return ""
	}
	name, digest := image.Spec.BackingImageName, image.ContentDigest()
	users := 0
	for _, other := range backups {
		if other.GetDeletionTimestamp() != nil {
			continue
		}
		switch other := other.(type) {
		case *api.BackupBackingImage:
			if other.IsOf(image.Target(), name, digest) && other.Status.State == api.BackupCompleted {
				return ""
			}
		case *api.Backup:
			if other.NeedsImageBackup(image) {
				users++
			}
		}
	}
	switch {
	case users == 0 && hasUnlisted:
		return fmt.Sprintf("backup target %s: has backups without an object, which may need image %s; wait until each has "+
			"one, or delete backups if they are too many, or set the annotation %s", image.Target(), name,
			api.AnnotationForceDelete)
	case users == 0:
		return ""
	}
	return fmt.Sprintf("%s of volumes with image %s exist in backup target %s; delete these backups first, or set the "+
		"annotation %s", api.CountText(users, "backup"), name, image.Target(), api.AnnotationForceDelete)
}

// writeWaiting tells in the status of a deleted backup why the deletion waits.
func (r *targetReconciler) writeWaiting(ctx context.Context, cached api.StoredBackup, message string) error {
	if st := cached.Common(); st.State == api.BackupDeleting && st.Message == message {
		return nil
	}
	b := copyOf(cached)
	st := b.Common()
	st.State, st.Message = api.BackupDeleting, message
	err := r.Status().Update(ctx, b)
	return ignoreRace(api.Explain(err, "backup %s: write the status", b.GetName()), err)
}

// releaseBackups removes the finalizers of Backups without a trace in the store, several at once. The status of the
// target already asks for a sweep.
func (r *targetReconciler) releaseBackups(ctx context.Context, rec *targetRecord, backups []api.StoredBackup) (
	again bool, err error) {
	var traceless []api.StoredBackup
	for _, b := range backups {
		if released, deleted := rec.deleted[b.GetUID()]; deleted && !released {
			traceless = append(traceless, b)
		}
	}
	errs := make([]error, len(traceless))
	var group errgroup.Group
	group.SetLimit(pullWorkers)
	for i, cached := range traceless {
		group.Go(func() error {
			b := copyOf(cached)
			controllerutil.RemoveFinalizer(b, api.Finalizer)
			errs[i] = r.Update(ctx, b)
			return nil
		})
	}
	_ = group.Wait() // the errors are in errs
	for i, b := range traceless {
		switch {
		case apierrors.IsConflict(errs[i]):
			again = true
		case ignoreRace(errs[i], errs[i]) != nil:
			err = errors.Join(err, api.Explain(errs[i], "backup %s: remove the finalizer", b.GetName()))
		default:
			rec.deleted[b.GetUID()] = true
			r.log.Info("backup deleted", "backup", b.GetName(), "of", b.Subject())
		}
	}
	return again && err == nil, err
}
