package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// copyFlags are the flags of a copy.
type copyFlags struct {
	name, to string
	wait     bool
}

func (a *app) backupCopy() *cobra.Command {
	var f copyFlags
	c := &cobra.Command{
		Use: "copy BACKUP --to TARGET", Short: "Copy a backup to another target",
		Long: "Copies a backup from its target to another one, without reading a volume. Chunks that the other target has\n" +
			"already are not sent. The copy is a backup of its own, and outlives the original. Backups of Longhorn become\n" +
			"backups of Drover.",
		Example: "  drover backup copy db-friday --to offsite\n" +
			"  drover backup copy backup-0123456789abcdef --to default --name db-old",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(backups, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			b, err := f.newCopy(ctx, c, left[0])
			if err != nil {
				return err
			}
			if err := createBackup(ctx, c, b, f.name != ""); err != nil {
				return err
			}
			result := fmt.Sprintf("backup %q created: follow it with `drover backup show %s`", b.Name, b.Name)
			if f.wait {
				if b, err = awaitBackup(ctx, c, b, cmd.ErrOrStderr()); err != nil {
					return err
				}
				result = fmt.Sprintf("backup %q is a copy of %q in target %q: %s, %s uploaded, in %s", b.Name, left[0], f.to,
					api.SizeText(b.Status.VolumeSize), api.SizeText(b.Status.NewlyUploadDataSize), seconds(time.Since(began)))
			}
			return a.printObject(cmd.OutOrStdout(), b, func(w io.Writer) { fmt.Fprintln(w, result) })
		},
	}
	c.Flags().StringVar(&f.to, "to", "", "target of the copy")
	c.Flags().StringVar(&f.name, "name", "", "name of the copy (default: those of the backup and the target)")
	c.Flags().BoolVar(&f.wait, "wait", true, "wait until the copy is completed")
	return c
}

// newCopy returns the Backup that the flags describe, after checks that need no node.
func (f *copyFlags) newCopy(ctx context.Context, c client.Client, of string) (*api.Backup, error) {
	if f.to == "" {
		return nil, usagef("name the target of the copy with --to; `drover target list` shows all")
	}
	var origin api.Backup
	if err := getObject(ctx, c, "backup", of, &origin); err != nil {
		return nil, err
	}
	if origin.Target() == f.to {
		return nil, usagef("backup %q lies in target %q already", of, f.to)
	}
	if err := checkWritable(ctx, c, f.to); err != nil {
		return nil, err
	}
	name := f.name
	if name == "" {
		suffix := "-" + f.to
		name = strings.TrimRight(of[:min(len(of), 128-len("-10")-len(suffix))], "-.") + suffix
	}
	if err := checkName("backup", name); err != nil {
		return nil, err
	}
	b := &api.Backup{Spec: api.BackupSpec{BackupTargetName: f.to, Volume: origin.Spec.Volume, CopyOf: of}}
	b.Name = name
	return b, nil
}
