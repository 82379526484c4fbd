package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/progress"
	"drover.io/drover/driver/cli/restarts"
	"drover.io/drover/driver/cli/text"
)

func (a *app) backupCommand() *cobra.Command {
	c := groupCommand("backup", "The content of volumes and images in a store outside of the cluster", "backups", "bak")
	c.AddCommand(a.backupCreate(), a.backupCopy(), a.backupList(), a.backupShow(), a.backupRestore(), a.backupDelete(),
		a.backupVolumes(), a.backupImages(), a.backupVerify(), a.backupMount(), a.backupUnmount(), a.backupLocks(),
		a.backupKey())
	return c
}

// backupFlags are the flags of a new backup.
type backupFlags struct {
	name, snapshot, target string
	full, wait             bool
	labels                 map[string]string
}

func (a *app) backupCreate() *cobra.Command {
	var f backupFlags
	c := &cobra.Command{
		Use: "create VOLUME", Short: "Back a volume up, attached or not",
		Long: "Takes a snapshot of the volume and copies it to the target, from a node with a replica. After the first\n" +
			"backup, a backup copies the changes alone; --full reads and compares everything. A mounted file system is as\n" +
			"after a power cut: see `drover snapshot create`. The backup outlives the command, the volume and the cluster.",
		Example: "  drover backup create db\n  drover backup create db --snapshot before-upgrade --target offsite\n" +
			"  drover backup create db --name db-friday --label why=upgrade",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			b, err := f.newBackup(ctx, c, left[0], began)
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
				result = fmt.Sprintf("backup %q of volume %q completed: %s, %s uploaded, %s, in %s%s", b.Name, b.Spec.Volume,
					api.SizeText(b.Status.VolumeSize), api.SizeText(b.Status.NewlyUploadDataSize), describe.BackupMode(b),
					text.Seconds(time.Since(began)), text.Colon(b.Status.Message))
			}
			return a.printObject(cmd.OutOrStdout(), b, func(w io.Writer) { fmt.Fprintln(w, result) })
		},
	}
	c.Flags().StringVar(&f.name, "name", "", "name of the backup (default: volume and time)")
	c.Flags().StringVar(&f.snapshot, "snapshot", "", "snapshot of the volume to back up (default: a new one)")
	c.Flags().StringVar(&f.target, "target", "", "backup target (default: "+
		"the volume's parameter "+api.ParameterBackupTarget+", else "+api.DefaultBackupTarget+")")
	c.Flags().BoolVar(&f.full, "full", false, "read and compare everything, without trust in earlier backups")
	c.Flags().StringToStringVar(&f.labels, "label", nil, "labels to keep with it: a=b,c=d")
	c.Flags().BoolVar(&f.wait, "wait", true, "wait until the backup is completed")
	return c
}

// newBackup returns the Backup that the flags describe, after checks that need no node.
func (f *backupFlags) newBackup(ctx context.Context, c client.Client, volume string, now time.Time) (
	*api.Backup, error) {
	const most = 128 - len("-20060102-150405-10") // room for the time and a number in a name
	name := f.name
	if name == "" {
		name = strings.TrimRight(volume[:min(len(volume), most)], "-.") + "-" + now.UTC().Format("20060102-150405")
	}
	if err := checkName("backup", name); err != nil {
		return nil, err
	}
	var v api.Volume
	if err := getObject(ctx, c, "volume", volume, &v); err != nil {
		return nil, err
	}
	if f.snapshot == "" {
		if err := refuseUnusable(&v); err != nil {
			return nil, err
		}
	} else {
		var s api.Snapshot
		if err := getObject(ctx, c, "snapshot", f.snapshot, &s); err != nil {
			return nil, err
		}
		if s.Spec.Volume != volume {
			return nil, usagef("snapshot %q is one of volume %q, not of %q", s.Name, s.Spec.Volume, volume)
		}
	}
	target := cmp.Or(f.target, v.BackupTarget())
	if err := checkWritable(ctx, c, target); err != nil {
		return nil, err
	}
	b := &api.Backup{Spec: api.BackupSpec{BackupTargetName: target, Volume: volume, SnapshotName: f.snapshot,
		BackupMode: api.BackupIncremental, Labels: f.labels}}
	if f.full {
		b.Spec.BackupMode = api.BackupFull
	}
	b.Name = name
	return b, nil
}

// createBackup creates a backup. A name of the command itself gets a number if the name is taken. An interrupt may come
// after the API server created the backup.
func createBackup(ctx context.Context, c client.Client, b api.StoredBackup, named bool) error {
	name := b.GetName()
	err := c.Create(ctx, b)
	for n := 2; !named && apierrors.IsAlreadyExists(err); n++ {
		b.SetName(fmt.Sprintf("%s-%d", name, n))
		err = c.Create(ctx, b)
	}
	switch {
	case err == nil:
		return nil
	case apierrors.IsAlreadyExists(err):
		show, _ := backupCommands(b)
		return api.Errorf(api.Exists, "backup %q exists already: see `%s %s`", name, show, name)
	case ctx.Err() != nil:
		return explainBackupEnd(context.Cause(ctx), b, isCreated(ctx, c, b))
	}
	return explain(ctx, err)
}

// isCreated checks, after the end of ctx, whether a backup that has not ended has the name of b.
func isCreated(ctx context.Context, c client.Client, b api.StoredBackup) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	have := b.DeepCopyObject().(api.StoredBackup)
	return c.Get(ctx, client.ObjectKeyFromObject(b), have) == nil && !have.Ended() && have.Subject() == b.Subject()
}

// backupCommands are the commands that show and delete a backup.
func backupCommands(b api.StoredBackup) (show, end string) {
	if _, is := b.(*api.BackupBackingImage); is {
		return "drover backup images", "drover backup delete --image"
	}
	return "drover backup show", "drover backup delete"
}

// explainBackupEnd tells the user of a command that ends early whether the backup continues.
func explainBackupEnd(err error, b api.StoredBackup, continues bool) error {
	if !continues || !errors.Is(err, errTimeout) && !errors.Is(err, context.Canceled) {
		return err
	}
	show, end := backupCommands(b)
	return fmt.Errorf("%w: backup %[2]q continues%[3]s: follow it with `%[4]s %[2]s`, end it with `%[5]s %[2]s`", err,
		b.GetName(), text.Colon(b.Common().Message), show, end)
}

// awaitBackup follows a backup until it is completed or has an error. Each reason for waiting is a remark.
func awaitBackup[T api.StoredBackup](ctx context.Context, c client.WithWatch, b T, remarks io.Writer) (T, error) {
	name, uid := b.GetName(), b.GetUID()
	p := progress.New(remarks, "backup "+name)
	defer p.Clear()
	remark := remarkOn(p, "backup", name)
	gone := api.Errorf(api.NotFound, "backup %q was deleted meanwhile", name)
	last := b
	err := restarts.Through(ctx, p.Show, func() error {
		_, err := awaitObject(ctx, c, name, gone, func(now T) (bool, error) {
			if now.GetUID() != uid || now.GetDeletionTimestamp() != nil {
				return true, gone
			}
			last = now
			switch st := now.Common(); st.State {
			case api.BackupCompleted:
				return true, nil
			case api.BackupError:
				return true, api.Errorf(api.Other, "backup %q failed: %s", name, st.Message)
			case api.BackupInProgress:
				p.Show("in-progress", st.BytesDone, st.BytesTotal)
			default:
				p.Show("pending", 0, 0)
				remark(st.Message)
			}
			return false, nil
		})
		return err
	})
	return last, explainBackupEnd(err, last, true)
}

func (a *app) backupList() *cobra.Command {
	var volume, target string
	c := &cobra.Command{
		Use: "list", Short: "List the backups", Aliases: []string{"ls"}, Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			list, err := backupsOf(ctx, c, volume, target)
			if err != nil {
				return err
			}
			if err := remarkUnlisted(ctx, c, target, cmd.ErrOrStderr()); err != nil {
				return err
			}
			const columns = "NAME VOLUME TARGET STATE PROGRESS SIZE UPLOADED CREATED DAMAGED MESSAGE | CLUSTER"
			return a.printList(cmd.OutOrStdout(), list, columns,
				func(o runtime.Object) []string {
					b := o.(*api.Backup)
					return []string{b.Name, b.Spec.Volume, b.Target(), string(b.Status.State), fmt.Sprintf("%d%%", b.Status.Progress),
						text.SomeBytes(b.Status.VolumeSize), text.SomeBytes(b.Status.NewlyUploadDataSize), b.Status.SnapshotCreatedAt,
						describe.Damaged(b), b.Status.Message, b.Status.Cluster}
				})
		},
	}
	c.Flags().StringVar(&volume, "volume", "", "only backups of this volume")
	c.Flags().StringVar(&target, "target", "", "only backups in this target")
	return c
}

// backupsOf returns the backups of a volume and a target, each of which may be empty for all, by volume and instant.
func backupsOf(ctx context.Context, c client.Client, volume, target string) (*api.BackupList, error) {
	list := &api.BackupList{}
	if err := c.List(ctx, list); err != nil {
		return nil, explain(ctx, err)
	}
	list.Items = slices.DeleteFunc(list.Items, func(b api.Backup) bool {
		return volume != "" && b.Spec.Volume != volume || target != "" && b.Target() != target
	})
	slices.SortStableFunc(list.Items, func(a, b api.Backup) int {
		return cmp.Or(strings.Compare(a.Spec.Volume, b.Spec.Volume), backupInstant(&a).Compare(backupInstant(&b)))
	})
	return list, nil
}

// backupInstant is the instant of a backup's content, or the creation of the object while no snapshot is known.
func backupInstant(b *api.Backup) time.Time {
	if t := b.CutAt(); !t.IsZero() {
		return t
	}
	return b.CreationTimestamp.Time
}

func (a *app) backupShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show a backup",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(backups, true),
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
			return a.printObject(cmd.OutOrStdout(), &b, func(w io.Writer) {
				describe.Backup(w, &b)
				describe.Events(w, describe.EventsOf(ctx, c, &b, "Backup"))
			})
		},
	}
}

func (a *app) backupDelete() *cobra.Command {
	wait, image, force := true, false, false
	c := &cobra.Command{
		Use: "delete NAME...", Short: "Delete backups, also in the store", Aliases: []string{"rm"},
		Long: "Deletes backups, also in the store; a backup in progress ends. Other backups and the volume stay. The\n" +
			"space in the store comes back with the next sweep, half a minute later or after the backups in progress.\n" +
			"--image deletes backups of images, unless a backup of a volume with the image exists in the target.",
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(backups, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if force && !image {
				return usagef("--force is for --image")
			}
			for _, name := range left {
				if image {
					err = deleteImageBackup(ctx, c, name, force, wait, cmd.ErrOrStderr())
				} else {
					err = deleteBackup(ctx, c, &api.Backup{}, name, wait, cmd.ErrOrStderr())
				}
				if err != nil {
					return err
				}
				outcome := "deleted"
				if !wait {
					outcome = "is being deleted"
				}
				a.printOutcome(cmd, "backup", name, outcome)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&image, "image", false, "the names are those of backups of images")
	c.Flags().BoolVar(&force, "force", false, "with --image: also while backups of volumes with the image exist")
	c.Flags().BoolVar(&wait, "wait", true, "wait until the store has no backup of the name any more")
	return c
}

// deleteBackup deletes the backup of a name. A remark says why the deletion waits.
func deleteBackup[T api.StoredBackup](ctx context.Context, c client.WithWatch, b T, name string, wait bool,
	remarks io.Writer) error {
	if err := getObject(ctx, c, "backup", name, b); err != nil {
		return err
	}
	if err := refuseLonghorn(ctx, c, b); err != nil {
		return err
	}
	uid := b.GetUID()
	if err := c.Delete(ctx, b, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return explain(ctx, err)
	}
	if !wait {
		return nil
	}
	return awaitGone(ctx, c, remarks, "backup", b, func(now T) string {
		if st := now.Common(); st.State == api.BackupDeleting {
			return st.Message
		}
		return ""
	})
}

// refuseLonghorn refuses to delete a backup that would come back, because Drover deletes nothing in a store of
// Longhorn.
func refuseLonghorn(ctx context.Context, c client.Client, b api.StoredBackup) error {
	var t api.BackupTarget
	if err := c.Get(ctx, client.ObjectKey{Name: b.Target()}, &t); err != nil {
		return explain(ctx, client.IgnoreNotFound(err))
	}
	if t.Status.Format != api.FormatLonghorn || b.Common().SnapshotID == "" {
		return nil
	}
	return api.Errorf(api.InUse, "backup %q lies in a store of Longhorn, in which Drover deletes nothing: delete the "+
		"backup with Longhorn, or forget all backups of the store with `drover target delete --force %s`", b.GetName(),
		t.Name)
}
