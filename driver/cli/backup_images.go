package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/text"
)

func (a *app) imageBackup() *cobra.Command {
	var name, target string
	var labels map[string]string
	wait := true
	c := &cobra.Command{
		Use: "backup IMAGE", Short: "Back an image up",
		Long: "Copies the content of an image to the target, from a node with a copy. The backup of a volume takes the\n" +
			"image of the volume along, so this command is for images without a volume. The backup outlives the image.",
		Example: "  drover image backup golden\n  drover image backup golden --target offsite",
		Args:    checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(images, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			b, err := newImageBackup(ctx, c, left[0], target, name)
			if err != nil {
				return err
			}
			b.Spec.Labels = labels
			if err := createBackup(ctx, c, b, true); err != nil {
				return err
			}
			if err := remarkOtherContent(ctx, c, b, cmd.ErrOrStderr()); err != nil {
				return err
			}
			result := fmt.Sprintf("backup %q created: follow it with `drover backup images %s`", b.Name, b.Name)
			if wait {
				if b, err = awaitBackup(ctx, c, b, cmd.ErrOrStderr()); err != nil {
					return err
				}
				result = fmt.Sprintf("backup %q of image %q completed: %s, %s uploaded, in %s", b.Name, left[0],
					b.Status.SizeText, b.Status.UploadedText, text.Seconds(time.Since(began)))
			}
			return a.printObject(cmd.OutOrStdout(), b, func(w io.Writer) { fmt.Fprintln(w, result) })
		},
	}
	c.Flags().StringVar(&name, "name", "", "name of the backup (default: image, digest and target)")
	c.Flags().StringVar(&target, "target", api.DefaultBackupTarget, "backup target")
	c.Flags().StringToStringVar(&labels, "label", nil, "labels to keep with it: a=b,c=d")
	c.Flags().BoolVar(&wait, "wait", true, "wait until the backup is completed")
	return c
}

// newImageBackup returns the backup of an image as it is now, after checks that need no node.
func newImageBackup(ctx context.Context, c client.Client, image, target, name string) (*api.BackupBackingImage, error) {
	var img api.BackingImage
	if err := getObject(ctx, c, "image", image, &img); err != nil {
		return nil, err
	}
	digest := img.ContentDigest()
	if digest == "" {
		return nil, api.Errorf(api.Unavailable, "image %q is not ready: see `drover image show %s`", image, image)
	}
	if err := checkWritable(ctx, c, target); err != nil {
		return nil, err
	}
	b := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackupTargetName: target, BackingImageName: image,
		UserCreated: true, Digest: digest}}
	b.Name = cmp.Or(name, api.ImageBackupName(image, digest, target))
	return b, checkName("backup", b.Name)
}

// remarkOtherContent says that the target has a backup of an image of the same name with other content.
func remarkOtherContent(ctx context.Context, c client.Client, b *api.BackupBackingImage, remarks io.Writer) error {
	list, err := imageBackupsOf(ctx, c, b.Target())
	if err != nil {
		return err
	}
	if other := b.OtherContent(list.Items, b.Spec.Digest); other != "" {
		fmt.Fprintln(remarks, text.Line(other))
	}
	return nil
}

func (a *app) backupImages() *cobra.Command {
	target := ""
	c := &cobra.Command{
		Use: "images [NAME]", Short: "List the backups of images, or show one", Args: checkArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if len(left) == 1 {
				var b api.BackupBackingImage
				if err := getObject(ctx, c, "backup", left[0], &b); err != nil {
					return err
				}
				return a.printObject(cmd.OutOrStdout(), &b, func(w io.Writer) {
					describe.ImageBackup(w, &b)
					describe.Events(w, describe.EventsOf(ctx, c, &b, "BackupBackingImage"))
				})
			}
			list, err := imageBackupsOf(ctx, c, target)
			if err != nil {
				return err
			}
			const columns = "NAME IMAGE TARGET SIZE STATE CREATED CHECKSUM DAMAGED MESSAGE | CLUSTER"
			return a.printList(cmd.OutOrStdout(), list, columns,
				func(o runtime.Object) []string {
					b := o.(*api.BackupBackingImage)
					s := &b.Status
					return []string{b.Name, b.Spec.BackingImageName, b.Target(), text.SomeBytes(s.Size), string(s.State),
						s.BackupCreatedAt, fmt.Sprintf("%.16s", s.Checksum), describe.Damaged(b), s.Message, s.Cluster}
				})
		},
	}
	c.Flags().StringVar(&target, "target", "", "only backups in this target")
	return c
}

// imageBackupsOf returns the backups of images in a target; empty: in all.
func imageBackupsOf(ctx context.Context, c client.Client, target string) (*api.BackupBackingImageList, error) {
	list := &api.BackupBackingImageList{}
	if err := c.List(ctx, list); err != nil {
		return nil, explain(ctx, err)
	}
	list.Items = slices.DeleteFunc(list.Items, func(b api.BackupBackingImage) bool {
		return target != "" && b.Target() != target
	})
	slices.SortStableFunc(list.Items, func(a, b api.BackupBackingImage) int {
		return cmp.Or(strings.Compare(a.Spec.BackingImageName, b.Spec.BackingImageName),
			strings.Compare(a.Status.BackupCreatedAt, b.Status.BackupCreatedAt))
	})
	return list, nil
}

// deleteImageBackup deletes an image's backup, unless a restore of a volume would miss it.
func deleteImageBackup(ctx context.Context, c client.WithWatch, name string, force, wait bool,
	remarks io.Writer) error {
	b := &api.BackupBackingImage{}
	if err := getObject(ctx, c, "backup", name, b); err != nil {
		return err
	}
	if force {
		if _, err := await.Edit(ctx, c, name, func(b *api.BackupBackingImage) (bool, error) {
			if b.Annotations == nil {
				b.Annotations = map[string]string{}
			}
			b.Annotations[api.AnnotationForceDelete] = "true"
			return true, nil
		}); client.IgnoreNotFound(err) != nil {
			return explain(ctx, err)
		}
	} else if b.DeletionTimestamp == nil && b.Status.State == api.BackupCompleted {
		if err := refuseNeeded(ctx, c, b); err != nil {
			return err
		}
	}
	return deleteBackup(ctx, c, b, name, wait, remarks)
}

// refuseNeeded refuses the deletion of the only backup of an image while backups of volumes with the image exist, or
// may exist without an object.
func refuseNeeded(ctx context.Context, c client.Client, b *api.BackupBackingImage) error {
	others, err := imageBackupsOf(ctx, c, b.Target())
	if err != nil {
		return err
	}
	for i := range others.Items {
		o := &others.Items[i]
		if o.UID != b.UID && o.IsOf(b.Target(), b.Spec.BackingImageName, b.ContentDigest()) &&
			o.Status.State == api.BackupCompleted && o.DeletionTimestamp == nil {
			return nil
		}
	}
	list, err := backupsOf(ctx, c, "", b.Target())
	if err != nil {
		return err
	}
	var users []string
	for i := range list.Items {
		if v := &list.Items[i]; v.DeletionTimestamp == nil && v.NeedsImageBackup(b) {
			users = append(users, v.Name)
		}
	}
	if len(users) > 0 {
		return api.Errorf(api.InUse, "backup %q: restores of %s bring its image back: delete these backups first, or use "+
			"--force", b.Name, someOf("backup", users))
	}
	t := &api.BackupTarget{}
	if err := c.Get(ctx, client.ObjectKey{Name: b.Target()}, t); client.IgnoreNotFound(err) != nil {
		return explain(ctx, err)
	}
	if t.HasUnlisted() {
		return api.Errorf(api.InUse, "backup %q: backup target %q has backups without an object, and their restores may "+
			"bring the image back: wait until each has one, or delete backups if they are too many, or use --force", b.Name,
			t.Name)
	}
	return nil
}

// remarkUnlisted says which targets, or whether the one target, have backups without an object.
func remarkUnlisted(ctx context.Context, c client.Client, target string, remarks io.Writer) error {
	var list api.BackupTargetList
	if err := c.List(ctx, &list); err != nil {
		return explain(ctx, err)
	}
	for i := range list.Items {
		if t := &list.Items[i]; t.Status.Unlisted > 0 && (target == "" || t.Name == target) {
			fmt.Fprintf(remarks, "target %q has %s\n", t.Name, describe.Backups(&t.Status))
		}
	}
	return nil
}

func (a *app) backupVolumes() *cobra.Command {
	target := ""
	c := &cobra.Command{
		Use: "volumes", Short: "List the volumes with backups, also those that were deleted", Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			list := &api.BackupVolumeList{}
			if err := c.List(ctx, list); err != nil {
				return explain(ctx, err)
			}
			list.Items = slices.DeleteFunc(list.Items, func(v api.BackupVolume) bool {
				return target != "" && v.Spec.BackupTargetName != target
			})
			return a.printList(cmd.OutOrStdout(), list, "VOLUME TARGET BACKUPS LAST AT SIZE STORED IMAGE",
				func(o runtime.Object) []string {
					v := o.(*api.BackupVolume)
					s := &v.Status
					return []string{v.Spec.VolumeName, v.Spec.BackupTargetName, fmt.Sprint(s.Backups), s.LastBackupName,
						s.LastBackupAt, text.SomeBytes(s.Size), text.SomeBytes(s.DataStored), s.BackingImageName}
				})
		},
	}
	c.Flags().StringVar(&target, "target", "", "only backups in this target")
	return c
}
