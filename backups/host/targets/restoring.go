package targets

import (
	"context"
	"fmt"
	"time"

	"drover.io/drover/api"
)

// restoringAgain is the pause before a deletion that waits for an image looks at the image again.
const restoringAgain = 5 * time.Second

// keepRestoring returns the deleted backups that no image needs, and tells why the others wait. After a restart of its
// node a restore opens the backup again, and volumes may stand on the image already: without the backup their reads
// would wait for ever. next is when to look again; zero: no Backup waits.
func (r *targetReconciler) keepRestoring(ctx context.Context, deleted []api.StoredBackup, now time.Time) (
	free []api.StoredBackup, next time.Time, err error) {
	if len(deleted) == 0 {
		return nil, next, nil
	}
	// Without the cache, which may not know an image that was made a moment ago.
	var images api.BackingImageList
	if err := r.live.List(ctx, &images); err != nil {
		return nil, next, api.Explain(err, "list backing images")
	}
	unfinished := map[string]*api.BackingImage{} // by URL of the backup
	for i := range images.Items {
		o := &images.Items[i]
		if o.Spec.SourceType == api.SourceRestore && o.Status.State != api.ImageReady {
			unfinished[o.Spec.SourceParameters[api.RestoreBackupURL]] = o
		}
	}
	for _, b := range deleted {
		url := b.Common().URL
		o := unfinished[url]
		if o == nil || url == "" {
			free = append(free, b)
			continue
		}
		next = now.Add(restoringAgain)
		message := fmt.Sprintf("backing image %s: is being restored from this backup; the deletion continues when the image "+
			"is ready or deleted", o.Name)
		if err := r.writeWaiting(ctx, b, message); err != nil {
			return nil, next, err
		}
	}
	return free, next, nil
}
