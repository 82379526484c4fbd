package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

// setStandby lets a new volume follow backups: those of a volume in a target, or of a backup's volume.
func (f *volumeFlags) setStandby(ctx context.Context, cmd *cobra.Command, c client.Client, from, target string) (
	err error) {
	spec := &f.volume.Spec
	if strings.Contains(from, "://") && !api.IsBackupHandle(from) {
		if spec.FromBackup = api.BackupVolumeURL(from); spec.FromBackup == "" { // not repeated: the text may hold a password
			return api.Errorf(api.Invalid, "--from-backup: the text is no URL of a backup: see `drover backup show`")
		}
		spec.Size = api.MinVolumeSize // the volume grows with the backups
		f.applyShared(cmd, nil)
	} else {
		b, err := followedBackup(ctx, c, from, target)
		if err != nil {
			return err
		}
		spec.FromBackup, spec.Size = api.BackupVolumeURL(b.Status.URL), api.RoundSize(b.Status.VolumeSize)
		if err := f.applyRecord(ctx, cmd, c, b); err != nil {
			return err
		}
	}
	if f.size != "" {
		spec.Size, err = volumeSize(f.size)
	}
	return err
}

// followedBackup finds a backup of the volume to follow, by the name of the volume or of the backup.
func followedBackup(ctx context.Context, c client.Client, from, target string) (*api.Backup, error) {
	if target == "" {
		b, err := findBackup(ctx, c, from)
		if !api.Is(err, api.NotFound) {
			return b, err
		}
	}
	in := cmp.Or(target, api.DefaultBackupTarget)
	var v api.BackupVolume
	err := c.Get(ctx, client.ObjectKey{Name: api.BackupVolumeName(from, in)}, &v)
	if apierrors.IsNotFound(err) || err == nil && v.Status.LastBackupName == "" {
		return nil, api.Errorf(api.NotFound, "target %q has no backup of volume %q: `drover backup volumes` shows all, and "+
			"`drover target sync %s` searches the store", in, from, in)
	}
	if err != nil {
		return nil, explain(ctx, err)
	}
	return findBackup(ctx, c, v.Status.LastBackupName)
}

func (a *app) volumeActivate() *cobra.Command {
	var now bool
	c := &cobra.Command{
		Use: "activate NAME", Short: "Make a standby volume an ordinary volume",
		Long: "Makes a standby volume an ordinary volume with the content of the newest backup in the store. The volume\n" +
			"can be used at once, while the rest of this backup still arrives. If the store does not answer within a minute,\n" +
			"the volume begins with the newest backup that it holds whole. --now takes this one without asking the store. A\n" +
			"volume never becomes a standby volume again.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			var v api.Volume
			if err := getObject(ctx, c, "volume", left[0], &v); err != nil {
				return err
			}
			if !v.FollowsBackups() {
				return api.Errorf(api.Invalid, "volume %q is no standby volume: see `drover volume show %s`", v.Name, v.Name)
			}
			if !v.Status.IsStandby {
				seen, err := awaitVolume(ctx, c, v.Name, cmd.ErrOrStderr(), func(v *api.Volume) bool {
					return v.Status.IsStandby
				})
				if err != nil {
					return err
				}
				v = *seen
			}
			old := v.DeepCopy()
			v.Spec.Standby = false
			if now {
				if v.Annotations == nil {
					v.Annotations = map[string]string{}
				}
				v.Annotations[api.AnnotationActivateNow] = "true"
			}
			if err := c.Patch(ctx, &v, client.MergeFrom(old)); err != nil {
				return explain(ctx, err)
			}
			vol, err := awaitVolume(ctx, c, v.Name, cmd.ErrOrStderr(), func(v *api.Volume) bool {
				return !v.Status.IsStandby && v.Status.State != api.VolumeCreating && v.Status.State != api.VolumeStandby
			})
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), vol, func(w io.Writer) {
				fmt.Fprintf(w, "volume %q activated: %s, in %s\n", vol.Name, vol.Status.Standby.Message,
					text.Seconds(time.Since(began)))
			})
		},
	}
	c.Flags().BoolVar(&now, "now", false, "take the newest backup that the volume holds whole, without asking the store")
	return c
}
