package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/text"
)

func (a *app) backupLocks() *cobra.Command {
	target, remove := "", false
	c := &cobra.Command{
		Use: "locks", Short: "List the locks of a target's repository",
		Long: "Each session of Drover and of restic in the repository has a lock, and refreshes it every five minutes.\n" +
			"An exclusive lock, such as that of `restic prune`, keeps all other sessions out. A lock without a refresh for\n" +
			"30 minutes is stale: its session has ended without deleting it. --remove-stale deletes stale locks alone.",
		Example: "  drover backup locks\n  drover backup locks --target offsite --remove-stale",
		Args:    checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			t, err := listLocks(ctx, c, target, remove, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fact := t.Status.Locks
			if remove {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s removed\n", api.CountText(int(fact.Removed), "stale lock"))
			}
			err = a.printObject(cmd.OutOrStdout(), t, func(w io.Writer) { describe.Locks(w, fact) })
			if fact.Message != "" && err == nil {
				err = api.Errorf(api.Other, "target %q: locks: %s", t.Name, fact.Message)
			}
			return err
		},
	}
	c.Flags().StringVar(&target, "target", api.DefaultBackupTarget, "backup target")
	c.Flags().BoolVar(&remove, "remove-stale", false, "delete the locks without a refresh for 30 minutes")
	return c
}

// listLocks asks the node of a target for the locks, and waits for the answer.
func listLocks(ctx context.Context, c client.WithWatch, name string, remove bool, remarks io.Writer) (
	*api.BackupTarget, error) {
	if err := getTarget(ctx, c, name, &api.BackupTarget{}); err != nil {
		return nil, err
	}
	var asked metav1.Time
	err := requestOf(ctx, c, name, func(t *api.BackupTarget) error {
		if t.Status.Format == api.FormatLonghorn {
			return api.Errorf(api.Unsupported, "target %q is a store of Longhorn, in which Drover neither reads nor makes locks",
				name)
		}
		var last *metav1.Time
		if q := t.Spec.LocksRequest; q != nil {
			last = &q.At
		}
		asked = api.NewRequest(last)
		t.Spec.LocksRequest = &api.LocksRequest{At: asked, RemoveStale: remove}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return awaitAnswer(ctx, c, name, "the locks of target %q are not listed yet%s", remarks,
		func(t *api.BackupTarget) bool {
			return t.Status.Locks != nil && !t.Status.Locks.Request.At.Before(&asked)
		})
}

// awaitAnswer waits until the node of a target has answered a request. late is the message of a timeout, for the name
// of the target and the reason why the target is unavailable.
func awaitAnswer(ctx context.Context, c client.WithWatch, name, late string, remarks io.Writer,
	answered func(*api.BackupTarget) bool) (*api.BackupTarget, error) {
	gone := api.Errorf(api.NotFound, "target %q was deleted meanwhile", name)
	remark, why := remarkOnTarget(remarks, name), ""
	t, err := awaitObject(ctx, c, name, gone, func(t *api.BackupTarget) (bool, error) {
		if answered(t) {
			return true, nil
		}
		why = remark(t)
		return false, nil
	})
	return t, explainTimeout(err, late, name, text.Colon(why))
}
