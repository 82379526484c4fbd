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
	"drover.io/drover/driver/cli/text"
)

// copyFlags are the flags of a copy.
type copyFlags struct {
	name, to string
	wait     bool
}

func (a *app) backupCopy() *cobra.Command {
	var f copyFlags
	c := &cobra.Command{
		Use: "copy BACKUP --to TARGET", Short: "Copy a backup of a volume or an image to another target",
		Long: "Copies a backup from its target to another one, without reading a volume or image. Chunks that the other\n" +
			"target has already are not sent. The copy is a backup of its own, and outlives the original. The backup of a\n" +
			"volume's image is copied, too, once for each content. Backups of Longhorn become backups of Drover.",
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
			o, err := f.newCopy(ctx, c, left[0])
			if err != nil {
				return err
			}
			switch b := o.(type) {
			case *api.BackupBackingImage:
				return makeCopy(ctx, a, cmd, c, b, &f, began)
			case *api.Backup:
				return makeCopy(ctx, a, cmd, c, b, &f, began)
			}
			return nil
		},
	}
	c.Flags().StringVar(&f.to, "to", "", "target of the copy")
	c.Flags().StringVar(&f.name, "name", "", "name of the copy (default: those of the backup and the target)")
	c.Flags().BoolVar(&f.wait, "wait", true, "wait until the copy is completed")
	return c
}

// makeCopy creates a copy, and waits for its end.
func makeCopy[T api.StoredBackup](ctx context.Context, a *app, cmd *cobra.Command, c client.WithWatch, b T,
	f *copyFlags, began time.Time) error {
	image, isImage := any(b).(*api.BackupBackingImage) // a backup of the default name is of the same content
	if err := createBackup(ctx, c, b, f.name != "" || isImage); err != nil {
		return err
	}
	if isImage {
		if err := remarkOtherContent(ctx, c, image, cmd.ErrOrStderr()); err != nil {
			return err
		}
	}
	name := b.GetName()
	show, _ := backupCommands(b)
	result := fmt.Sprintf("backup %q created: follow it with `%s %s`", name, show, name)
	if f.wait {
		now, err := awaitBackup(ctx, c, b, cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		b = now
		result = fmt.Sprintf("backup %q is a copy of %q in target %q: %s, %s uploaded, in %s", name, b.Origin(), f.to,
			b.Common().SizeText, b.Common().UploadedText, text.Seconds(time.Since(began)))
	}
	return a.printObject(cmd.OutOrStdout(), b, func(w io.Writer) { fmt.Fprintln(w, result) })
}

// newCopy returns the copy that the flags describe, after checks that need no node.
func (f *copyFlags) newCopy(ctx context.Context, c client.Client, of string) (api.StoredBackup, error) {
	if f.to == "" {
		return nil, usagef("name the target of the copy with --to; `drover target list` shows all")
	}
	origin, err := getStoredBackup(ctx, c, of)
	if err != nil {
		return nil, err
	}
	if origin.Target() == f.to {
		return nil, usagef("backup %q lies in target %q already", of, f.to)
	}
	if err := checkWritable(ctx, c, f.to); err != nil {
		return nil, err
	}
	name := f.name
	if i, is := origin.(*api.BackupBackingImage); is && name == "" && i.ContentDigest() != "" {
		name = api.ImageBackupName(i.Spec.BackingImageName, i.ContentDigest(), f.to)
	} else if name == "" {
		suffix := "-" + f.to
		name = strings.TrimRight(of[:min(len(of), 128-len("-10")-len(suffix))], "-.") + suffix
	}
	if err := checkName("backup", name); err != nil {
		return nil, err
	}
	if i, is := origin.(*api.BackupBackingImage); is {
		b := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackupTargetName: f.to, CopyOf: of, UserCreated: true,
			BackingImageName: i.Spec.BackingImageName, Digest: i.ContentDigest()}}
		b.Name = name
		return b, nil
	}
	b := &api.Backup{Spec: api.BackupSpec{BackupTargetName: f.to, Volume: origin.(*api.Backup).Spec.Volume, CopyOf: of}}
	b.Name = name
	return b, nil
}
