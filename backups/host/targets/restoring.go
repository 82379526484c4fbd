package targets

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

const (
	// restoringAgain is the pause before a deletion that waits for an image looks at the image again.
	restoringAgain = 5 * time.Second
	// keptTime is the pause before a deletion that waits for another cluster looks at the locks again.
	keptTime = time.Minute
)

// keepRestoring returns the deleted backups that no image and no other cluster needs, and tells why the others wait.
// After a restart of its node a restore opens the backup again, and volumes may stand on the image already: without the
// backup their reads would wait for ever. next is when to look again; zero: no Backup waits.
func (r *targetReconciler) keepRestoring(ctx context.Context, rec *targetRecord, deleted []api.StoredBackup,
	now time.Time) (free []api.StoredBackup, next time.Time, err error) {
	if len(deleted) == 0 {
		return nil, next, nil
	}
	unfinished, err := unfinishedRestores(ctx, r.live)
	if err != nil {
		return nil, next, err
	}
	for _, b := range deleted {
		o := unfinished.of(b)
		id, _ := snapshotOf(b)
		holder, kept := rec.kept[id]
		var message string
		switch {
		case o != nil:
			next = earlier(next, now.Add(restoringAgain))
			message = fmt.Sprintf("backing image %s: is being restored from this backup; the deletion continues when the "+
				"image is ready or deleted", o.Name)
		case kept && now.Before(rec.keptUntil):
			next = earlier(next, rec.keptUntil)
			message = fmt.Sprintf("%s restores this backup in another cluster; the deletion continues when the restore has "+
				"ended", holder)
		default:
			free = append(free, b)
			continue
		}
		if err := r.writeWaiting(ctx, b, message); err != nil {
			return nil, next, err
		}
	}
	return free, next, nil
}

// restores are the images that are being restored, by their backups.
type restores map[api.BackupRef]*api.BackingImage

// unfinishedRestores returns the images that are being restored. live is without a cache, which may not know an image
// that was made a moment ago.
func unfinishedRestores(ctx context.Context, live client.Reader) (restores, error) {
	var images api.BackingImageList
	if err := live.List(ctx, &images); err != nil {
		return nil, api.Explain(err, "list backing images")
	}
	unfinished := restores{}
	for i := range images.Items {
		o := &images.Items[i]
		ref, err := api.ParseBackupURL(o.RestoredURL())
		if err == nil && o.Spec.SourceType == api.SourceRestore && o.Status.State != api.ImageReady {
			unfinished[ref] = o
		}
	}
	return unfinished, nil
}

// of is an image that is being restored from a backup; nil: none.
func (r restores) of(b api.StoredBackup) *api.BackingImage {
	ref, err := api.ParseBackupURL(b.Common().URL)
	if err != nil {
		return nil
	}
	return cmp.Or(r[ref], r[ref.AnyOfImage()])
}
