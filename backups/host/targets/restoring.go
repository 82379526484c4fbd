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

// keepRestoring returns the deleted backups that no volume, image or other cluster needs, and tells why the others
// wait. After a restart of its node a restore opens the backup again, and volumes may stand on the image already:
// without the backup their reads would wait for ever. next is when to look again; zero: no Backup waits.
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
		case o != "":
			next = earlier(next, now.Add(restoringAgain))
			message = o + ": is being restored from this backup; the deletion continues when the restore has ended, or when " +
				"the volume or image is deleted"
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

// restores names what is being restored from a backup: a volume or an image.
type restores map[api.BackupRef]string

// unfinishedRestores returns the images that are being restored, and the volumes that wait for it: the hidden image of
// a volume is made when a disk has room for the volume. live is without a cache, which may not know an object that was
// made a moment ago.
func unfinishedRestores(ctx context.Context, live client.Reader) (restores, error) {
	var volumes api.VolumeList // before the images: a volume that ceases to wait has its image
	if err := live.List(ctx, &volumes); err != nil {
		return nil, api.Explain(err, "list volumes")
	}
	var images api.BackingImageList
	if err := live.List(ctx, &images); err != nil {
		return nil, api.Explain(err, "list backing images")
	}
	unfinished, ready := restores{}, map[string]bool{}
	for i := range images.Items {
		o := &images.Items[i]
		ready[o.Name] = o.Status.State == api.ImageReady
		ref, err := api.ParseBackupURL(o.RestoredURL())
		if err == nil && o.Spec.SourceType == api.SourceRestore && !ready[o.Name] {
			unfinished[ref] = "backing image " + o.Name
		}
	}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		ref, err := api.ParseBackupURL(v.RestoredURL())
		if err == nil && v.WaitsForRestore() && !ready[v.RestoreImage()] {
			unfinished[ref] = "volume " + v.Name
		}
	}
	return unfinished, nil
}

// of names what is being restored from a backup; empty: nothing.
func (r restores) of(b api.StoredBackup) string {
	ref, err := api.ParseBackupURL(b.Common().URL)
	if err != nil {
		return ""
	}
	return cmp.Or(r[ref], r[ref.AnyOfImage()])
}
