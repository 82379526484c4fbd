package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

// createGroup takes snapshots of several volumes at the same instant.
func (a *app) createGroup(ctx context.Context, cmd *cobra.Command, c client.WithWatch, name string, volumes []string,
	labels map[string]string) error {
	began := time.Now()
	if err := checkName("snapshot group", name); err != nil {
		return err
	}
	for _, v := range volumes {
		if err := getObject(ctx, c, "volume", v, &api.Volume{}); err != nil {
			return err
		}
	}
	g := api.NewSnapshotGroup(name, volumes)
	g.Spec.Labels = labels
	if err := c.Create(ctx, g); err != nil {
		if apierrors.IsAlreadyExists(err) {
			return api.Errorf(api.Exists, "snapshot group %q exists already: choose another name", name)
		}
		return explain(ctx, err)
	}
	gone := api.Errorf(api.NotFound, "snapshot group %q was deleted meanwhile", name)
	why := ""
	g, err := awaitObject(ctx, c, name, gone, func(g *api.SnapshotGroup) (bool, error) {
		if why != g.Status.Error {
			if why = g.Status.Error; why != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "snapshot group %q waits: %s\n", name, why)
			}
		}
		return g.Status.ReadyToUse, nil
	})
	var names []string
	for i := 0; err == nil && i < len(g.Status.Members); i++ {
		names = append(names, g.Status.Members[i].Snapshot)
		_, err = awaitObject(ctx, c, g.Status.Members[i].Snapshot, gone, func(s *api.Snapshot) (bool, error) {
			return s.Status.ReadyToUse, nil
		})
	}
	if err != nil {
		return explainTimeout(err, "snapshot group %q is not there yet%s", name, text.Colon(why))
	}
	return a.printObject(cmd.OutOrStdout(), g, func(w io.Writer) {
		fmt.Fprintf(w, "%d volumes cut at one instant, in %s: snapshots %s\n", len(names), text.Seconds(time.Since(began)),
			strings.Join(names, ", "))
	})
}

// deleteGroup deletes a group with its snapshots.
func (a *app) deleteGroup(ctx context.Context, cmd *cobra.Command, c client.WithWatch, name string) error {
	var g api.SnapshotGroup
	if err := getObject(ctx, c, "snapshot group", name, &g); err != nil {
		return err
	}
	if err := c.Delete(ctx, &g, client.Preconditions{UID: &g.UID}); client.IgnoreNotFound(err) != nil {
		return explain(ctx, err)
	}
	why := func(g *api.SnapshotGroup) string { return g.Status.Error }
	if err := awaitGone(ctx, c, cmd.ErrOrStderr(), "snapshot group", &g, why); err != nil {
		return err
	}
	a.printOutcome(cmd, "snapshot group", name, "deleted")
	return nil
}
