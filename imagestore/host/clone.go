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

// cloneSources are the ready copies of the image that spec is a clone of, as far as they have its layers.
func (n *copyReconciler) cloneSources(ctx context.Context, spec *api.BackingImageSpec, layers []api.UID) ([]api.ImageCopy, error) {
	var copies api.ImageCopyList
	err := n.List(ctx, &copies, client.MatchingFields{watch.ByImage: spec.SourceParameters["backingImage"]})
	return slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return !c.LendsLayers(layers) }), err
}

// copyClone brings a clone to a disk that does not have its layers, from another one: of this node, else of any.
func (n *copyReconciler) copyClone(ctx context.Context, j *transfer, slot func(context.Context) error, spec *api.BackingImageSpec,
	on block.Layers, want importer.Spec, mend bool) (importer.Result, error) {
	if err := slot(ctx); err != nil {
		return importer.Result{}, err
	}
	copies, err := n.cloneSources(ctx, spec, want.Layers)
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
	want.CheckpointEvery = n.opts.CheckpointEvery
	err = api.Errorf(api.NotFound, "image %s, of which this is a clone, has no copy that is ready",
		spec.SourceParameters["backingImage"])
	for i := range copies {
		if mend && string(copies[i].Spec.Disk) == on.UID() {
			continue
		}
		got, cerr := n.shareLayers(ctx, j, &copies[i], on, want, mend)
		if cerr == nil || ctx.Err() != nil {
			return got, cerr
		}
		err = cerr
	}
	return importer.Result{}, err
}

func (n *copyReconciler) shareLayers(ctx context.Context, j *transfer, c *api.ImageCopy, on block.Layers, want importer.Spec, mend bool) (
	importer.Result, error) {
	from, done, err := n.openCopySource(ctx, c.Spec.Disk)
	if err != nil {
		return importer.Result{}, err
	}
	defer done()
	j.setState(api.ImageInProgress, "")
	if mend {
		return importer.Repair(ctx, from, on, want, &j.progress)
	}
	return importer.Share(ctx, from, on, want, &j.progress)
}
