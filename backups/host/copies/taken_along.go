package copies

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"drover.io/drover/api"
)

// takeImageAlong creates the copy of the backup of a volume's image, before the copy of the volume's backup begins: the
// image's chunks are uploaded once, whichever copy comes first. A target that has, or is getting, a backup of the same
// content gets no second one, and the copy of the volume waits for none.
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
	var stored *api.BackupBackingImage
	for _, o := range list {
		x := o.(*api.BackupBackingImage)
		switch {
		case x.IsOf(b.Target(), image, digest) && x.DeletionTimestamp == nil && x.Status.State != api.BackupError:
			return nil
		case volume.NeedsImageBackup(x) && x.DeletionTimestamp == nil && x.Status.State == api.BackupCompleted:
			stored = x
		}
	}
	if stored == nil {
		return nil // a restore needs no image
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
