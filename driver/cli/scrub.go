package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

func (a *app) volumeScrub() *cobra.Command {
	return &cobra.Command{
		Use: "scrub NAME...", Short: "Compare the layers of volumes with their digests, and report damage",
		Long: "Reads every sealed layer of the volume and of its snapshots, on the disks that have it, at most at the\n" +
			"rate of the setting volume-scrub-rate-limit, and compares it with the digests of its chunks of 2 MiB.\n" +
			"Damage is reported by layer, offset and length; reads of damaged chunks fail from then on, or another\n" +
			"replica answers them and repairs the chunk. Data written since the last snapshot is in no sealed layer,\n" +
			"and has no digests.",
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			damaged := 0
			for _, name := range left {
				n, err := a.scrubOne(ctx, cmd, c, name)
				if err != nil {
					return err
				}
				damaged += n
			}
			if damaged > 0 {
				return api.Errorf(api.Corrupt, "%d ranges are damaged: Drover repairs them from other replicas of the "+
					"volume (\"drover volume show\" has the progress); without other replicas restore the volume", damaged)
			}
			return nil
		},
	}
}

func (a *app) scrubOne(ctx context.Context, cmd *cobra.Command, c client.WithWatch, name string) (
	damaged int, err error,
) {
	var v api.Volume
	if err := getObject(ctx, c, "volume", name, &v); err != nil {
		return 0, err
	}
	var reps api.ReplicaList
	if err := c.List(ctx, &reps, client.MatchingLabels{api.LabelVolume: api.LabelValue(v.Name)}); err != nil {
		return 0, explain(ctx, err)
	}
	reps.Items = reps.OfVolume(v.Name)
	id := string(api.NewUID())
	for i := range reps.Items {
		r := &reps.Items[i]
		base := r.DeepCopy()
		r.Spec.Scrub = id
		if err := c.Patch(ctx, r, client.MergeFrom(base)); err != nil {
			return 0, explain(ctx, err)
		}
	}
	var rows [][]string
	for i := range reps.Items {
		gone := api.Errorf(api.NotFound, "replica %q was deleted meanwhile", reps.Items[i].Name)
		r, err := awaitObject(ctx, c, reps.Items[i].Name, gone, func(r *api.Replica) (bool, error) {
			if r.Spec.Scrub != id {
				return true, api.Errorf(api.Busy, "volume %q is scrubbed by another command at the same time", name)
			}
			return r.Status.Scrubbed == id, nil
		})
		if err != nil {
			return 0, explainTimeout(err, "volume %q is still being scrubbed: `drover volume show %s` tells the outcome", name,
				name)
		}
		for _, g := range r.Status.Damage {
			rows = append(rows, []string{r.Spec.Node, r.Name, string(g.Layer), fmt.Sprint(g.Offset), fmt.Sprint(g.Length)})
		}
	}
	if err := getObject(ctx, c, "volume", name, &v); err != nil {
		return 0, err
	}
	return len(rows), a.printObject(cmd.OutOrStdout(), &v, func(w io.Writer) {
		if len(rows) == 0 {
			fmt.Fprintf(w, "volume %q: all sealed layers match their digests\n", name)
			return
		}
		fmt.Fprintf(w, "volume %q is damaged:\n", name)
		_ = text.Table(w, "NODE REPLICA LAYER OFFSET LENGTH", rows)
	})
}
