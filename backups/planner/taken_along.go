package planner

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// checkImageBackup makes the backup of a volume wait until its target has a backup of the volume's image, and creates
// this backup. So the chunks of the image are uploaded once. A backup of an image that makes no progress delays no
// backup of a volume, which has the whole content.
func (r *backupReconciler) checkImageBackup(ctx context.Context, b *api.Backup) error {
	var v api.Volume
	if err := r.Get(ctx, client.ObjectKey{Name: b.Spec.Volume}, &v); err != nil || v.Spec.BackingImage == "" {
		return err
	}
	var img api.BackingImage
	if err := r.Get(ctx, client.ObjectKey{Name: v.Spec.BackingImage}, &img); err != nil {
		return client.IgnoreNotFound(err)
	}
	digest := img.ContentDigest()
	if digest == "" || img.DeletionTimestamp != nil {
		return nil
	}
	var list api.BackupBackingImageList
	if err := r.List(ctx, &list, client.MatchingFields{watch.ByImage: img.Name}); err != nil {
		return err
	}
	var best *api.BackupBackingImage
	for i := range list.Items {
		x := &list.Items[i]
		if x.IsOf(b.Target(), img.Name, digest) && x.DeletionTimestamp == nil &&
			(best == nil || progressOf(x) > progressOf(best)) {
			best = x
		}
	}
	switch {
	case best == nil:
		return r.createImageBackup(ctx, b, &img, digest)
	case best.Status.State == api.BackupError && best.CreationTimestamp.Before(&b.CreationTimestamp):
		if err := r.deleteSeen(ctx, best); err != nil {
			return err
		}
		return waitForImage(best)
	case progressOf(best) == 2:
		return waitForImage(best)
	}
	return nil
}

// progressOf ranks backups of the same content: 3 is complete, 2 is in progress, or about to be.
func progressOf(b *api.BackupBackingImage) int {
	s := &b.Status
	switch {
	case s.State == api.BackupCompleted:
		return 3
	case !b.Ended() && s.Attempts == 0 &&
		(b.Spec.Source != nil || s.State == api.BackupNew || api.IsCopy(b) && s.State == api.BackupInProgress):
		return 2
	case !b.Ended():
		return 1
	}
	return 0
}

func waitForImage(b *api.BackupBackingImage) error {
	return api.Errorf(api.Unavailable, "image %s is backed up first: the backup waits for BackupBackingImage %s",
		b.Spec.BackingImageName, b.Name)
}

// createImageBackup creates the backup of the image of a backup's volume.
func (r *backupReconciler) createImageBackup(ctx context.Context, b *api.Backup, img *api.BackingImage,
	digest string) error {
	x := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackupTargetName: b.Target(),
		BackingImageName: img.Name, Digest: digest}}
	x.Name = api.ImageBackupName(img.Name, digest, b.Target())
	err := r.Create(ctx, x)
	switch {
	case apierrors.IsAlreadyExists(err):
		if err := r.live.Get(ctx, client.ObjectKey{Name: x.Name}, x); apierrors.IsNotFound(err) {
			return waitForImage(x) // deleted meanwhile: the event of the deletion continues
		} else if err != nil {
			return err
		}
		// The cache is late, or a backup is being deleted, and the next one follows. A deletion whose status
		// tells why it waits may wait for ever.
		if x.IsOf(b.Target(), img.Name, digest) && (!x.Ended() ||
			x.DeletionTimestamp != nil && (x.Status.SnapshotID == "" || x.Status.State != api.BackupDeleting)) {
			return waitForImage(x)
		}
		return nil
	case err != nil:
		return err
	}
	r.log.Info("image is backed up with its volume", "backup", x.Name, "image", img.Name, "volume", b.Spec.Volume)
	return waitForImage(x)
}
