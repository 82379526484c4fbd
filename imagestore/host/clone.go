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
func (n *copyReconciler) cloneSources(ctx context.Context, image *api.BackingImageSpec, layers []api.UID) (
	[]api.ImageCopy, error,
) {
	var copies api.ImageCopyList
	err := n.List(ctx, &copies, client.MatchingFields{watch.ByImage: image.SourceParameters["backingImage"]})
	return slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return !c.LendsLayers(layers) }), err
}

// copyClone copies the layers of a clone to a disk that lacks them, from a disk of this node if possible.
func (n *copyReconciler) copyClone(ctx context.Context, t *transfer, slot slotFunc, image *api.BackingImageSpec,
	on block.Layers, spec importer.Spec, repair bool,
) (importer.Result, error) {
	if err := slot(ctx); err != nil {
		return importer.Result{}, err
	}
	copies, err := n.cloneSources(ctx, image, spec.Layers)
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
	spec.CheckpointEvery = n.opts.CheckpointEvery
	err = api.Errorf(api.NotFound, "image %s, the source of the clone, has no ready copy",
		image.SourceParameters["backingImage"])
	for i := range copies {
		if repair && string(copies[i].Spec.Disk) == on.UID() {
			continue
		}
		got, cerr := n.shareLayers(ctx, t, &copies[i], on, spec, repair)
		if cerr == nil || ctx.Err() != nil {
			return got, cerr
		}
		err = cerr
	}
	return importer.Result{}, err
}

// shareLayers copies the layers of another image's copy.
func (n *copyReconciler) shareLayers(ctx context.Context, t *transfer, c *api.ImageCopy, on block.Layers,
	spec importer.Spec, repair bool,
) (importer.Result, error) {
	from, done, err := n.openCopySource(ctx, c.Spec.Disk)
	if err != nil {
		return importer.Result{}, err
	}
	defer done()
	t.setState(api.ImageInProgress, "")
	if repair {
		return importer.Repair(ctx, from, on, spec, &t.progress)
	}
	return importer.Share(ctx, from, on, spec, &t.progress)
}
