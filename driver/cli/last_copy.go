package cli

import (
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// readyDisks returns the ready disks of living nodes. The user declared the node dead; empty: no node.
func readyDisks(ctx context.Context, c client.Client, dead string) (map[api.UID]bool, error) {
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return nil, err
	}
	ready := map[api.UID]bool{}
	for _, n := range nodes.Items {
		alive := n.Name != dead && !isSilent(&n)
		for _, d := range n.Status.Disks {
			ready[d.UID] = ready[d.UID] || d.Ready && alive
		}
	}
	return ready, nil
}

// lastCopies refuses to forget a disk with the only whole copy of an image that no import can fetch again.
func lastCopies(ctx context.Context, c client.Client, d disk, dead string) error {
	var copies api.ImageCopyList
	ready, err := readyDisks(ctx, c, dead)
	if err == nil {
		err = c.List(ctx, &copies)
	}
	if err != nil {
		return explain(ctx, err)
	}
	var last []string
	for _, f := range copies.Items {
		if f.Spec.Disk != d.status.UID || f.Status.Digest == "" {
			continue // on another disk, or never whole
		}
		var img api.BackingImage
		err := c.Get(ctx, client.ObjectKey{Name: f.Spec.Image}, &img)
		if err != nil && !apierrors.IsNotFound(err) {
			return explain(ctx, err)
		}
		fetched := slices.Contains([]api.SourceType{api.SourceDownload, api.SourceRegistry, api.SourceRestore},
			img.Spec.SourceType)
		other := slices.ContainsFunc(copies.Items, func(o api.ImageCopy) bool {
			return o.Spec.UUID == f.Spec.UUID && o.Spec.Disk != f.Spec.Disk && o.Status.State == api.ImageReady &&
				ready[o.Spec.Disk]
		})
		if err == nil && img.DeletionTimestamp == nil && !fetched && !other {
			last = append(last, f.Spec.Image)
		}
	}
	if len(last) == 0 {
		return nil
	}
	return api.Errorf(api.InUse, "disk %s has the last copy of %s, which would be forgotten: bring the disk back, or "+
		"give the copy up with --force", d.spec.Path, someOf("image", last))
}
