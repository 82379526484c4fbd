package replica

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// reportFetch reports which layers the disk of a replica lacks. The share is in steps, so that the copy of an image
// does not change the status of each volume all the time.
func (rs *Replicas) reportFetch(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	lacks, err := disk.Lacking(string(r.Spec.UID))
	if err != nil {
		return err
	}
	if r.Status.Fetching = ""; len(lacks) == 0 {
		return nil
	}
	what, progress := "its layers", int32(0)
	if r.Status.Copy != nil {
		progress = r.Status.Copy.Progress
	} else if c, err := rs.copyOn(ctx, r.Spec.Disk, r.Spec.Layers); err == nil && c != nil {
		what, progress = "image "+c.Spec.Image, c.Status.Progress
	}
	const step = 10
	r.Status.Fetching = fmt.Sprintf("about %d %% of %s", max(100-progress+step-1, step)/step*step, what)
	var nodes []string
	for _, uid := range lacks {
		for _, p := range rs.layers.Nodes(ctx, uid) {
			if !slices.Contains(nodes, p.Node) {
				nodes = append(nodes, p.Node)
			}
		}
	}
	if slices.Sort(nodes); len(nodes) > 0 {
		r.Status.Fetching += " from node " + strings.Join(nodes, ", ")
	}
	return nil
}

// sourceText says where an open replica reads layers without a copy on its disk; empty: no layer lacks a copy.
func (rs *Replicas) sourceText(ctx context.Context, layers []stack.RemoteLayer) string {
	if len(layers) == 0 {
		return ""
	}
	var nodes []string
	var why error
	for _, layer := range layers {
		if layer.From.Path != "" {
			return fmt.Sprintf("reads layers from disk %s until they are copied here", layer.From.Path)
		}
		for _, p := range rs.layers.Nodes(ctx, layer.UID) {
			if !slices.Contains(nodes, p.Node) {
				nodes = append(nodes, p.Node)
			}
		}
		why = cmp.Or(why, layer.Why)
	}
	text := "reads its image from node " + strings.Join(nodes, ", ") + " until the copy is here"
	if len(nodes) == 0 {
		text = "no node has the replica's image"
	}
	if why != nil {
		return fmt.Sprintf("%s; reads of missing blocks wait: %v", text, why)
	}
	return text
}
