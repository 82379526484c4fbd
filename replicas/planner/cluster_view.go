package planner

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// terrainOf is what there is to place a replica of v on, which stands on the image named, if any. What failed when the
// terrain was asked is in failed then.
func (p *planner) terrainOf(ctx context.Context, v *api.Volume, image string, mine []api.Replica) (
	_ terrain, failed *error, _ error) {
	t := terrain{mine: mine, copies: map[api.UID]api.ImageState{}, silent: p.isSilent}
	var nodes api.NodeList
	if err := p.client.List(ctx, &nodes); err != nil {
		return t, nil, err
	}
	t.nodes = nodes.Items
	failed = new(error)
	known := map[api.UID]int64{} // a balance asks for each replica again
	t.promised = func(disk api.UID) int64 {
		sum, is := known[disk]
		if is {
			return sum
		}
		sum, err := p.promised(ctx, disk)
		if err != nil {
			*failed = err
		}
		known[disk] = sum
		return sum
	}
	if image != "" {
		var img api.BackingImage
		if err := p.client.Get(ctx, client.ObjectKey{Name: image}, &img); err == nil {
			t.image = &img
		} else if !apierrors.IsNotFound(err) {
			return t, nil, err
		}
	}
	if img := t.image; img != nil {
		var copies api.ImageCopyList
		if err := p.client.List(ctx, &copies, client.MatchingFields{watch.ByImage: img.Name}); err != nil {
			return t, nil, err
		}
		for _, c := range copies.Items {
			if c.Spec.UUID == img.Status.UUID {
				t.copies[c.Spec.Disk] = c.Status.State
			}
		}
	}
	t.overPct = p.setting(ctx, "storage-over-provisioning-percentage")
	t.minFreePc = p.setting(ctx, "storage-minimal-available-percentage")
	t.apart = p.apartOf(ctx, v)
	return t, failed, nil
}

// standsOn is the name of the image below a volume; the spec of a clone need not name it, what it was made of does.
func standsOn(v *api.Volume, from *origin, mine []api.Replica) string {
	if v.Spec.BackingImage != "" {
		return v.Spec.BackingImage
	}
	if from != nil {
		return from.image
	}
	for i := range mine {
		if image := mine[i].Labels[api.LabelImage]; image != "" {
			return image
		}
	}
	return ""
}
