package planner

import (
	"context"

	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
)

// Longhorn's URL of a backup of an image names the image alone. The planner chooses the backup before a copy begins,
// and notes the backup in the status: each restore of the image reads the same backup, although others of the name
// come.

// isBackupOpen reports whether the backup of a restored image is not chosen yet.
func isBackupOpen(img *api.BackingImage) bool {
	ref, err := api.ParseBackupURL(img.RestoredURL())
	return err == nil && img.Spec.SourceType == api.SourceRestore && !ref.NamesBackup() &&
		img.Status.State != api.ImageReady
}

// chooseBackup notes the only backup that the URL of an image can mean, or explains why there is none.
func (r *imageReconciler) chooseBackup(ctx context.Context, img *api.BackingImage) (ctrl.Result, error) {
	url := img.RestoredURL()
	ref, err := api.ParseBackupURL(url)
	if err != nil {
		return ctrl.Result{}, err
	}
	var list api.BackupBackingImageList
	if err := r.List(ctx, &list); err != nil {
		return ctrl.Result{}, err
	}
	var found *api.BackupBackingImage
	for i := range list.Items {
		b := &list.Items[i]
		switch {
		case b.Status.State != api.BackupCompleted || b.DeletionTimestamp != nil || !ref.Matches(b.Status.URL):
		case found != nil:
			return r.explainSource(ctx, img, api.Errorf(api.Invalid, "the URL %s names an image with several backups: use "+
				"status.url of one of them, as of %s or %s", url, found.Name, b.Name))
		default:
			found = b
		}
	}
	if found == nil {
		return r.explainSource(ctx, img, api.Errorf(api.NotFound, "no completed backup has the URL %s: compare with "+
			"status.url of the BackupBackingImages", url))
	}
	img.Status.BackupURL, img.Status.State, img.Status.Message = found.Status.URL, api.ImagePending, ""
	return ctrl.Result{}, ignoreRace(r.Status().Update(ctx, img)) // the event of the update continues
}
