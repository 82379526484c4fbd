package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/text"
)

func (a *app) volumeCommand() *cobra.Command {
	c := groupCommand("volume", "Replicated block devices", "volumes", "vol")
	c.AddCommand(a.volumeCreate(), a.volumeList(), a.volumeShow(), a.volumeAttach(), a.volumeDetach(), a.volumeMount(),
		a.volumeUmount(), a.volumeExpand(), a.volumeScrub(), a.volumeTrim(), a.volumeSalvage(), a.volumeRetry(),
		a.volumeActivate(), a.volumeImport(), a.volumeExport(), a.volumeDelete())
	return c
}

func (a *app) volumeCreate() *cobra.Command {
	var f volumeFlags
	var from, backup, target string
	v := &f.volume
	c := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a volume: blank, or with the content of an image, a snapshot, a backup or another volume",
		Example: "  drover volume create scratch --size 10Gi\n" +
			"  drover volume create vm-1 --image debian            # as large as the image\n" +
			"  drover volume create copy --from db                 # a volume as it is now, or a snapshot\n" +
			"  drover volume create copy --from db --clone-mode full-copy\n" +
			"  drover volume create again --from-backup db-friday  # as large as the backup\n" +
			"  drover volume create db-dr --standby --from-backup db --target offsite\n" +
			"  drover volume create db --size 100Gi --fs xfs",
		Args: checkArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			v.Name = left[0]
			if v.Spec.CloneMode == "linked-clone" { // as in a StorageClass
				v.Spec.CloneMode = api.CloneLinked
			}
			switch {
			case v.Spec.CloneMode != "" && from == "":
				return usagef("--clone-mode says how to begin with the content of another volume: add --from")
			case v.Spec.CloneMode != "" && v.Spec.CloneMode != api.CloneLinked && v.Spec.CloneMode != api.CloneFull:
				return usagef("--clone-mode %q: want %s or %s", v.Spec.CloneMode, api.CloneLinked, api.CloneFull)
			case backup != "" && (from != "" || v.Spec.BackingImage != ""):
				return usagef("--from-backup, --from and --image: a volume begins with one of them")
			}
			if err := checkName("volume", v.Name); err != nil {
				return err
			}
			switch {
			case v.Spec.Standby && backup == "":
				return usagef("--standby: which backups? add --from-backup")
			case target != "" && !v.Spec.Standby:
				return usagef("--target names the target of the backups that a standby volume follows: add --standby")
			case v.Spec.Standby:
				err = f.setStandby(ctx, cmd, c, backup, target)
			case backup != "":
				err = f.setBackup(ctx, cmd, c, backup)
			case from != "":
				err = setSource(ctx, c, &v.Spec, from, f.size)
			default:
				v.Spec.Size, err = wantedSize(ctx, c, f.size, v.Spec.BackingImage)
			}
			if err != nil {
				return err
			}
			if backup == "" {
				f.applyShared(cmd, nil)
			}
			return a.makeVolume(ctx, cmd, c, &f, began)
		},
	}
	c.Flags().StringVar(&f.size, "size", "",
		"size: 10Gi, 500Mi (default with --image, --from and --from-backup: that of the image, source or backup)")
	c.Flags().StringVar(&from, "from", "", "volume or snapshot whose content the volume begins with, by name or handle")
	c.Flags().StringVar(&v.Spec.CloneMode, "clone-mode", "",
		"with --from: linked (default: at once, the volumes share layers) or full-copy (Drover copies all layers)")
	c.Flags().StringVar(&v.Spec.BackingImage, "image", "", "backing image whose content the volume begins with")
	c.Flags().StringVar(&backup, "from-backup", "",
		"backup whose content the volume begins with, by name, handle or URL; with --standby also the name of a volume")
	c.Flags().BoolVar(&v.Spec.Standby, "standby", false,
		"follow the backups of the volume of --from-backup, until `drover volume activate`")
	c.Flags().StringVar(&target, "target", "", "with --standby and the name of a volume: target of its backups (default "+
		api.DefaultBackupTarget+")")
	f.addRestore(c)
	c.Flags().StringVar(&v.Spec.FSType, "fs", "", "filesystem that the first mount makes: ext4, xfs or btrfs")
	c.Flags().StringVar(&v.Spec.MkfsParams, "mkfs-params", "", "further options for mkfs")
	f.addShared(c)
	return c
}

// makeVolume creates a volume and waits until the volume can be used.
func (a *app) makeVolume(ctx context.Context, cmd *cobra.Command, c client.WithWatch, f *volumeFlags,
	began time.Time) error {
	v := &f.volume
	if err := createVolume(ctx, c, v); err != nil {
		return err
	}
	vol, err := awaitVolume(ctx, c, v.Name, cmd.ErrOrStderr(), func(v *api.Volume) bool {
		return v.Status.State != "" && v.Status.State != api.VolumeCreating
	})
	if err != nil {
		return err
	}
	return a.printObject(cmd.OutOrStdout(), vol, func(w io.Writer) { describe.CreatedVolume(w, vol, began) })
}

func createVolume(ctx context.Context, c client.Client, v *api.Volume) error {
	err := c.Create(ctx, v)
	if apierrors.IsAlreadyExists(err) {
		return api.Errorf(api.Exists, "volume %q exists already: see `drover volume show %s`", v.Name, v.Name)
	}
	return explain(ctx, err)
}

// setSource makes the content of a volume or a snapshot the source of a new volume.
func setSource(ctx context.Context, c client.Client, spec *api.VolumeSpec, from, size string) error {
	if spec.BackingImage != "" {
		return usagef("--image and --from: a volume begins with one of them; the source's image comes along")
	}
	source, least, image, err := sourceOf(ctx, c, from)
	if err != nil {
		return err
	}
	spec.DataSource, spec.BackingImage, spec.Size = source, image, least
	if size != "" {
		if spec.Size, err = volumeSize(size); err != nil {
			return err
		}
	}
	if spec.Size < least {
		return api.Errorf(api.OutOfRange, "%s is less than the %s of %s: ask for at least that, or leave --size out",
			api.SizeText(spec.Size), api.SizeText(least), source)
	}
	return nil
}

// wantedSize returns the size from the flag, or the image's size. An image in progress may not know the size yet.
func wantedSize(ctx context.Context, c client.WithWatch, size, image string) (int64, error) {
	var virtual int64
	if image != "" {
		none := api.Errorf(api.NotFound, "image %q does not exist: `drover image list` shows all", image)
		_, err := awaitObject(ctx, c, image, none, func(i *api.BackingImage) (bool, error) {
			if i.DeletionTimestamp != nil {
				return true, api.Errorf(api.InUse, "image %q is being deleted: no volume can begin with it any more", image)
			}
			if i.Status.State == api.ImageFailed {
				return true, api.Errorf(api.InUse, "image %q failed: %s", image, i.Status.Message)
			}
			virtual = i.Status.VirtualSize
			return virtual > 0, nil
		})
		if err != nil {
			return 0, explainTimeout(err, "image %q does not know its size yet", image)
		}
	}
	if size == "" {
		if image == "" {
			return 0, usagef("how large? say --size 10Gi, or --image to begin with an image's content")
		}
		return api.RoundSize(virtual), nil
	}
	n, err := volumeSize(size)
	if err == nil && n < virtual {
		err = api.Errorf(api.OutOfRange, "%s is less than the %s inside image %q: ask for at least that, or leave --size out",
			api.SizeText(n), api.SizeText(virtual), image)
	}
	return n, err
}

// awaitVolume waits until ready accepts the volume, and fails for a faulted volume. awaitVolume writes each reason for
// waiting once, as a remark.
//
// counts, if given, says whether the current status already reflects the command.
func awaitVolume(ctx context.Context, c client.WithWatch, name string, remarks io.Writer,
	ready func(*api.Volume) bool, counts ...func(*api.Volume) bool) (
	*api.Volume, error) {
	var vol *api.Volume
	remark := remarkOn(remarks, "volume", name)
	gone := api.Errorf(api.NotFound, "volume %q was deleted meanwhile", name)
	_, err := awaitObject(ctx, c, name, gone, func(v *api.Volume) (bool, error) {
		vol = v
		for _, is := range counts {
			if !is(v) {
				return false, nil
			}
		}
		if v.Status.State == api.VolumeFaulted {
			return true, api.Errorf(api.Other, "volume %q is faulted: %s", name, v.Status.Message)
		}
		if ready(v) {
			return true, nil
		}
		why := unreadyReason(v)
		if c := v.Status.CloneStatus; c != nil && c.State == api.CloneInitiated && c.Progress > 0 {
			why = fmt.Sprintf("%d %% are copied", c.Progress/10*10)
		}
		if r := v.Status.RestoreStatus; r != nil && r.Backup != "" && v.Labels[api.LabelBackupMount] == "" &&
			r.State == api.CloneInitiated && r.Message == "" && r.Progress < 100 {
			why = fmt.Sprintf("%d %% of backup %q are restored", r.Progress/10*10, r.Backup)
		}
		remark(why)
		return false, nil
	})
	if vol == nil {
		return nil, explainTimeout(err, "volume %q", name)
	}
	return vol, explainTimeout(err, "volume %q is %s%s; see `drover volume show %s`", name, vol.Status.State,
		text.Colon(unreadyReason(vol)), name)
}

// unreadyReason returns the volume's own reason for not being ready.
func unreadyReason(v *api.Volume) string {
	for _, c := range v.Status.Conditions {
		if c.Status == "False" && c.Message != "" && c.Type != api.ConditionExpanded { // an expansion's is progress
			return c.Message
		}
	}
	return v.Status.Message
}

// undeletedReason returns why the deletion of a volume waits.
func undeletedReason(v *api.Volume) string {
	if v.Status.State == api.VolumeDeleting {
		return v.Status.Message
	}
	return ""
}

func (a *app) volumeList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the volumes", Aliases: []string{"ls"}, Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var list api.VolumeList
			var atts api.AttachmentList
			if err := c.List(ctx, &list); err != nil {
				return explain(ctx, err)
			}
			if err := c.List(ctx, &atts); err != nil {
				return explain(ctx, err)
			}
			device := map[string]string{}
			for _, t := range atts.Items {
				device[t.Spec.Volume] = t.Status.Device
			}
			return a.printList(cmd.OutOrStdout(), &list, "NAME STATE ROBUSTNESS SIZE USED SHARED IMAGE NODE DEVICE BACKUP AGE",
				func(o runtime.Object) []string {
					v := o.(*api.Volume)
					return []string{v.Name, string(v.Status.State), string(v.Status.Robustness), api.SizeText(v.Spec.Size),
						api.SizeText(v.Status.Used), api.SizeText(v.Status.Shared), v.Spec.BackingImage, v.Status.AttachedNode,
						device[v.Name], text.AgeOfText(v.Status.LastBackupAt), text.Age(v.CreationTimestamp)}
				})
		},
	}
}

func (a *app) volumeShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show a volume, its replicas and its node",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var v api.Volume
			if err := getObject(ctx, c, "volume", left[0], &v); err != nil {
				return err
			}
			var reps api.ReplicaList
			if err := c.List(ctx, &reps, client.MatchingLabels{api.LabelVolume: api.LabelValue(v.Name)}); err != nil {
				return explain(ctx, err)
			}
			att, err := getAttachment(ctx, c, v.Name)
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), &v, func(w io.Writer) {
				mine, all := reps.OfVolume(v.Name), describe.EventsOf(ctx, c, &v, "Volume", "Attachment")
				describe.Volume(w, &v, mine, att)
				for i := range mine { // the damage belongs to the replica that reports damage
					all = append(all, describe.EventsOf(ctx, c, &mine[i], "Replica")...)
				}
				describe.Events(w, describe.LatestEvents(all))
			})
		},
	}
}

func (a *app) volumeRetry() *cobra.Command {
	return &cobra.Command{
		Use: "retry NAME", Short: "Copy the source of a volume again after a failure",
		Long: "A clone that failed (its source was damaged, or its copy made no progress) stays as it is until it is " +
			"deleted or\ntried again. The copy begins again from the start.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var v api.Volume
			if err := getObject(ctx, c, "volume", left[0], &v); err != nil {
				return err
			}
			if s := v.Status.CloneStatus; s == nil || s.State != api.CloneFailed {
				return api.Errorf(api.Invalid, "volume %q is no clone that failed: see `drover volume show %s`", v.Name, v.Name)
			}
			old := v.DeepCopy()
			if v.Annotations == nil {
				v.Annotations = map[string]string{}
			}
			v.Annotations[api.AnnotationRetry] = string(api.NewUID())
			if err := c.Patch(ctx, &v, client.MergeFrom(old)); err != nil {
				return explain(ctx, err)
			}
			token := v.Annotations[api.AnnotationRetry]
			_, err = awaitVolume(ctx, c, v.Name, cmd.ErrOrStderr(), func(v *api.Volume) bool {
				return v.Status.State != "" && v.Status.State != api.VolumeCreating && v.Status.State != api.VolumeFaulted
			}, func(v *api.Volume) bool { return v.Status.CloneStatus.Retried == token })
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), &v, func(w io.Writer) { fmt.Fprintf(w, "volume %q created\n", v.Name) })
		},
	}
}

func (a *app) volumeExpand() *cobra.Command {
	c := &cobra.Command{
		Use: "expand NAME SIZE", Short: "Make a volume larger, attached or not, and its mounted filesystem",
		Example: "  drover volume expand db 200Gi\n  drover volume expand db +10Gi",
		Args:    checkArgs(cobra.ExactArgs(2)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			vol, err := expandVolume(ctx, cmd, c, left[0], left[1])
			if err != nil {
				return err
			}
			grown, err := growMounted(ctx, c, vol)
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), vol, func(w io.Writer) {
				fmt.Fprintf(w, "volume %q is %s%s, in %s\n", vol.Name, api.SizeText(vol.Status.Size), grown,
					text.Seconds(time.Since(began)))
			})
		},
	}
	return c
}

func expandVolume(ctx context.Context, cmd *cobra.Command, c client.WithWatch, name, size string) (*api.Volume, error) {
	var v api.Volume
	if err := getObject(ctx, c, "volume", name, &v); err != nil {
		return nil, err
	}
	if err := v.RefuseStandby(); err != nil { // it grows with its backups
		return nil, err
	}
	more, plus := strings.CutPrefix(size, "+")
	n, err := parseSize(more)
	if err != nil {
		return nil, err
	}
	if plus {
		n += v.Spec.Size
	}
	if n > api.MaxVolumeSize {
		return nil, api.Errorf(api.OutOfRange, "%s is more than a volume can have (%s)", api.SizeText(n),
			api.SizeText(api.MaxVolumeSize))
	}
	n = api.RoundSize(n)
	if n < v.Spec.Size {
		return nil, api.Errorf(api.OutOfRange, "volume %q has %s and cannot shrink to %s", name, api.SizeText(v.Spec.Size),
			api.SizeText(n))
	}
	base := v.DeepCopy()
	v.Spec.Size = n
	if err := c.Patch(ctx, &v, client.MergeFrom(base)); err != nil {
		return nil, explain(ctx, err)
	}
	return awaitVolume(ctx, c, name, cmd.ErrOrStderr(), func(v *api.Volume) bool { return v.Status.Size >= n })
}

func (a *app) volumeDelete() *cobra.Command {
	keep := false
	c := &cobra.Command{
		Use: "delete NAME...", Short: "Delete detached volumes and their data", Aliases: []string{"rm"},
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			for _, name := range left {
				var v api.Volume
				if err := getObject(ctx, c, "volume", name, &v); err != nil {
					return err
				}
				att, err := getAttachment(ctx, c, name)
				if err != nil {
					return err
				}
				if att != nil {
					return api.Errorf(api.InUse, "volume %q is attached to node %q: `drover volume detach %s` first",
						name, att.Spec.Node, name)
				}
				left, err := userSnapshots(ctx, c, name)
				if err != nil {
					return err
				}
				if len(left) > 0 && !keep {
					return api.Errorf(api.InUse, "volume %q has %s: delete those first, or delete the volume alone with "+
						"--keep-snapshots", name, someOf("snapshot", left))
				}
				err = c.Delete(ctx, &v, client.Preconditions{UID: &v.UID})
				if err != nil && !apierrors.IsNotFound(err) {
					return explain(ctx, err)
				}
				if len(left) > 0 {
					a.printOutcome(cmd, "volume", name, "deleted; its data is deleted with the last of its snapshots")
					continue
				}
				if err = awaitGone(ctx, c, cmd.ErrOrStderr(), "volume", &v, undeletedReason); err != nil {
					return err
				}
				a.printOutcome(cmd, "volume", name, "deleted")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&keep, "keep-snapshots", false,
		"leave the snapshots of the volume; its data is deleted with the last of them")
	return c
}

// userSnapshots returns the names of a volume's snapshots, except for deleted snapshots and snapshots of clones, which
// Drover deletes.
func userSnapshots(ctx context.Context, c client.Client, volume string) ([]string, error) {
	list, err := snapshotsOf(ctx, c, volume)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range list.Items {
		if s.Spec.Labels[api.LabelClone] == "" && s.DeletionTimestamp == nil {
			names = append(names, s.Name)
		}
	}
	return names, nil
}
