package imagestore

import (
	"cmp"
	"context"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// A clone of an image has an identity and copies of its own, and the layers of its origin: on a disk that has those it
// is there at once, on another they are copied. Once it has a copy it does not need the origin any more: a layer stays
// as long as any image names it.

// originWait is when an origin that cannot be cloned is looked at again.
const originWait = 10 * time.Second

// conceive begins the life of a clone with what is known of its origin, or says why that cannot be cloned.
func (r *images) conceive(ctx context.Context, img *api.BackingImage) (ctrl.Result, error) {
	s := &img.Status
	origin, err := r.origin(ctx, img)
	if err != nil {
		if api.KindOf(err) == api.Other {
			return ctrl.Result{}, err
		}
		if s.State == api.ImageFailed && s.Message == err.Error() {
			return ctrl.Result{RequeueAfter: originWait}, nil
		}
		s.State, s.Message = api.ImageFailed, err.Error()
		return ctrl.Result{RequeueAfter: originWait}, again(r.Status().Update(ctx, img))
	}
	s.UUID, s.State, s.Message = api.NewUID(), api.ImagePending, ""
	s.Layers = slices.Clone(origin.Status.Layers)
	s.Format, s.VirtualSize = origin.Status.Format, origin.Status.VirtualSize
	s.Checksum, s.Digest = origin.Status.Checksum, origin.Status.Digest
	return ctrl.Result{}, again(r.Status().Update(ctx, img)) // its event brings us back
}

// origin is the image that img is a clone of, which must be whole.
func (r *images) origin(ctx context.Context, img *api.BackingImage) (*api.BackingImage, error) {
	if err := validate(img); err != nil {
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

// origins are the ready copies of the image that img is a clone of, as far as they have its layers.
func origins(ctx context.Context, from client.Reader, img *api.BackingImageSpec,
	layers []api.UID) ([]api.ImageCopy, error) {
	if img.SourceType != api.SourceClone {
		return nil, nil
	}
	var copies api.ImageCopyList
	err := from.List(ctx, &copies, client.MatchingLabels{
		api.LabelImage: api.LabelValue(img.SourceParameters["backingImage"])})
	return slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool {
		return c.Status.State != api.ImageReady || !slices.Equal(c.Spec.Layers, layers)
	}), err
}

// copyOrigin brings a clone to a disk that does not have its layers, from another one: of this node, else of any.
func (n *copies) copyOrigin(ctx context.Context, j *job, slot func(context.Context) error, spec *api.BackingImageSpec,
	on block.Layers, want importer.Spec, mend bool) (importer.Result, error) {
	if err := slot(ctx); err != nil {
		return importer.Result{}, err
	}
	copies, err := origins(ctx, n, spec, want.Layers)
	if err != nil {
		return importer.Result{}, err
	}
	slices.SortStableFunc(copies, func(a, b api.ImageCopy) int {
		near := func(c api.ImageCopy) int {
			if c.Spec.Node == n.node {
				return 0
			}
			return 1
		}
		return cmp.Compare(near(a), near(b))
	})
	want.KeepEvery = n.opts.KeepEvery
	err = api.Errorf(api.NotFound, "image %s, of which this is a clone, has no copy that is ready",
		spec.SourceParameters["backingImage"])
	for i := range copies {
		if mend && string(copies[i].Spec.Disk) == on.UID() {
			continue
		}
		got, cerr := n.share(ctx, j, &copies[i], on, want, mend)
		if cerr == nil || ctx.Err() != nil {
			return got, cerr
		}
		err = cerr
	}
	return importer.Result{}, err
}

func (n *copies) share(ctx context.Context, j *job, c *api.ImageCopy, on block.Layers, want importer.Spec, mend bool) (
	importer.Result, error) {
	from, done, err := n.lender(ctx, c.Spec.Disk)
	if err != nil {
		return importer.Result{}, err
	}
	defer done()
	j.is(api.ImageInProgress, "")
	if mend {
		return importer.Mend(ctx, from, on, want, &j.progress)
	}
	return importer.Share(ctx, from, on, want, &j.progress)
}
