package cli

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/disks"
)

func (a *app) nodeDrain() *cobra.Command {
	var undo bool
	c := &cobra.Command{
		Use: "drain NAME", Short: "Place no new replicas and images on a node, and move its data away",
		Long: "Marks a node for eviction: Drover places no new replicas and images on the node, makes its replicas on " +
			"other\nnodes before it deletes them, and moves its images. Attached volumes stay attached. Prints the " +
			"volumes and\nimages that the node still has.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(nodes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			n, err := nodeOf(ctx, c, left[0])
			if err != nil {
				return err
			}
			if n, err = editNode(ctx, c, n.Name, func(n *api.Node) error {
				n.Spec.EvictionRequested = !undo
				return nil
			}); err != nil {
				return err
			}
			if undo {
				a.printOutcome(cmd, "node", n.Name, "is in use again")
				return nil
			}
			vols, imgs, err := onNode(ctx, c, n)
			if err != nil {
				return err
			}
			a.printOutcome(cmd, "node", n.Name, "takes no new replicas and images"+stillHolds(vols, imgs))
			return nil
		},
	}
	c.Flags().BoolVar(&undo, "undo", false, "take the wish back")
	return c
}

// onNode returns the volumes and images on the disks of a node.
func onNode(ctx context.Context, c client.Client, n *api.Node) (vols, imgs []string, err error) {
	for _, d := range n.Status.Disks {
		if d.UID == "" {
			continue
		}
		v, i, err := disks.Names(ctx, c, d.UID)
		if err != nil {
			return nil, nil, explain(ctx, err)
		}
		vols, imgs = append(vols, v...), append(imgs, i...)
	}
	slices.Sort(vols)
	slices.Sort(imgs)
	return slices.Compact(vols), slices.Compact(imgs), nil
}

// nodeSet sets the zone and tags of a node, for placement.
func (a *app) nodeSet() *cobra.Command {
	var zone, tags string
	c := &cobra.Command{
		Use: "set NAME", Short: "Say which zone a node is in, and which tags it has",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(nodes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			flags := cmd.Flags()
			if !flags.Changed("zone") && !flags.Changed("tags") {
				return api.Errorf(api.Invalid, "the command changes nothing: give --zone or --tags")
			}
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			n, err := nodeOf(ctx, c, left[0])
			if err != nil {
				return err
			}
			if n, err = editNode(ctx, c, n.Name, func(n *api.Node) error {
				if flags.Changed("tags") {
					n.Spec.Tags = nil
					for t := range strings.SplitSeq(tags, ",") {
						if t = strings.TrimSpace(t); t != "" {
							n.Spec.Tags = append(n.Spec.Tags, t)
						}
					}
				}
				if flags.Changed("zone") {
					if n.Labels == nil {
						n.Labels = map[string]string{}
					}
					if n.Labels[api.LabelZone] = zone; zone == "" {
						delete(n.Labels, api.LabelZone)
					}
				}
				return nil
			}); err != nil {
				return err
			}
			a.printOutcome(cmd, "node", n.Name, "set")
			return nil
		},
	}
	c.Flags().StringVar(&zone, "zone", "", "zone; replicas of a volume are put into different ones; empty: none")
	c.Flags().StringVar(&tags, "tags", "", "tags a,b, for selectors; empty: none")
	return c
}
