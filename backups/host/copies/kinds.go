package copies

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/tags"
)

// kind is a kind of backups that are copied.
type kind interface {
	loopName() string // name of the reconciler
	newObject() api.StoredBackup
	// listObjects lists the cached objects, which the caller does not change.
	listObjects(ctx context.Context, c client.Client, which ...client.ListOption) ([]api.StoredBackup, error)
	// setCompleted makes the status of a copy the one of a snapshot with the facts, in the repository at url.
	setCompleted(b api.StoredBackup, f tags.Facts, url, snapshot string, now time.Time)
	// isOf reports whether facts of a store are those of the volume or image that a copy is of.
	isOf(b api.StoredBackup, f *tags.Facts) bool
}

// volumeBackups is the kind Backup.
type volumeBackups struct{}

func (volumeBackups) loopName() string            { return "backup-copies" }
func (volumeBackups) newObject() api.StoredBackup { return &api.Backup{} }

func (volumeBackups) listObjects(ctx context.Context, c client.Client, which ...client.ListOption) (
	all []api.StoredBackup, err error) {
	var list api.BackupList
	err = c.List(ctx, &list, append(which, client.UnsafeDisableDeepCopy)...)
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}
	return all, err
}

func (volumeBackups) setCompleted(b api.StoredBackup, f tags.Facts, url, snapshot string, now time.Time) {
	b.(*api.Backup).Status = f.Status(url, snapshot, now, now)
}

func (volumeBackups) isOf(b api.StoredBackup, f *tags.Facts) bool {
	return f.Volume == b.(*api.Backup).Spec.Volume
}

// imageBackups is the kind BackupBackingImage.
type imageBackups struct{}

func (imageBackups) loopName() string            { return "image-backup-copies" }
func (imageBackups) newObject() api.StoredBackup { return &api.BackupBackingImage{} }

func (imageBackups) listObjects(ctx context.Context, c client.Client, which ...client.ListOption) (
	all []api.StoredBackup, err error) {
	var list api.BackupBackingImageList
	err = c.List(ctx, &list, append(which, client.UnsafeDisableDeepCopy)...)
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}
	return all, err
}

func (imageBackups) setCompleted(b api.StoredBackup, f tags.Facts, url, snapshot string, now time.Time) {
	b.(*api.BackupBackingImage).Status = f.ImageStatus(url, snapshot, now, now)
}

func (imageBackups) isOf(b api.StoredBackup, f *tags.Facts) bool {
	x := b.(*api.BackupBackingImage)
	return f.IsImage() && f.Image == x.Spec.BackingImageName && (x.Spec.Digest == "" || f.ImageDigest == x.Spec.Digest)
}
