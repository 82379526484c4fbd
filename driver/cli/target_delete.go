package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

func (a *app) targetDelete() *cobra.Command {
	force := false
	c := &cobra.Command{
		Use: "delete NAME...", Short: "Forget backup targets; the stores keep their backups", Aliases: []string{"rm"},
		Long: "Forgets backup targets. The stores keep their repositories with all backups: a target with the same URL\n" +
			"and password lists them again. Refused while backups of the target exist. --force forgets these backups,\n" +
			"too: their objects are deleted, and the store keeps the backups. Backups in progress end.",
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(targets, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			for _, name := range left {
				forgotten, err := deleteTarget(ctx, cmd, c, name, force)
				if err != nil {
					return err
				}
				kept := "; the store keeps its backups"
				if forgotten > 0 {
					kept = "; the store keeps its backups, of which " + api.CountText(forgotten, "object") + " were deleted"
				}
				a.printOutcome(cmd, "backup target", name, "deleted"+kept)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&force, "force", false, "forget the backups of the target, too; the store keeps them")
	return c
}

// deleteTarget deletes a target, with force also the objects of the target's backups, and returns their number. The
// target is deleted first: while a target exists, a deleted Backup is also deleted in the store. A target that an
// interrupted command deleted may have backups left.
func deleteTarget(ctx context.Context, cmd *cobra.Command, c client.WithWatch, name string, force bool) (int, error) {
	var t api.BackupTarget
	missing := getObject(ctx, c, "target", name, &t)
	if missing != nil && api.KindOf(missing) != api.NotFound {
		return 0, missing
	}
	left, err := backupsOf(ctx, c, "", name)
	if err != nil {
		return 0, err
	}
	images, err := imageBackupsOf(ctx, c, name)
	if err != nil {
		return 0, err
	}
	var names []string
	for i := range left.Items {
		names = append(names, left.Items[i].Name)
	}
	for i := range images.Items {
		names = append(names, images.Items[i].Name)
	}
	switch {
	case missing != nil && (!force || len(names) == 0):
		return 0, missing
	case len(names) > 0 && !force:
		return 0, api.Errorf(api.InUse, "target %q has %s: delete these backups first, or leave them in the store with "+
			"--force", name, someOf("backup", names))
	case missing == nil:
		if err := c.Delete(ctx, &t, client.Preconditions{UID: &t.UID}); client.IgnoreNotFound(err) != nil {
			return 0, explain(ctx, err)
		}
		none := func(*api.BackupTarget) string { return "" } // a target without a finalizer waits for nothing
		if err := awaitGone(ctx, c, cmd.ErrOrStderr(), "target", &t, none); err != nil {
			return 0, err
		}
		if ref := t.Spec.CredentialSecret; ref != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "secret %s/%s stays: the backups of target %q need the password there\n",
				ref.Namespace, ref.Name, name)
		}
	}
	for i := range left.Items {
		if err := forgetBackup(ctx, c, &left.Items[i]); err != nil {
			return i, explain(ctx, fmt.Errorf("backup %q: its object was not deleted: %w", left.Items[i].Name, err))
		}
	}
	for i := range images.Items {
		if err := forgetBackup(ctx, c, &images.Items[i]); err != nil {
			return len(left.Items) + i, explain(ctx, fmt.Errorf("backup %q: its object was not deleted: %w",
				images.Items[i].Name, err))
		}
	}
	return len(names), nil
}

// forgetBackup deletes the object of a backup, and nothing in the store. A Backup that has ended loses the finalizer
// before the deletion: a node that does not know yet that the target is deleted would delete the backup in the store.
func forgetBackup[T api.StoredBackup](ctx context.Context, c client.WithWatch, b T) error {
	for {
		now, err := await.Edit(ctx, c, b.GetName(), func(now T) (bool, error) {
			return now.GetUID() == b.GetUID() && now.Ended() && controllerutil.RemoveFinalizer(now, api.Finalizer), nil
		})
		if err != nil || now.GetUID() != b.GetUID() {
			return client.IgnoreNotFound(err)
		}
		uid, seen := now.GetUID(), now.GetResourceVersion()
		err = c.Delete(ctx, now, client.Preconditions{UID: &uid, ResourceVersion: &seen})
		if !apierrors.IsConflict(err) {
			return client.IgnoreNotFound(err)
		}
	}
}
