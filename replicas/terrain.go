package replicas

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// terrainOf is what there is to place a replica of v on. What failed when the terrain was asked is in failed then.
func (p *planner) terrainOf(ctx context.Context, v *api.Volume, img *api.BackingImage, mine []api.Replica) (
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
	if img != nil {
		var copies api.ImageCopyList
		if err := p.client.List(ctx, &copies, client.MatchingFields{byImage: img.Name}); err != nil {
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
