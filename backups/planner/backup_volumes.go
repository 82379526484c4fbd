package planner

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// backupVolumeReconciler keeps the BackupVolume of a volume in a target. A request has the volume as its name, and the
// target as its namespace.
type backupVolumeReconciler struct {
	client.Client
	log *slog.Logger
}

func setupBackupVolumes(mgr ctrl.Manager, log *slog.Logger) error {
	r := &backupVolumeReconciler{mgr.GetClient(), log.With("loop", "backup-volumes")}
	return ctrl.NewControllerManagedBy(mgr).Named("backup-volumes").
		Watches(&api.Backup{}, handler.EnqueueRequestsFromMapFunc(
			func(_ context.Context, o client.Object) []reconcile.Request {
				b := o.(*api.Backup)
				return requestBackupVolume(b.Spec.Volume, b.Target())
			})).
		Watches(&api.BackupVolume{}, handler.EnqueueRequestsFromMapFunc(
			func(_ context.Context, o client.Object) []reconcile.Request {
				v := o.(*api.BackupVolume)
				return requestBackupVolume(v.Spec.VolumeName, v.Spec.BackupTargetName)
			})).
		WithOptions(controller.Options{RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
		Complete(r)
}

func requestBackupVolume(volume, target string) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: target, Name: volume}}}
}

// Reconcile brings a BackupVolume in line with the Backups.
func (r *backupVolumeReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	volume, target := req.Name, req.Namespace
	var list api.BackupList
	if err := r.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}, client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, err
	}
	var backups []*api.Backup
	for i := range list.Items {
		if b := &list.Items[i]; b.Target() == target {
			backups = append(backups, b)
		}
	}
	v := &api.BackupVolume{}
	err := r.Get(ctx, client.ObjectKey{Name: api.BackupVolumeName(volume, target)}, v)
	spec := api.BackupVolumeSpec{BackupTargetName: target, VolumeName: volume}
	status := summarizeBackups(backups)
	switch {
	case apierrors.IsNotFound(err) && status.Backups == 0:
		return ctrl.Result{}, nil
	case apierrors.IsNotFound(err):
		v = &api.BackupVolume{Spec: spec}
		v.Name, v.Finalizers = api.BackupVolumeName(volume, target), []string{api.Finalizer}
		if err := r.Create(ctx, v); err != nil {
			if apierrors.IsAlreadyExists(err) {
				err = nil // the event continues
			}
			return ctrl.Result{}, err
		}
	case err != nil:
		return ctrl.Result{}, err
	case v.Spec != spec:
		r.log.Warn("backups have no BackupVolume: another volume or target has its name", "volume", volume, "target", target,
			"name", v.Name)
		return ctrl.Result{}, nil
	case v.DeletionTimestamp != nil:
		return ctrl.Result{}, r.deleteBackups(ctx, v, backups)
	case !slices.ContainsFunc(backups, func(b *api.Backup) bool { return b.Status.SnapshotID != "" }):
		return ctrl.Result{}, r.deleteMirror(ctx, v)
	}
	if equality.Semantic.DeepEqual(v.Status, status) {
		return ctrl.Result{}, nil
	}
	v.Status = status
	return ctrl.Result{}, ignoreRace(r.Status().Update(ctx, v))
}

// deleteMirror deletes a BackupVolume without a Backup in the store, after the finalizer: with it, the deletion would
// be the wish of a user, which deletes backups.
func (r *backupVolumeReconciler) deleteMirror(ctx context.Context, v *api.BackupVolume) error {
	controllerutil.RemoveFinalizer(v, api.Finalizer)
	if err := r.Update(ctx, v); err != nil {
		return ignoreRace(err)
	}
	return ignoreRace(r.Delete(ctx, v, client.Preconditions{UID: &v.UID, ResourceVersion: &v.ResourceVersion}))
}

// deleteBackups deletes the Backups of a BackupVolume that a user deleted, and ends when none is left. Backups that
// were created later stay, and get another BackupVolume.
func (r *backupVolumeReconciler) deleteBackups(ctx context.Context, v *api.BackupVolume, backups []*api.Backup) error {
	if !controllerutil.ContainsFinalizer(v, api.Finalizer) {
		return nil
	}
	before := slices.DeleteFunc(backups, func(b *api.Backup) bool {
		return v.DeletionTimestamp.Before(&b.CreationTimestamp)
	})
	var errs []error
	for _, b := range before {
		if b.DeletionTimestamp != nil {
			continue
		}
		r.log.Info("backup is deleted with its BackupVolume", "backup", b.Name, "volume", b.Spec.Volume)
		errs = append(errs, ignoreRace(r.Delete(ctx, b.DeepCopy(), client.Preconditions{UID: &b.UID})))
	}
	if len(before) > 0 { // the deletion of the last one continues
		return errors.Join(errs...)
	}
	controllerutil.RemoveFinalizer(v, api.Finalizer)
	return ignoreRace(r.Update(ctx, v))
}

// summarizeBackups is the status of a BackupVolume.
func summarizeBackups(backups []*api.Backup) (s api.BackupVolumeStatus) {
	var last *api.Backup
	var first time.Time
	for _, b := range backups {
		if b.Status.SnapshotID == "" || b.DeletionTimestamp != nil {
			continue // not in the store, or not for long
		}
		s.Backups++
		s.DataStored += b.Status.NewlyUploadDataSize
		if last == nil || b.NewerThan(last) {
			last = b
		}
		end, err := time.Parse(time.RFC3339, b.Status.BackupCreatedAt)
		if err == nil && (first.IsZero() || end.Before(first)) {
			first, s.CreatedAt = end, b.Status.BackupCreatedAt
		}
	}
	if last != nil {
		x := &last.Status
		s.LastBackupName, s.LastBackupAt, s.Size = last.Name, x.SnapshotCreatedAt, x.VolumeSize
		s.SizeText, s.Labels = api.SizeText(x.VolumeSize), x.Labels
		if r := x.RecordedVolume; r != nil {
			s.StorageClassName = r.StorageClassName
		}
		s.BackingImageName, s.BackingImageChecksum = x.VolumeBackingImageName, x.VolumeBackingImageChecksum
	}
	return s
}
