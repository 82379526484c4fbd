package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

func (a *app) backupRestore() *cobra.Command {
	var f volumeFlags
	c := &cobra.Command{
		Use: "restore BACKUP", Short: "Make a volume with the content of a backup",
		Long: "Makes a volume with the content of a backup, which may be one of another cluster. The volume of the backup\n" +
			"stays as it is; while it exists, the new volume needs another name. The new volume needs the backup until\n" +
			"`drover volume show` says that the restore is completed.\n" +
			"With --allow-damaged the volume can be used when the whole backup has been restored.\n" +
			"Labels, number of replicas, selectors and the like are those of the volume when the backup was made\n" +
			"(`drover backup show`); each flag replaces one of them, and --defaults all.",
		Example: "  drover backup restore db-friday --name db-again\n" +
			"  drover backup restore db-friday --name db-two --replicas 2\n" +
			"  drover backup restore db-friday --name db-large --size 200Gi",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(backups, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			b, err := findBackup(ctx, c, left[0])
			if err != nil {
				return err
			}
			v := &f.volume
			named := v.Name != ""
			v.Name = cmp.Or(v.Name, b.Spec.Volume)
			if err := checkName("volume", v.Name); err != nil {
				return err
			}
			if !named {
				if err := refuseExisting(ctx, c, b); err != nil {
					return err
				}
			}
			if err := f.restoreFrom(ctx, cmd, c, b); err != nil {
				return err
			}
			return a.makeVolume(ctx, cmd, c, &f, began)
		},
	}
	c.Flags().StringVar(&f.volume.Name, "name", "", "name of the volume (default: that of the backup's volume)")
	c.Flags().StringVar(&f.size, "size", "", "size: 10Gi, 500Mi (default: the backup's)")
	c.Flags().BoolVar(&f.volume.Spec.AllowDamaged, "allow-damaged", false,
		"restore zeros in place of chunks that the store damaged or lost")
	f.addShared(c)
	f.addRestore(c)
	return c
}

// refuseExisting refuses a restore under the name of the backup's volume while this volume exists.
func refuseExisting(ctx context.Context, c client.Client, b *api.Backup) error {
	err := c.Get(ctx, client.ObjectKey{Name: b.Spec.Volume}, &api.Volume{})
	if err == nil {
		return api.Errorf(api.Exists, "volume %q of backup %q exists: give the new volume another name with --name",
			b.Spec.Volume, b.Name)
	}
	return explain(ctx, client.IgnoreNotFound(err))
}

// addRestore adds the flag for volumes with the content of a backup.
func (f *volumeFlags) addRestore(c *cobra.Command) {
	c.Flags().BoolVar(&f.defaults, "defaults", false,
		"take over neither labels nor parameters of the volume that the backup is of")
}

// findBackup finds a backup by name, handle or URL.
func findBackup(ctx context.Context, c client.Client, text string) (*api.Backup, error) {
	name := text
	volume, of, isHandle := api.ParseBackupHandle(text)
	if isHandle {
		name = of
	}
	if api.BackupOfURL(text) == "" {
		b := &api.Backup{}
		err := getObject(ctx, c, "backup", name, b)
		if err == nil && isHandle && b.Spec.Volume != volume {
			err = api.Errorf(api.NotFound, "backup %q is one of volume %q, not of %q", name, b.Spec.Volume, volume)
		}
		return b, err
	}
	var list api.BackupList
	if err := c.List(ctx, &list); err != nil {
		return nil, explain(ctx, err)
	}
	i := slices.IndexFunc(list.Items, func(b api.Backup) bool { return api.SameBackup(b.Status.URL, text) })
	if i < 0 { // not repeated: the text may hold a password
		return nil, api.Errorf(api.NotFound, "no backup has this URL: make a target for its store with `drover target "+
			"create`, and compare with `drover backup show`")
	}
	return &list.Items[i], nil
}

// setBackup makes the content of a backup the source of a new volume.
func (f *volumeFlags) setBackup(ctx context.Context, cmd *cobra.Command, c client.Client, backup string) error {
	b, err := findBackup(ctx, c, backup)
	if err != nil {
		return err
	}
	return f.restoreFrom(ctx, cmd, c, b)
}

// restoreFrom makes the volume one with the content, the labels and the parameters of a backup.
func (f *volumeFlags) restoreFrom(ctx context.Context, cmd *cobra.Command, c client.Client, b *api.Backup) error {
	if err := f.applyRecord(ctx, cmd, c, b); err != nil {
		return err
	}
	return restoreInto(&f.volume.Spec, b, f.size)
}

// applyRecord is applyShared with what a backup tells of its volume. Targets of backups have names of their own in each
// cluster: the parameter for a target that does not exist here does not come along, and a remark says so.
func (f *volumeFlags) applyRecord(ctx context.Context, cmd *cobra.Command, c client.Client, b *api.Backup) error {
	record := b.Status.RecordedVolume.DeepCopy()
	if record != nil && record.BackupTargetName != "" && !f.defaults {
		err := c.Get(ctx, client.ObjectKey{Name: record.BackupTargetName}, &api.BackupTarget{})
		if client.IgnoreNotFound(err) != nil {
			return explain(ctx, err)
		}
		if err != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "target %q of the backups of volume %q does not exist here: backups of the new "+
				"volume go to target %q\n", record.BackupTargetName, b.Spec.Volume, api.DefaultBackupTarget)
			record.BackupTargetName = ""
		}
	}
	f.applyShared(cmd, record)
	return nil
}

func restoreInto(spec *api.VolumeSpec, b *api.Backup, size string) (err error) {
	if err := api.RestorableBackup(b); err != nil {
		return api.Errorf(api.KindOf(err), "%w: see `drover backup show %s`", err, b.Name)
	}
	least := api.RoundSize(b.Status.VolumeSize)
	spec.FromBackup, spec.Size = b.Status.URL, least
	if size != "" {
		if spec.Size, err = volumeSize(size); err != nil {
			return err
		}
	}
	if spec.Size < least {
		return api.Errorf(api.OutOfRange, "%s is less than the %s of backup %q: ask for at least that, or leave --size out",
			api.SizeText(spec.Size), api.SizeText(least), b.Name)
	}
	return nil
}
