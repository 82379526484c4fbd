package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/text"
)

func (a *app) volumeSalvage() *cobra.Command {
	var replica string
	var yes bool
	c := &cobra.Command{
		Use: "salvage NAME", Short: "Continue with the data of one replica, if all current replicas are lost",
		Long: "Drover never attaches a volume by itself if all members are lost: the other replicas lack the writes of " +
			"the\ntime in which they were no members. Shows the data of each replica. With --yes the volume continues " +
			"with one replica, and\nDrover gives up data that only other replicas had: it rebuilds a returning replica " +
			"from the chosen replica.",
		Example: "  drover volume salvage db                          # list the replicas\n" +
			"  drover volume salvage db --replica db.1f2e3d4c --yes",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			return a.salvageVolume(ctx, cmd, c, left[0], replica, yes)
		},
	}
	c.Flags().StringVar(&replica, "replica", "", "the replica; default: the last current replica")
	c.Flags().BoolVar(&yes, "yes", false, "continue with the replica, and give up data that only other replicas had")
	return c
}

func (a *app) salvageVolume(
	ctx context.Context, cmd *cobra.Command, c client.WithWatch, name, replica string, yes bool,
) error {
	var v api.Volume
	if err := getObject(ctx, c, "volume", name, &v); err != nil {
		return err
	}
	var list api.ReplicaList
	if err := c.List(ctx, &list, client.MatchingLabels{api.LabelVolume: api.LabelValue(v.Name)}); err != nil {
		return explain(ctx, err)
	}
	reps := slices.DeleteFunc(list.OfVolume(v.Name), func(r api.Replica) bool {
		return r.Spec.VolumeUID != v.Status.UID || r.DeletionTimestamp != nil
	})
	away, err := silentNodes(ctx, c)
	if err != nil {
		return err
	}
	var rows [][]string
	var best *api.Replica
	for i := range reps {
		r := &reps[i]
		member, last := "no", "?"
		if slices.Contains(v.Status.Members, r.Name) {
			member = "yes"
		}
		if r.Status.LastWrite != nil {
			last = r.Status.LastWrite.UTC().Format(time.DateTime)
		}
		mode := string(r.Status.Mode)
		usable := (r.Status.Mode == api.ReplicaStale || r.Status.Mode == api.ReplicaCurrent) && !away[r.Spec.Node]
		if away[r.Spec.Node] {
			mode += ", node silent"
		}
		rows = append(rows, []string{r.Name, r.Spec.Node, mode, member, fmt.Sprint(r.Status.Epoch),
			fmt.Sprint(r.Status.Joined), last, api.SizeText(r.Status.Used)})
		if usable && (best == nil || hasLaterData(r, best)) {
			best = r
		}
	}
	if !yes {
		return a.printObject(cmd.OutOrStdout(), &v, func(w io.Writer) {
			_ = text.Table(w, "REPLICA NODE MODE MEMBER EPOCH JOINED LAST-WRITE USED", rows)
			fmt.Fprintf(w, "\nA MEMBER has every acknowledged write. JOINED is the last epoch (now %d) in which the "+
				"replica was a member.\n", v.Status.Epoch)
			switch {
			case best == nil:
				fmt.Fprintln(w, "No replica can be used: bring a node or a disk back.")
			case v.Status.Robustness == api.RobustHealthy || v.Status.Robustness == api.RobustDegraded:
				fmt.Fprintln(w, "The volume has its members and needs no salvage.")
			default:
				fmt.Fprintf(w, "To continue with the data of one replica, and give up data that only others had:\n"+
					"  drover volume salvage %s --replica %s --yes\n", name, best.Name)
			}
		})
	}
	if replica == "" {
		if best == nil {
			return api.Errorf(api.Unavailable, "no replica of volume %q can be used: bring a node or a disk back", name)
		}
		replica = best.Name
	}
	base := v.DeepCopy()
	id := string(api.NewUID())
	v.Spec.Salvage = &api.SalvageWish{Replica: replica, ID: id}
	if err := c.Patch(ctx, &v, client.MergeFrom(base)); err != nil {
		return explain(ctx, err)
	}
	gone := api.Errorf(api.NotFound, "volume %q was deleted meanwhile", name)
	vol, err := awaitObject(ctx, c, name, gone, func(v *api.Volume) (bool, error) {
		return v.Status.Salvaged != nil && v.Status.Salvaged.ID == id, nil
	})
	if err != nil {
		return explainTimeout(err, "volume %q is not salvaged yet: does the controller run?", name)
	}
	if f := vol.Status.Salvaged; !f.Done {
		return api.Errorf(api.InUse, "volume %q is not salvaged: %s", name, f.Message)
	}
	return a.printObject(cmd.OutOrStdout(), vol, func(w io.Writer) {
		fmt.Fprintf(w, "volume %q salvaged: %s\n", name, vol.Status.Salvaged.Message)
	})
}

// hasLaterData reports whether a has more data than b, as far as the API knows.
func hasLaterData(a, b *api.Replica) bool {
	if a.Status.Joined != b.Status.Joined {
		return a.Status.Joined > b.Status.Joined
	}
	return a.Status.LastWrite != nil && (b.Status.LastWrite == nil || b.Status.LastWrite.Before(a.Status.LastWrite))
}

// silentNodes returns the silent nodes.
func silentNodes(ctx context.Context, c client.Client) (map[string]bool, error) {
	var list api.NodeList
	if err := c.List(ctx, &list); err != nil {
		return nil, explain(ctx, err)
	}
	away := map[string]bool{}
	for i := range list.Items {
		if n := &list.Items[i]; time.Since(n.Status.Heartbeat.Time) > describe.NodeSilent {
			away[n.Name] = true
		}
	}
	return away, nil
}
