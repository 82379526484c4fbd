package planner

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// viewCluster collects the cluster view for a replica of v above a base image, by name or value of LabelImage; empty:
// no image. Errors of later reads through the view end up in failed.
func (p *volumeReconciler) viewCluster(ctx context.Context, v *api.Volume, image string, mine []api.Replica) (
	_ clusterView, failed *error, _ error) {
	t := clusterView{mine: mine, copies: map[api.UID]api.ImageState{}, silent: p.isSilent}
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
		sum, err := p.promisedBytes(ctx, disk)
		if err != nil {
			*failed = err
		}
		known[disk] = sum
		return sum
	}
	if image != "" {
		var err error
		if t.image, err = watch.FindImage(ctx, p.client, image); err != nil {
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
	t.overPct = p.settingNumber(ctx, "storage-over-provisioning-percentage")
	t.minFreePc = p.settingNumber(ctx, "storage-minimal-available-percentage")
	t.topologyRules = p.topologyRulesOf(ctx, v)
	return t, failed, nil
}

// baseImage names the base image of a volume. A clone's spec need not name the image; its source or its replicas do,
// the replicas by LabelImage.
func baseImage(v *api.Volume, from *cloneSource, mine []api.Replica) string {
	if image := v.BaseImage(); image != "" {
		return image
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
