package host

import (
	"cmp"
	"context"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// origins are the ready copies of the image that spec is a clone of, as far as they have its layers.
func (n *copies) origins(ctx context.Context, spec *api.BackingImageSpec, layers []api.UID) ([]api.ImageCopy, error) {
	var copies api.ImageCopyList
	err := n.List(ctx, &copies, client.MatchingFields{watch.ByImage: spec.SourceParameters["backingImage"]})
	return slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return !c.LendsLayers(layers) }), err
}

// copyOrigin brings a clone to a disk that does not have its layers, from another one: of this node, else of any.
func (n *copies) copyOrigin(ctx context.Context, j *job, slot func(context.Context) error, spec *api.BackingImageSpec,
	on block.Layers, want importer.Spec, mend bool) (importer.Result, error) {
	if err := slot(ctx); err != nil {
		return importer.Result{}, err
	}
	copies, err := n.origins(ctx, spec, want.Layers)
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
