package copies

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// takeImageAlong creates the copy of the backup of a volume's image, before the copy of the volume's backup begins: the
// image's chunks are uploaded once, whichever copy comes first. A target that has, or is getting, a backup of the same
// content gets no second one, and the copy of the volume waits for none.
//
// A copy that has not begun repeats a failed backup of the content: takeImageAlong deletes the failed backup, and an
// error of kind unavailable says that the copy waits until the object is gone. A deletion whose status tells why it
// waits may wait for ever, so the copy does not wait for it.
func (r *reconciler) takeImageAlong(ctx context.Context, b, origin api.StoredBackup) error {
	volume, is := origin.(*api.Backup)
	if !is || volume.Status.VolumeBackingImageDigest == "" {
		return nil
	}
	list, err := (imageBackups{}).listObjects(ctx, r.Client)
	if err != nil {
		return api.Explain(err, "list the backups of images")
	}
	image, digest := volume.Status.VolumeBackingImageName, volume.Status.VolumeBackingImageDigest
	var stored, failed *api.BackupBackingImage
	for _, o := range list {
		x := o.(*api.BackupBackingImage)
		switch {
		case x.IsOf(b.Target(), image, digest) && x.Status.State == api.BackupError:
			if api.IsCopy(x) { // of a user's own backup, the user decides
				failed = x
			}
		case x.IsOf(b.Target(), image, digest) && x.DeletionTimestamp == nil:
			return nil
		case volume.NeedsImageBackup(x) && x.DeletionTimestamp == nil && x.Status.State == api.BackupCompleted:
			stored = x
		}
	}
	if stored == nil {
		return nil // a restore needs no image
	}
	if failed != nil && !api.HasBegun(b) {
		return r.deleteFailed(ctx, failed)
	}
	x := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackupTargetName: b.Target(), BackingImageName: image,
		Digest: digest, CopyOf: stored.Name}}
	x.Name = api.ImageBackupName(image, digest, b.Target())
	err = r.Create(ctx, x)
	switch {
	case apierrors.IsAlreadyExists(err): // the cache is late, or a backup of the name failed
		return nil
	case err != nil:
		return api.Explain(err, "create the copy of the backup of image %s", image)
	}
	r.log.Info("backup of an image is copied with the one of its volume", "backup", x.Name, "origin", stored.Name,
		"volume", volume.Spec.Volume)
	return nil
}

// deleteFailed deletes a failed backup unless it has changed, and says that the copy waits.
func (r *reconciler) deleteFailed(ctx context.Context, x *api.BackupBackingImage) error {
	if x.DeletionTimestamp == nil {
		uid, version := x.UID, x.ResourceVersion
		err := r.Delete(ctx, x, client.Preconditions{UID: &uid, ResourceVersion: &version})
		if err := client.IgnoreNotFound(watch.IgnoreConflict(err)); err != nil {
			return api.Explain(err, "delete the failed backup %s of image %s", x.Name, x.Spec.BackingImageName)
		}
		r.log.Info("failed backup of an image is made again", "backup", x.Name)
	}
	return api.Errorf(api.Unavailable, "the copy waits until the failed backup %s of image %s is deleted, and then makes "+
		"the backup again", x.Name, x.Spec.BackingImageName)
}
