package cli

import (
	"context"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

func (a *app) imageRestore() *cobra.Command {
	var f imageFlags
	var damaged, defaults bool
	c := &cobra.Command{
		Use:   "restore BACKUP",
		Short: "Make a backing image of a backup",
		Long: "Makes a backing image with the content of a backup of a volume or of an image. Volumes of this image begin\n" +
			"with the content of the backup: `drover volume create NAME --image IMAGE` takes no time, for any number of\n" +
			"volumes. The image of an image's backup has the name, the checksum, the labels, the number of copies and the\n" +
			"selectors of the original; each flag replaces one of them, and --defaults labels, copies and selectors.\n" +
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
			b, err := getStoredBackup(ctx, c, left[0])
			if err != nil {
				return err
			}
			if b.Common().State != api.BackupCompleted {
				return api.Errorf(api.Unavailable, "backup %q is not completed: it is %s", b.GetName(), b.Common().State)
			}
			name := b.GetName()
			if i, is := b.(*api.BackupBackingImage); is {
				name = i.Spec.BackingImageName
			}
			params := map[string]string{api.RestoreBackupURL: b.Common().URL}
			if damaged {
				params[api.RestoreAllowDamaged] = "true"
			}
			img, err := f.newImage(name, api.SourceRestore, params)
			if err != nil {
				return err
			}
			if i, is := b.(*api.BackupBackingImage); is && !defaults {
				f.applyRecord(cmd, img, i.Status.RecordedImage)
			}
			return a.makeImage(ctx, cmd, c, img, nil, f.background)
		},
	}
	f.addSharedFlags(c)
	c.Flags().StringVar(&f.name, "name", "", "name of the image (default: the backup's, or its image's)")
	c.Flags().BoolVar(&damaged, "allow-damaged", false, "restore zeros in place of chunks that the store damaged or lost")
	c.Flags().BoolVar(&defaults, "defaults", false, "take over neither labels nor parameters of the image of the backup")
	c.Flags().BoolVar(&f.background, "background", false, "return at once; follow with drover image show")
	return c
}

// applyRecord gives an image what the backup tells of the original, but for the flags that the user gave.
func (f *imageFlags) applyRecord(c *cobra.Command, img *api.BackingImage, record *api.RecordedImage) {
	given, spec := img.Spec, &img.Spec
	record.ApplyTo(img)
	for flag, set := range map[string]func(){
		"min-copies":    func() { spec.MinNumberOfCopies = given.MinNumberOfCopies },
		"node-selector": func() { spec.NodeSelector = given.NodeSelector },
		"disk-selector": func() { spec.DiskSelector = given.DiskSelector },
	} {
		if c.Flags().Changed(flag) {
			set()
		}
	}
}

// getStoredBackup reads the backup of a name: of a volume, or else of an image.
func getStoredBackup(ctx context.Context, c client.Client, name string) (api.StoredBackup, error) {
	var b api.Backup
	err := getObject(ctx, c, "backup", name, &b)
	if api.KindOf(err) != api.NotFound {
		return &b, err
	}
	var i api.BackupBackingImage
	if getObject(ctx, c, "backup", name, &i) == nil {
		return &i, nil
	}
	return nil, err
}
