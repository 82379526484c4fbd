package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

func (a *app) volumeTrim() *cobra.Command {
	return &cobra.Command{
		Use: "trim NAME...", Short: "Free the blocks of volumes that their mounted file systems do not use",
		Long: "Runs fstrim on the node where the volume is mounted. The space of freed blocks above\nthe newest " +
			"snapshot comes back at once; snapshots keep their blocks, unless the volume's\nunmapMarkSnapChainRemoved is " +
			"enabled (or the setting\nremove-snapshots-during-filesystem-trim is true): then Drover deletes the newest " +
			"snapshot and the snapshots below\nit, down to the first snapshot that carries something else (a snapshot " +
			"beside the head), is part\nof a group, or is being cloned.",
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			for _, name := range left {
				if err := a.trimOne(ctx, cmd, c, name); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func (a *app) trimOne(ctx context.Context, cmd *cobra.Command, c client.WithWatch, name string) error {
	var v api.Volume
	if err := getObject(ctx, c, "volume", name, &v); err != nil {
		return err
	}
	id := string(api.NewUID())
	base := v.DeepCopy()
	v.Spec.Trim = id
	if err := c.Patch(ctx, &v, client.MergeFrom(base)); err != nil {
		return explain(ctx, err)
	}
	gone := api.Errorf(api.NotFound, "volume %q was deleted meanwhile", name)
	now, err := awaitObject(ctx, c, name, gone, func(v *api.Volume) (bool, error) {
		if v.Spec.Trim != id {
			return true, api.Errorf(api.Busy, "volume %q is trimmed by another command at the same time", name)
		}
		is := v.Status.Trimmed
		return is != nil && is.ID == id && is.State != api.CloneInitiated, nil
	})
	if err != nil {
		return explainTimeout(err, "volume %q is still being trimmed: `drover volume show %s -o yaml` tells the outcome",
			name, name)
	}
	is := now.Status.Trimmed
	if is.State == api.CloneFailed {
		return api.Errorf(api.InUse, "volume %q: %s", name, is.Message)
	}
	return a.printObject(cmd.OutOrStdout(), now, func(w io.Writer) {
		fmt.Fprintf(w, "volume %q: %s trimmed\n", name, api.SizeText(is.Bytes))
		if len(is.Snapshots) > 0 {
			fmt.Fprintf(w, "removed: %s\n", strings.Join(is.Snapshots, ", "))
		}
		if is.Message != "" {
			fmt.Fprintln(w, is.Message)
		}
	})
}
