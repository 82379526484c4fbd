package planner

import (
	"context"
	"fmt"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// restoreReconciler brings the image of a volume that is made from a backup, or compares the image of the name with the
// image of the backup. The volume's status has another writer, so an event about the volume reports a difference.
type restoreReconciler struct {
	client.Client
	events recorder.EventRecorder
	log    *slog.Logger
	told   map[types.UID]string // by volume: the last event; of the only worker
}

func setupImageRestores(mgr ctrl.Manager, log *slog.Logger) error {
	r := &restoreReconciler{mgr.GetClient(), mgr.GetEventRecorder("drover-backups"), log.With("loop", "image-restores"),
		map[types.UID]string{}}
	all := handler.EnqueueRequestsFromMapFunc(r.restoredVolumes)
	return ctrl.NewControllerManagedBy(mgr).Named("image-restores").For(&api.Volume{}).
		Watches(&api.Backup{}, all, watch.Updates(endChanged)).
		Watches(&api.BackupBackingImage{}, all, watch.Updates(endChanged)).
		Watches(&api.BackingImage{}, all).
		WithOptions(controller.Options{RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
		Complete(r)
}

// endChanged reports whether a backup ended.
func endChanged(old, now client.Object) bool {
	return old.(api.StoredBackup).Common().State != now.(api.StoredBackup).Common().State
}

// restoredVolumes requests the volumes that wait for a restore.
func (r *restoreReconciler) restoredVolumes(ctx context.Context, _ client.Object) (requests []reconcile.Request) {
	var list api.VolumeList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		r.log.Error("volumes cannot be listed", "error", err)
	}
	for i := range list.Items {
		if v := &list.Items[i]; v.WaitsForRestore() {
			requests = append(requests, watch.Request(v.Name))
		}
	}
	return requests
}

// Reconcile takes care of the image of one volume.
func (r *restoreReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	v := &api.Volume{}
	if err := r.Get(ctx, req.NamespacedName, v); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !v.WaitsForRestore() { // the image of a later volume is the user's to delete
		delete(r.told, v.UID)
		return ctrl.Result{}, nil
	}
	b, err := r.findBackup(ctx, v.RestoredURL())
	if err != nil || b == nil || b.Status.VolumeBackingImageName == "" {
		return ctrl.Result{}, err // the event of the backup continues
	}
	return ctrl.Result{}, r.ensureImage(ctx, v, b)
}

// findBackup finds the completed Backup with a URL; nil: none.
func (r *restoreReconciler) findBackup(ctx context.Context, url string) (*api.Backup, error) {
	ref, err := api.ParseBackupURL(url)
	if err != nil {
		return nil, nil // the restore tells
	}
	var list api.BackupList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range list.Items {
		if b := &list.Items[i]; b.Status.State == api.BackupCompleted && ref.Matches(b.Status.URL) {
			return b, nil
		}
	}
	return nil, nil
}

// ensureImage creates the image of a backup unless an image of the name exists, and compares an existing one.
func (r *restoreReconciler) ensureImage(ctx context.Context, v *api.Volume, b *api.Backup) error {
	name := b.Status.VolumeBackingImageName
	stored, err := r.findImageBackup(ctx, b)
	if err != nil {
		return err
	}
	img := &api.BackingImage{}
	err = r.Get(ctx, client.ObjectKey{Name: name}, img)
	switch {
	case err == nil && isSameImage(img, b, stored):
		return nil
	case err == nil && img.ContentDigest() == "" && img.Status.Checksum == "":
		return nil // not known yet; the event of the image continues
	case err == nil:
		r.report(v, "BackingImageMismatch", fmt.Sprintf("image %s has other content than the image of backup %s: digest "+
			"%.16s instead of %.16s; the volume has the content of the backup, not of this image", name, b.Name,
			img.ContentDigest(), b.Status.VolumeBackingImageDigest))
		return nil
	case !apierrors.IsNotFound(err):
		return err
	case stored == nil:
		r.report(v, "BackingImageMissing", fmt.Sprintf("backup target %s has no backup of image %s of backup %s; the volume "+
			"has the whole content without the image", b.Target(), name, b.Name))
		return nil
	}
	img = &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceRestore,
		SourceParameters: map[string]string{api.RestoreBackupURL: stored.Status.URL}}}
	img.Name = name
	stored.Status.RecordedImage.ApplyTo(img)
	if err := r.Create(ctx, img); err != nil {
		if apierrors.IsAlreadyExists(err) {
			return nil // the event of the image continues
		}
		return err
	}
	r.log.Info("image is restored for a volume", "image", name, "volume", v.Name, "backup", stored.Name)
	r.events.Eventf(v, nil, corev1.EventTypeNormal, "BackingImageRestored", "Restore",
		"image %s is restored from backup %s", name, stored.Name)
	return nil
}

// findImageBackup finds the completed backup of a backup's image in its target; nil: none.
func (r *restoreReconciler) findImageBackup(ctx context.Context, b *api.Backup) (*api.BackupBackingImage, error) {
	var list api.BackupBackingImageList
	err := r.List(ctx, &list, client.MatchingFields{watch.ByImage: b.Status.VolumeBackingImageName})
	for i := range list.Items {
		if x := &list.Items[i]; b.NeedsImageBackup(x) && x.Status.State == api.BackupCompleted {
			return x, nil
		}
	}
	return nil, err
}

// isSameImage reports whether an image has the content of a backup's image, of which stored is the backup; nil: none. A
// restored image may have another digest than its original: the digest also tells holes from written zeros.
func isSameImage(img *api.BackingImage, b *api.Backup, stored *api.BackupBackingImage) bool {
	s := &b.Status
	return s.VolumeBackingImageDigest != "" && img.ContentDigest() == s.VolumeBackingImageDigest ||
		s.VolumeBackingImageChecksum != "" && img.Status.Checksum == s.VolumeBackingImageChecksum ||
		stored != nil && img.Spec.SourceType == api.SourceRestore &&
			api.SameBackup(img.RestoredURL(), stored.Status.URL)
}

// report emits an event about a volume, unless it was the last one.
func (r *restoreReconciler) report(v *api.Volume, reason, text string) {
	if r.told[v.UID] == text {
		return
	}
	r.told[v.UID] = text
	r.log.Warn("image of a restored volume", "volume", v.Name, "message", text)
	r.events.Eventf(v, nil, corev1.EventTypeWarning, reason, "Restore", "%s", text)
}
