package planner

import (
	"cmp"
	"context"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// A clone has an identity and copies of its own, and the layers of the cloned image: a disk with these layers has the
// clone at once, another disk copies the layers. A clone with a copy no longer needs the cloned image: a layer exists
// as long as any image names the layer.

// sourceRetry is the interval between two looks at a source that cannot be used yet: an image to clone, or a backup.
const sourceRetry = 10 * time.Second

// beginClone gives a clone the layers of the cloned image, or explains why the image cannot be cloned.
func (r *imageReconciler) beginClone(ctx context.Context, img *api.BackingImage) (ctrl.Result, error) {
	s := &img.Status
	origin, err := r.cloneSource(ctx, img)
	if err != nil {
		if api.KindOf(err) == api.Other {
			return ctrl.Result{}, err
		}
		return r.explainSource(ctx, img, err)
	}
	s.UUID, s.State, s.Message = api.NewUID(), api.ImagePending, ""
	s.Layers = slices.Clone(origin.Status.Layers)
	s.Format, s.VirtualSize = origin.Status.Format, origin.Status.VirtualSize
	s.Checksum, s.Digest = origin.Status.Checksum, origin.Status.Digest
	return ctrl.Result{}, ignoreRace(r.Status().Update(ctx, img)) // the event of the update continues
}

// explainSource explains in the status why the source of an image cannot be used yet.
func (r *imageReconciler) explainSource(ctx context.Context, img *api.BackingImage, why error) (ctrl.Result, error) {
	s := &img.Status
	if s.State == api.ImageFailed && s.Message == why.Error() {
		return ctrl.Result{RequeueAfter: sourceRetry}, nil
	}
	s.State, s.Message = api.ImageFailed, why.Error()
	return ctrl.Result{RequeueAfter: sourceRetry}, ignoreRace(r.Status().Update(ctx, img))
}

// cloneSource returns the image to clone, which must be ready.
func (r *imageReconciler) cloneSource(ctx context.Context, img *api.BackingImage) (*api.BackingImage, error) {
	if err := validateImage(img); err != nil {
		return nil, err
	}
	name := img.Spec.SourceParameters["backingImage"]
	if name == img.Name {
		return nil, api.Errorf(api.Invalid, "image %s cannot be a clone of itself", name)
	}
	var o api.BackingImage
	err := r.Get(ctx, client.ObjectKey{Name: name}, &o)
	switch st := o.Status; {
	case apierrors.IsNotFound(err):
		return nil, api.Errorf(api.NotFound, "image %s, which is to be cloned, does not exist", name)
	case err != nil:
		return nil, err
	case !o.DeletionTimestamp.IsZero():
		return nil, api.Errorf(api.Unavailable, "image %s, which is to be cloned, is being deleted", name)
	case st.State == api.ImageReady && st.Digest == "":
		return nil, api.Errorf(api.Unavailable, "image %s, which is to be cloned, is being read for its digests", name)
	case st.State != api.ImageReady:
		return nil, api.Errorf(api.Unavailable, "image %s, which is to be cloned, is not ready: it is %s", name,
			cmp.Or(st.State, "new"))
	case img.Spec.Checksum != "" && img.Spec.Checksum != st.Checksum:
		return nil, api.Errorf(api.Invalid, "image %s, which is to be cloned, has another checksum: SHA-512 is %s", name,
			st.Checksum)
	}
	return &o, nil
}

// sourceLocations returns the ready copies of the cloned image with the layers of the clone.
func (r *imageReconciler) sourceLocations(ctx context.Context, img *api.BackingImage) ([]location, error) {
	if img.Spec.SourceType != api.SourceClone {
		return nil, nil
	}
	var copies api.ImageCopyList
	if err := r.List(ctx, &copies, client.MatchingFields{watch.ByImage: img.Spec.SourceParameters["backingImage"]},
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	var at []location
	for i := range copies.Items {
		if c := &copies.Items[i]; c.LendsLayers(img.Status.Layers) {
			at = append(at, location{c.Spec.Node, c.Spec.Disk})
		}
	}
	return at, nil
}
