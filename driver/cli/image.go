package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/text"
)

func (a *app) imageCommand() *cobra.Command {
	c := groupCommand("image", "Golden images that volumes start from", "images", "bi")
	c.AddCommand(a.imageImport(), a.imageUpload(), a.imageClone(), a.imageRestore(), a.imageBackup(), a.imageCreate(),
		a.imageExport(), a.imageList(), a.imageShow(), a.imageDelete(), a.imageCleanup(), a.imageVerify())
	return c
}

func (a *app) imageList() *cobra.Command {
	all := false
	c := &cobra.Command{
		Use: "list", Short: "List the backing images", Aliases: []string{"ls"}, Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var list api.BackingImageList
			if err := c.List(ctx, &list); err != nil {
				return explain(ctx, err)
			}
			list.Items = slices.DeleteFunc(list.Items, func(i api.BackingImage) bool { return !all && i.IsHidden() })
			return a.printList(cmd.OutOrStdout(), &list, "NAME STATE PROGRESS SOURCE VIRTUAL SIZE COPIES AGE",
				func(o runtime.Object) []string {
					i := o.(*api.BackingImage)
					return []string{i.Name, describe.ImageState(&i.Status), fmt.Sprintf("%d%%", i.Status.Progress),
						string(i.Spec.SourceType), text.SomeBytes(i.Status.VirtualSize), text.SomeBytes(i.Status.Size),
						fmt.Sprint(i.Status.ReadyCopies), text.Age(i.CreationTimestamp)}
				})
		},
	}
	c.Flags().BoolVar(&all, "all", false, "also the images of volumes that are being restored from a backup")
	return c
}

func (a *app) imageShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show a backing image and the disks of its copies",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(images, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var img api.BackingImage
			if err := getObject(ctx, c, "image", left[0], &img); err != nil {
				return err
			}
			copies, err := findCopies(ctx, c, &img)
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), &img, func(w io.Writer) {
				describe.Image(w, &img, copies)
				describe.Events(w, describe.EventsOf(ctx, c, &img, "BackingImage"))
			})
		},
	}
}

// imageUsers returns the names of the volumes that stand on the image.
func imageUsers(ctx context.Context, c client.Client, image string) ([]string, error) {
	var vols api.VolumeList
	if err := c.List(ctx, &vols); err != nil {
		return nil, explain(ctx, err)
	}
	var users []string
	for _, v := range vols.Items {
		if v.Spec.BackingImage == image {
			users = append(users, v.Name)
		}
	}
	var reps api.ReplicaList // a clone stands on its source's image, also without a name in the spec
	if err := c.List(ctx, &reps, client.MatchingLabels{api.LabelImage: api.LabelValue(image)}); err != nil {
		return nil, explain(ctx, err)
	}
	for _, r := range reps.Items {
		if !slices.Contains(users, r.Spec.Volume) {
			users = append(users, r.Spec.Volume)
		}
	}
	return users, nil
}

func (a *app) imageDelete() *cobra.Command {
	return &cobra.Command{
		Use: "delete NAME...", Short: "Delete backing images that no volume uses", Aliases: []string{"rm"},
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(images, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			for _, name := range left {
				if err := deleteImage(ctx, c, name, cmd.ErrOrStderr()); err != nil {
					return err
				}
				a.printOutcome(cmd, "backingimage", name, "deleted")
			}
			return nil
		},
	}
}

// deleteImage waits until the image is deleted. A remark says why the deletion waits.
func deleteImage(ctx context.Context, c client.WithWatch, name string, remarks io.Writer) error {
	var img api.BackingImage
	if err := getObject(ctx, c, "image", name, &img); err != nil {
		return err
	}
	users, err := imageUsers(ctx, c, name)
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return api.Errorf(api.InUse, "image %q is in use by %s: delete these volumes first", name, someOf("volume", users))
	}
	// The precondition protects a new image of the same name.
	err = c.Delete(ctx, &img, client.Preconditions{UID: &img.UID})
	if err != nil && !apierrors.IsNotFound(err) {
		return explain(ctx, err)
	}
	return awaitGone(ctx, c, remarks, "image", &img, func(i *api.BackingImage) string {
		if cond := meta.FindStatusCondition(i.Status.Conditions, "InUse"); cond != nil && cond.Reason != "NoVolume" {
			return cond.Message
		}
		return ""
	})
}

// someOf lists names, and counts the rest of a long list.
func someOf(noun string, names []string) string {
	if len(names) > 1 {
		noun += "s"
	}
	if len(names) > 5 {
		return fmt.Sprintf("%s %s and %d more", noun, strings.Join(names[:5], ", "), len(names)-5)
	}
	return noun + " " + strings.Join(names, ", ")
}
