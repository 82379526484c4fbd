package planner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// imageReconciler is the backupReconciler of BackupBackingImages.
type imageReconciler struct{ *backupReconciler }

func setupImages(mgr ctrl.Manager, r *backupReconciler) error {
	images := imageReconciler{r}
	waiting := func(b *api.BackupBackingImage) bool { return !b.Ended() }
	// One worker, so that each choice of a node counts the choices before.
	return ctrl.NewControllerManagedBy(mgr).Named("image-backup-plans").For(&api.BackupBackingImage{}).
		Watches(&api.BackingImage{}, images.backupsBy(watch.ByImage, client.Object.GetName, waiting)).
		Watches(&api.ImageCopy{}, images.backupsBy(watch.ByImage,
			func(o client.Object) string { return o.(*api.ImageCopy).Spec.Image }, waiting)).
		Watches(&api.BackupTarget{}, images.backupsBy(watch.ByTarget, client.Object.GetName,
			func(b *api.BackupBackingImage) bool { return !b.Ended() || b.DeletionTimestamp != nil })).
		Watches(&api.Node{}, images.backupsBy("", nil, waiting), watch.Updates(nodeChanged)).
		Watches(&api.Setting{}, images.backupsBy("", nil,
			func(b *api.BackupBackingImage) bool { return b.Status.State == api.BackupError }), watch.Named(settingFailedTTL)).
		WithOptions(controller.Options{RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
		Complete(images)
}

// backupsBy requests the BackupBackingImages with the value of an object in an index, as far as matters accepts them;
// with index "" all.
func (r imageReconciler) backupsBy(index string, value func(client.Object) string,
	matters func(*api.BackupBackingImage) bool) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) (all []reconcile.Request) {
		options := []client.ListOption{client.UnsafeDisableDeepCopy}
		if index != "" {
			options = append(options, client.MatchingFields{index: value(o)})
		}
		var list api.BackupBackingImageList
		if err := r.List(ctx, &list, options...); err != nil {
			r.log.Error("backups of images cannot be listed", "index", index, "error", err)
		}
		for i := range list.Items {
			if b := &list.Items[i]; matters(b) {
				all = append(all, watch.Request(b.Name))
			}
		}
		return all
	})
}

// Reconcile takes the next step of one backup of an image.
func (r imageReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	b := &api.BackupBackingImage{}
	if err := r.Get(ctx, req.NamespacedName, b); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	switch {
	case b.DeletionTimestamp != nil:
		return r.planDeletion(ctx, b)
	case addMetadata(b, map[string]string{api.LabelImage: b.Spec.BackingImageName, api.LabelBackupTarget: b.Target()}):
		return ctrl.Result{}, r.adopt(ctx, b)
	case b.Status.State == api.BackupError:
		return r.deleteExpired(ctx, b)
	case b.Ended():
		return ctrl.Result{}, nil
	case api.IsCopy(b):
		return r.planCopy(ctx, b)
	case b.Spec.Source != nil:
		return r.checkSource(ctx, b)
	}
	source, digest, err := r.findSource(ctx, r.Client, b)
	if err != nil && !retryable(err) {
		source, digest, err = r.findSource(ctx, r.live, b) // the cache may be late, and an Error is for good
	}
	if err != nil {
		return r.postpone(ctx, b, err)
	}
	base := b.DeepCopy()
	b.Spec.Source, b.Spec.Digest = source, digest
	if err := r.patchSource(ctx, b, base); err != nil {
		return ctrl.Result{}, ignoreRace(err)
	}
	r.log.Info("backup has a source", "backup", b.Name, "image", b.Spec.BackingImageName, "node", source.Node)
	return ctrl.Result{}, r.reportOtherContent(ctx, b, digest)
}

// adopt writes the metadata of a new object. The event of the update continues.
func (r imageReconciler) adopt(ctx context.Context, b *api.BackupBackingImage) error {
	if err := r.Update(ctx, b); err != nil || !api.IsCopy(b) || b.Ended() {
		return ignoreRace(err)
	}
	digest, origin := b.ContentDigest(), &api.BackupBackingImage{}
	if digest == "" && r.live.Get(ctx, client.ObjectKey{Name: b.Spec.CopyOf}, origin) == nil {
		digest = origin.ContentDigest()
	}
	return r.reportOtherContent(ctx, b, digest)
}

// reportOtherContent emits an event if the target has a backup of an image of the same name with other content than
// digest. A backup is reported when its source is chosen, and a copy when it is new.
func (r imageReconciler) reportOtherContent(ctx context.Context, b *api.BackupBackingImage, digest string) error {
	var list api.BackupBackingImageList
	err := r.live.List(ctx, &list, client.MatchingLabels{api.LabelImage: api.LabelValue(b.Spec.BackingImageName)})
	if err != nil {
		return err
	}
	if other := b.OtherContent(list.Items, digest); other != "" {
		r.events.Eventf(b, nil, corev1.EventTypeWarning, "ImageContentDiffers", "Backup", "%s", other)
	}
	return nil
}

// findSource finds the copy that a backup is made from, and the digest of the image's content. An error that is not
// retryable says why the backup can never be made. reader reads the target and the image.
func (r imageReconciler) findSource(ctx context.Context, reader client.Reader, b *api.BackupBackingImage) (
	source *api.ImageSource, digest string, err error) {
	name := b.Spec.BackingImageName
	if err := validateNames([2]string{"image", name}, [2]string{"backup target", b.Target()}); err != nil {
		return nil, "", err
	}
	img := &api.BackingImage{}
	if err := reader.Get(ctx, client.ObjectKey{Name: name}, img); apierrors.IsNotFound(err) {
		return nil, "", api.Errorf(api.NotFound, "image %s does not exist", name)
	} else if err != nil {
		return nil, "", err
	}
	if err := checkTarget(ctx, reader, b.Target()); err != nil {
		return nil, "", err
	}
	digest = img.ContentDigest()
	switch {
	case img.DeletionTimestamp != nil:
		return nil, "", api.Errorf(api.NotFound, "image %s is being deleted", name)
	case digest == "":
		return nil, "", api.Errorf(api.Unavailable, "image %s is not ready: it is %s, or its layers have no digests yet; "+
			"the backup waits", name, cmp.Or(img.Status.State, api.ImagePending))
	case b.Spec.Digest != "" && b.Spec.Digest != digest:
		return nil, "", api.Errorf(api.Invalid, "image %s has other content than the backup is of, with digest %.16s; make "+
			"another backup", name, digest)
	}
	copies, nodes, err := r.listCopies(ctx, name)
	if err != nil {
		return nil, "", err
	}
	unfinished, err := r.countUnfinished(ctx)
	if err != nil {
		return nil, "", err
	}
	c, err := chooseCopy(img, copies, nodes, unfinished, time.Now())
	if err != nil {
		return nil, "", err
	}
	return &api.ImageSource{UUID: img.Status.UUID, Layers: img.Status.Layers, VirtualSize: img.Status.VirtualSize,
		Checksum: img.Status.Checksum, Node: c.Spec.Node, Disk: c.Spec.Disk}, digest, nil
}

// listCopies lists the copies of an image, and all nodes. The caller does not change them.
func (r imageReconciler) listCopies(ctx context.Context, image string) ([]api.ImageCopy, []api.Node, error) {
	var copies api.ImageCopyList
	var nodes api.NodeList
	err := errors.Join(
		r.List(ctx, &copies, client.MatchingFields{watch.ByImage: image}, client.UnsafeDisableDeepCopy),
		r.List(ctx, &nodes, client.UnsafeDisableDeepCopy))
	return copies.Items, nodes.Items, err
}

// chooseCopy chooses the copy that a backup is made from: a ready copy on a ready disk of a node with a recent
// heartbeat, where a node with fewer unfinished backups comes before a node with more.
func chooseCopy(img *api.BackingImage, copies []api.ImageCopy, nodes []api.Node, unfinished map[string]int,
	now time.Time) (*api.ImageCopy, error) {
	silent := func(n *api.Node) bool { return now.Sub(n.Status.Heartbeat.Time) >= n.SilentAfter() }
	var usable []*api.ImageCopy
	var why []string
	for i := range copies {
		c := &copies[i]
		hindrance := explainCopy(c, img.Status.UUID)
		if hindrance == "" && !c.LendsLayers(img.Status.Layers) {
			hindrance = fmt.Sprintf("the copy is %s", cmp.Or(c.Status.State, api.ImagePending))
		}
		if hindrance == "" {
			hindrance = explainDisk(c.Spec.Node, c.Spec.Disk, nodes, silent)
		}
		if hindrance == "" {
			usable = append(usable, c)
		} else {
			why = append(why, fmt.Sprintf("copy on disk %s: %s", c.Spec.Disk, hindrance))
		}
	}
	if len(usable) == 0 {
		slices.Sort(why)
		return nil, api.Errorf(api.Unavailable, "image %s has no copy that a backup can be made from now: %s", img.Name,
			cmp.Or(strings.Join(why, "; "), "no disk has a copy"))
	}
	return slices.MinFunc(usable, func(a, b *api.ImageCopy) int {
		return cmp.Or(cmp.Compare(unfinished[a.Spec.Node], unfinished[b.Spec.Node]), strings.Compare(a.Name, b.Name))
	}), nil
}

// explainCopy says why a copy is not, or not for long, one of the image with a UUID; empty: it is.
func explainCopy(c *api.ImageCopy, uuid api.UID) string {
	switch {
	case c.Spec.UUID != uuid:
		return "the copy is of an earlier image of the name"
	case c.DeletionTimestamp != nil:
		return "the copy is being deleted"
	}
	return ""
}

// checkSource takes a backup from a node that cannot make the backup any more. The next reconcile finds another copy. A
// node that reads the copy holds the layers, so the deletion of the copy does no harm then.
func (r imageReconciler) checkSource(ctx context.Context, b *api.BackupBackingImage) (ctrl.Result, error) {
	source := b.Spec.Source
	copies, nodes, err := r.listCopies(ctx, b.Spec.BackingImageName)
	if err != nil {
		return ctrl.Result{}, err
	}
	now := time.Now()
	why := explainDisk(source.Node, source.Disk, nodes, func(n *api.Node) bool { return r.silentIn(n, now) <= 0 })
	if why == "" && b.Status.State != api.BackupInProgress {
		i := slices.IndexFunc(copies, func(c api.ImageCopy) bool {
			return c.Spec.Disk == source.Disk && c.Spec.Node == source.Node && explainCopy(&c, source.UUID) == ""
		})
		if i < 0 {
			why = fmt.Sprintf("disk %s has no copy of image %s any more", source.Disk, b.Spec.BackingImageName)
		}
	}
	if why == "" {
		return r.requeueAtSilence(nodes, source.Node, now), nil
	}
	return ctrl.Result{}, r.clearSource(ctx, b, why)
}
