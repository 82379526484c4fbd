package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/progress"
	"drover.io/drover/driver/cli/text"
	"drover.io/drover/driver/cli/verified"
)

func (a *app) backupVerify() *cobra.Command {
	var target string
	c := &cobra.Command{
		Use: "verify [NAME]", Short: "Read all backups of a target and compare every byte",
		Long: "A node reads the whole repository of the target, compares all bytes with their digests, and looks for all\n" +
			"chunks that the backups need. With NAME, the outcome is that of one backup. A node does the same by itself, in\n" +
			"parts, within the verifyInterval of the target. Lost chunks that are on a disk of that node are written again.\n" +
			"Damage that is left ends the command with an error; other nodes then write the chunks again that their disks\n" +
			"have, and a full backup (--full) does the same with the chunks of the volume. After the verification of a store\n" +
			"of Longhorn, the node restores its backups within seconds.",
		Example: "  drover backup verify\n  drover backup verify --target offsite\n  drover backup verify db-friday",
		Args:    checkArgs(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeNames(backups, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if len(left) == 1 {
				b, err := getStoredBackup(ctx, c, left[0])
				if err != nil {
					return err
				}
				target = b.Target()
			}
			began := time.Now()
			t, err := verifyTarget(ctx, c, target, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			damage := verified.Damage(t)
			if len(left) == 1 {
				if damage, err = damageOfBackup(ctx, c, t, left[0]); err != nil {
					return err
				}
			}
			err = a.printObject(cmd.OutOrStdout(), t, func(w io.Writer) {
				fmt.Fprintf(w, "target %q verified: %s, in %s\n", t.Name, verified.Summary(t), text.Seconds(time.Since(began)))
			})
			if damage != "" && err == nil {
				err = api.Errorf(api.Corrupt, "%s", damage)
			}
			return err
		},
	}
	c.Flags().StringVar(&target, "target", api.DefaultBackupTarget, "backup target")
	return c
}

// damageOfBackup describes the damage of one backup, which the node writes before that of the target; empty: none.
func damageOfBackup(ctx context.Context, c client.Client, t *api.BackupTarget, name string) (string, error) {
	stored, err := getStoredBackup(ctx, c, name)
	if err != nil || !stored.Common().Damaged {
		return "", err
	}
	return fmt.Sprintf("backup %q is damaged: see `drover target show %s`; %s", name, t.Name,
		verified.Remedy(t, stored)), nil
}

// verifyTarget asks for a verification, and waits until it has ended.
func verifyTarget(ctx context.Context, c client.WithWatch, name string, remarks io.Writer) (*api.BackupTarget, error) {
	if err := getTarget(ctx, c, name, &api.BackupTarget{}); err != nil {
		return nil, err
	}
	gone := api.Errorf(api.NotFound, "target %q was deleted meanwhile", name)
	var asked metav1.Time
	err := requestOf(ctx, c, name, func(t *api.BackupTarget) error {
		if t.Spec.ReadOnly && t.Status.Format != api.FormatLonghorn {
			return api.Errorf(api.InUse, "target %q is read-only, and a verification writes a lock: run `restic check "+
				"--read-data --no-lock`", name)
		}
		asked = api.NewRequest(t.Spec.VerifyRequestedAt)
		t.Spec.VerifyRequestedAt = &asked
		return nil
	})
	if err != nil {
		return nil, err
	}
	p := progress.New(remarks, "target "+name)
	remark, why := remarkOnTarget(remarks, name), ""
	t, err := awaitObject(ctx, c, name, gone, func(t *api.BackupTarget) (bool, error) {
		v := t.Status.Verification
		if v == nil || v.Request == nil || v.Request.Before(&asked) {
			why = remark(t)
			if v != nil && v.Message != "" {
				why = v.Message
			}
			return false, nil
		}
		why = v.Message
		p.Show("verifies", v.Bytes, verified.Total(t))
		return !v.Asked, nil
	})
	p.Clear()
	return t, explainTimeout(err, "target %q is not verified yet%s", name, text.Colon(why))
}
