package cli

import (
	"github.com/spf13/cobra"

	"drover.io/drover/api"
)

func (a *app) imageRestore() *cobra.Command {
	var f imageFlags
	var damaged bool
	c := &cobra.Command{
		Use:   "restore BACKUP",
		Short: "Make a backing image of a backup",
		Long: "Makes a backing image with the content of a volume's backup. Volumes of this image begin with the\n" +
			"content of the backup: `drover volume create NAME --image IMAGE` takes no time, for any number of volumes.\n" +
			"The command returns as soon as volumes can read the image, while a node still fetches the content. With\n" +
			"--checksum or --allow-damaged volumes can read the image when it is ready.",
		Example: "  drover image restore db-friday\n  drover image restore db-friday --name db-before-upgrade --min-copies 2",
		Args:    checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(backups, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var b api.Backup
			if err := getObject(ctx, c, "backup", left[0], &b); err != nil {
				return err
			}
			if b.Status.State != api.BackupCompleted {
				return api.Errorf(api.Unavailable, "backup %q is not completed: see `drover backup show %s`", b.Name, b.Name)
			}
			params := map[string]string{api.RestoreBackupURL: b.Status.URL}
			if damaged {
				params[api.RestoreAllowDamaged] = "true"
			}
			img, err := f.newImage(b.Name, api.SourceRestore, params)
			if err != nil {
				return err
			}
			return a.makeImage(ctx, cmd, c, img, nil, f.background)
		},
	}
	f.addSharedFlags(c)
	c.Flags().StringVar(&f.name, "name", "", "name of the image (default: the backup's)")
	c.Flags().BoolVar(&damaged, "allow-damaged", false, "restore zeros in place of chunks that the store damaged or lost")
	c.Flags().BoolVar(&f.background, "background", false, "return at once; follow with drover image show")
	return c
}
