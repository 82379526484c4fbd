package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/filesystem"
	"drover.io/drover/driver/cli/machine"
	"drover.io/drover/driver/cli/text"
)

func (a *app) backupMount() *cobra.Command {
	m := &backupMounting{}
	image := false
	c := &cobra.Command{
		Use: "mount BACKUP [DIR]", Short: "Show the files of a backup in a folder of this machine, at once",
		Long: "Mounts the filesystem of a backup read-only at a folder of this machine, whatever the size of the backup:\n" +
			"Drover fetches the chunks that are read, and nothing else. For this purpose Drover makes a volume of the\n" +
			"backup, which `drover backup unmount` deletes. The filesystem is as after a power cut, and recovers in this\n" +
			"volume; the backup stays as it is. A disk with partitions needs --partition.",
		Example: "  drover backup mount db-friday /mnt/friday\n  drover backup mount vm-friday /mnt/friday --partition 1\n" +
			"  drover backup mount raw-friday --device-only\n  drover backup unmount /mnt/friday",
		Args: checkArgs(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: func(cmd *cobra.Command, got []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(got) == 1 {
				return nil, cobra.ShellCompDirectiveFilterDirs
			}
			return a.completeNames(backups, true)(cmd, got, prefix)
		},
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			m.c, m.remarks = c, cmd.ErrOrStderr()
			if len(left) == 2 {
				m.dir = left[1]
			}
			if err := m.check(ctx); err != nil {
				return err
			}
			if image {
				err = m.findImage(ctx, left[0])
			} else {
				err = m.findVolume(ctx, left[0])
			}
			if err != nil {
				return err
			}
			if err := m.mount(ctx); err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), m.att, func(w io.Writer) {
				if m.deviceOnly {
					fmt.Fprintf(w, "backup %q is the read-only device %s, in %s\n", left[0], m.att.Status.Device,
						text.Seconds(time.Since(began)))
					return
				}
				fmt.Fprintf(w, "backup %q mounted read-only at %s: %s, in %s\n", left[0], m.dir, m.fs,
					text.Seconds(time.Since(began)))
			})
		},
	}
	c.Flags().IntVar(&m.partition, "partition", 0, "mount the filesystem of this partition, from 1 on")
	c.Flags().BoolVar(&m.deviceOnly, "device-only", false, "attach a read-only block device, and mount nothing")
	c.Flags().BoolVar(&image, "image", false, "the name is that of a backup of an image")
	return c
}

// backupMounting is a `backup mount` in progress.
type backupMounting struct {
	c          client.WithWatch
	remarks    io.Writer
	dir        string
	partition  int
	deviceOnly bool

	node   string
	volume api.Volume
	att    *api.Attachment
	fs     string
}

// check refuses flags, folders and users before the command looks for a backup.
func (m *backupMounting) check(ctx context.Context) (err error) {
	switch {
	case m.deviceOnly && (m.dir != "" || m.partition != 0):
		return usagef("--device-only mounts nothing: leave the folder and --partition out")
	case !m.deviceOnly && m.dir == "":
		return usagef("name the folder to mount at, or --device-only")
	case m.partition < 0:
		return usagef("--partition %d: the first partition is 1", m.partition)
	}
	if m.node, err = machine.Node(ctx, m.c); err != nil || m.deviceOnly {
		return explain(ctx, err)
	}
	if os.Geteuid() != 0 {
		return api.Errorf(api.Denied, "mounting needs root: run this with sudo")
	}
	if m.dir, err = filepath.Abs(m.dir); err != nil {
		return err
	}
	if err := filesystem.CheckDir(m.dir); err != nil {
		return err
	}
	list, err := backupMountsOf(ctx, m.c)
	if err != nil {
		return err
	}
	for i := range list {
		if isMountedAt(&list[i], m.node, m.dir) {
			return api.Errorf(api.InUse, "%s was the folder of a mount that ended early: run `drover backup unmount %[1]s` "+
				"first", m.dir)
		}
	}
	return nil
}

// findVolume finds the backup of a volume.
func (m *backupMounting) findVolume(ctx context.Context, name string) error {
	b, err := findBackup(ctx, m.c, name)
	if err != nil {
		return err
	}
	if err := restoreInto(&m.volume.Spec, b, ""); err != nil {
		return err
	}
	return m.describe(ctx, b)
}

// findImage finds the backup of an image.
func (m *backupMounting) findImage(ctx context.Context, name string) error {
	b := &api.BackupBackingImage{}
	if err := getObject(ctx, m.c, "backup", name, b); err != nil {
		return err
	}
	if b.Status.State != api.BackupCompleted || b.DeletionTimestamp != nil {
		return api.Errorf(api.Unavailable, "backup %q is not completed: see `drover backup images %s`", name, name)
	}
	m.volume.Spec.FromBackup, m.volume.Spec.Size = b.Status.URL, api.RoundSize(b.Status.Size)
	return m.describe(ctx, b)
}

// describe describes the volume of the mount. Its labels and annotations are all that an unmount needs, so a mount that
// is killed at any moment can be cleaned up.
func (m *backupMounting) describe(ctx context.Context, b api.StoredBackup) error {
	var t api.BackupTarget
	if err := getTarget(ctx, m.c, b.Target(), &t); err != nil {
		return err
	}
	if d := b.Common().Digests; t.Status.Format == api.FormatLonghorn && (d == nil || d.Percent < 100) {
		return api.Errorf(api.Unsupported, "backup %q lies in a store of Longhorn, and no node knows all digests of its "+
			"chunks yet: run `drover backup verify %s`, or restore the backup with `drover backup restore`", b.GetName(),
			b.GetName())
	}
	v := &m.volume
	v.GenerateName = "mount-" + strings.TrimRight(fmt.Sprintf("%.100s", b.GetName()), "-.") + "-"
	v.Labels = map[string]string{api.LabelBackupMount: api.LabelValue(b.GetName())}
	v.Annotations = map[string]string{api.AnnotationPrefer: m.node}
	if m.dir != "" {
		v.Annotations[api.AnnotationMountedAt] = m.dir
	}
	v.Spec.NumberOfReplicas, v.Spec.DataLocality = 1, api.LocalityBestEffort
	return nil
}

// mount makes the volume, attaches it and mounts the device. After an error nothing is left.
func (m *backupMounting) mount(ctx context.Context) (err error) {
	if err := m.c.Create(ctx, &m.volume); err != nil {
		return explain(ctx, err)
	}
	defer func() {
		if err == nil {
			return
		}
		ctx, cancel := cleanup(ctx)
		defer cancel()
		if rerr := removeBackupMount(ctx, m.c, &m.volume, m.remarks); rerr != nil {
			err = fmt.Errorf("%w; volume %q is left, remove it with `drover backup unmount`: %w", err, m.volume.Name, rerr)
		}
	}()
	_, err = awaitVolume(ctx, m.c, m.volume.Name, m.remarks, func(v *api.Volume) bool {
		return v.Status.State != "" && v.Status.State != api.VolumeCreating
	})
	if err != nil {
		return err
	}
	// Filesystems recover from the power cut only on a writable device, and show damaged folders without recovery.
	if m.att, err = attachVolume(ctx, m.c, m.volume.Name, m.node, m.deviceOnly, m.remarks); err != nil || m.deviceOnly {
		return err
	}
	if m.fs, err = filesystem.MountReadOnly(ctx, m.att.Status.Device, m.partition, m.dir); api.Is(err, api.Unsupported) {
		err = api.Errorf(api.Unsupported, "backup %q: %w; or use the device itself with --device-only, or restore the "+
			"backup with `drover backup restore`", api.BackupOfURL(m.volume.Spec.FromBackup), err)
	}
	return err
}

func (a *app) backupUnmount() *cobra.Command {
	return &cobra.Command{
		Use: "unmount DIR|BACKUP...", Short: "End the mounts of a backup on this machine", Aliases: []string{"umount"},
		Long: "Unmounts a folder of `drover backup mount`, or all mounts of a backup on this machine, and deletes the\n" +
			"volume of each mount; also after an interrupted mount, and after a restart of the machine.",
		Example: "  drover backup unmount /mnt/friday\n  drover backup unmount db-friday",
		Args:    checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(backups, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			node, err := machine.Node(ctx, c)
			if err != nil {
				return explain(ctx, err)
			}
			for _, name := range left {
				found, err := findBackupMounts(ctx, c, node, name)
				if err != nil {
					return err
				}
				for i := range found {
					if err := removeBackupMount(ctx, c, &found[i], cmd.ErrOrStderr()); err != nil {
						return err
					}
				}
				a.printOutcome(cmd, "backup", name, "unmounted")
			}
			return nil
		},
	}
}

// backupMountsOf returns the volumes of all mounts of backups.
func backupMountsOf(ctx context.Context, c client.Client) ([]api.Volume, error) {
	var list api.VolumeList
	if err := c.List(ctx, &list, client.HasLabels{api.LabelBackupMount}); err != nil {
		return nil, explain(ctx, err)
	}
	return list.Items, nil
}

func isMountedAt(v *api.Volume, node, dir string) bool {
	return v.Annotations[api.AnnotationPrefer] == node && v.Annotations[api.AnnotationMountedAt] == dir
}

// findBackupMounts finds the volumes of the mounts at a folder, or of a backup, on a node.
func findBackupMounts(ctx context.Context, c client.Client, node, text string) ([]api.Volume, error) {
	dir, err := filepath.Abs(text)
	if err != nil {
		return nil, err
	}
	list, err := backupMountsOf(ctx, c)
	if err != nil {
		return nil, err
	}
	var found []api.Volume
	elsewhere := ""
	for i := range list {
		v := &list[i]
		// A longer name may share the label's value with others.
		of := v.Labels[api.LabelBackupMount] == api.LabelValue(text) && len(text) == len(api.LabelValue(text))
		switch on := v.Annotations[api.AnnotationPrefer]; {
		case isMountedAt(v, node, dir), of && on == node:
			found = append(found, *v)
		case of:
			elsewhere = on
		}
	}
	switch {
	case len(found) > 0:
		return found, nil
	case elsewhere != "":
		return nil, api.Errorf(api.InUse, "backup %q is mounted on node %q: unmount it there", text, elsewhere)
	}
	return nil, api.Errorf(api.NotFound, "%s is neither the folder nor the backup of a mount on this machine", text)
}

// removeBackupMount undoes a mount, however far the mount came. The detach waits for no read, because the store of the
// backup may be away for good.
func removeBackupMount(ctx context.Context, c client.WithWatch, v *api.Volume, remarks io.Writer) error {
	att, err := getAttachment(ctx, c, v.Name)
	if err != nil {
		return err
	}
	if err := getObject(ctx, c, "volume", v.Name, v); api.Is(err, api.NotFound) {
		return nil
	} else if err != nil {
		return err
	}
	device := ""
	if att != nil {
		device = att.Status.Device
	}
	if err := filesystem.UnmountVolume(ctx, v.Status.UID, device); err != nil {
		return err
	}
	if _, err := detachVolume(ctx, c, v.Name, true, remarks); err != nil && !api.Is(err, api.NotFound) {
		return err
	}
	if err := c.Delete(ctx, v, client.Preconditions{UID: &v.UID}); client.IgnoreNotFound(err) != nil {
		return explain(ctx, err)
	}
	return awaitGone(ctx, c, remarks, "volume", v, undeletedReason)
}
