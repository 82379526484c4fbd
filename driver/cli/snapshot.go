package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

func (a *app) snapshotCommand() *cobra.Command {
	c := groupCommand("snapshot", "The content of volumes at an instant", "snapshots", "snap")
	c.AddCommand(a.snapshotCreate(), a.snapshotList(), a.snapshotShow(), a.snapshotExport(), a.snapshotDelete(),
		a.snapshotRevert())
	return c
}

func (a *app) snapshotCreate() *cobra.Command {
	var labels map[string]string
	var group string
	c := &cobra.Command{
		Use: "create VOLUME [NAME]", Short: "Take a snapshot of a volume, or of several at one instant",
		Long: "Takes a snapshot of a volume as it is now. A mounted file system is as after a power " +
			"cut, and recovers by its\njournal: `sync` the file system first, so that the snapshot has its last writes.\n" +
			"\n" +
			"With --group, a snapshot of each of the volumes, all of one instant: if the snapshots have a write, they " +
			"have\nevery write that was acknowledged before it was issued, on all of the volumes.",
		Example: "  drover snapshot create db\n  drover snapshot create db before-upgrade --label why=upgrade\n" +
			"  drover snapshot create --group nightly db-data db-log",
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if group != "" {
				return a.createGroup(ctx, cmd, c, group, left, labels)
			}
			if len(left) > 2 {
				return usagef("a snapshot is of one volume; of several at one instant with --group NAME")
			}
			began := time.Now()
			name := left[0] + "-" + began.UTC().Format("20060102-150405")
			if len(left) > 1 {
				name = left[1]
			}
			if err := checkName("snapshot", name); err != nil {
				return err
			}
			var v api.Volume
			if err := getObject(ctx, c, "volume", left[0], &v); err != nil {
				return err
			}
			if err := refuseUnusable(&v); err != nil {
				return err
			}
			s := api.NewSnapshot(&v, name)
			s.Spec.Labels = labels
			err = c.Create(ctx, s)
			for n := 2; len(left) == 1 && apierrors.IsAlreadyExists(err); n++ { // name of the same second
				s.Name = fmt.Sprintf("%s-%d", name, n)
				err = c.Create(ctx, s)
			}
			name = s.Name
			if err != nil {
				if apierrors.IsAlreadyExists(err) {
					return api.Errorf(api.Exists, "snapshot %q exists already: see `drover snapshot show %s`", name, name)
				}
				return explain(ctx, err)
			}
			gone := api.Errorf(api.NotFound, "snapshot %q was deleted meanwhile", name)
			why := ""
			s, err = awaitObject(ctx, c, name, gone, func(s *api.Snapshot) (bool, error) {
				if why != s.Status.Error {
					if why = s.Status.Error; why != "" {
						fmt.Fprintf(cmd.ErrOrStderr(), "snapshot %q waits: %s\n", name, why)
					}
				}
				return s.Status.ReadyToUse, nil
			})
			if err != nil {
				return explainTimeout(err, "snapshot %q does not exist yet%s", name, text.Colon(why))
			}
			return a.printObject(cmd.OutOrStdout(), s, func(w io.Writer) {
				fmt.Fprintf(w, "snapshot %q of volume %q created, in %s\n", name, v.Name, text.Seconds(time.Since(began)))
			})
		},
	}
	c.Flags().StringToStringVar(&labels, "label", nil, "labels to keep with it: a=b,c=d")
	c.Flags().StringVar(&group, "group", "", "name of a group: cut all of the volumes named at one instant")
	return c
}

func (a *app) snapshotList() *cobra.Command {
	return &cobra.Command{
		Use: "list [VOLUME]", Short: "List the snapshots, of all volumes or of one", Aliases: []string{"ls"},
		Args: checkArgs(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			volume := ""
			if len(left) > 0 {
				volume = left[0]
			}
			list, err := snapshotsOf(ctx, c, volume)
			if err != nil {
				return err
			}
			return a.printList(cmd.OutOrStdout(), list, "NAME VOLUME GROUP READY RESTORE SIZE PARENT AGE ERROR",
				func(o runtime.Object) []string {
					s := o.(*api.Snapshot)
					return []string{s.Name, s.Spec.Volume, s.Spec.Group, fmt.Sprint(s.Status.ReadyToUse),
						text.SomeBytes(s.Status.RestoreSize), text.SomeBytes(s.Status.Size), s.Status.Parent,
						text.Age(s.CreationTimestamp),
						s.Status.Error}
				})
		},
	}
}

// snapshotsOf returns the snapshots of a volume, or of all volumes, oldest first.
func snapshotsOf(ctx context.Context, c client.Client, volume string) (*api.SnapshotList, error) {
	list := &api.SnapshotList{}
	if err := c.List(ctx, list); err != nil {
		return nil, explain(ctx, err)
	}
	list.Items = slices.DeleteFunc(list.Items, func(s api.Snapshot) bool {
		return volume != "" &&
			s.Spec.Volume != volume
	})
	slices.SortStableFunc(list.Items, func(a, b api.Snapshot) int {
		if d := strings.Compare(a.Spec.Volume, b.Spec.Volume); d != 0 {
			return d
		}
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	return list, nil
}

func (a *app) snapshotShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show a snapshot",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(snapshots, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var s api.Snapshot
			if err := getObject(ctx, c, "snapshot", left[0], &s); err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), &s, func(w io.Writer) {
				st := s.Status
				text.Fields(w, "Name", s.Name, "Volume", s.Spec.Volume, "Group", s.Spec.Group, "Ready", fmt.Sprint(st.ReadyToUse),
					"Error", st.Error,
					"Created", st.CreationTime, "Restores to", text.SomeBytes(st.RestoreSize), "Own data", text.SomeBytes(st.Size),
					"Parent", st.Parent, "Children", strings.Join(slices.Sorted(maps.Keys(st.Children)), ", "),
					"By user", fmt.Sprint(st.UserCreated), "Labels", text.JoinLabels(st.Labels), "Node", st.OwnerID,
					"Handle", api.DataSource{Volume: s.Spec.Volume, Snapshot: s.Name}.String(), "UID", string(st.UID))
			})
		},
	}
}

func (a *app) snapshotDelete() *cobra.Command {
	var group string
	c := &cobra.Command{
		Use: "delete NAME...", Short: "Delete snapshots; volumes with their content stay", Aliases: []string{"rm"},
		Args: func(c *cobra.Command, left []string) error {
			if group != "" {
				return checkArgs(cobra.NoArgs)(c, left)
			}
			return checkArgs(cobra.MinimumNArgs(1))(c, left)
		}, ValidArgsFunction: a.completeNames(snapshots, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if group != "" {
				return a.deleteGroup(ctx, cmd, c, group)
			}
			for _, name := range left {
				var s api.Snapshot
				if err := getObject(ctx, c, "snapshot", name, &s); err != nil {
					return err
				}
				if s.Spec.Group != "" && client.IgnoreNotFound(c.Get(ctx, client.ObjectKey{Name: s.Spec.Group},
					&api.SnapshotGroup{})) == nil {
					return api.Errorf(api.InUse, "snapshot %q is part of group %q: `drover snapshot delete --group %s` deletes it "+
						"as a whole", name, s.Spec.Group, s.Spec.Group)
				}
				err = c.Delete(ctx, &s, client.Preconditions{UID: &s.UID})
				if err != nil && !apierrors.IsNotFound(err) {
					return explain(ctx, err)
				}
				why := func(s *api.Snapshot) string { return s.Status.Error }
				if err = awaitGone(ctx, c, cmd.ErrOrStderr(), "snapshot", &s, why); err != nil {
					return err
				}
				a.printOutcome(cmd, "snapshot", name, "deleted")
			}
			return nil
		},
	}
	c.Flags().StringVar(&group, "group", "", "delete a group with all its snapshots")
	return c
}

func (a *app) snapshotRevert() *cobra.Command {
	return &cobra.Command{
		Use: "revert NAME", Short: "Replace the content of a detached volume by that of a snapshot",
		Long: "The volume loses all writes since its newest snapshot: take one more snapshot before, to be able to come " +
			"back.\nOther snapshots, newer ones too, stay. The size stays; the volume reads zeros beyond the snapshot's " +
			"size.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(snapshots, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			var s api.Snapshot
			if err := getObject(ctx, c, "snapshot", left[0], &s); err != nil {
				return err
			}
			var v api.Volume
			if err := getObject(ctx, c, "volume", s.Spec.Volume, &v); err != nil {
				return err
			}
			att, err := getAttachment(ctx, c, v.Name)
			if err != nil {
				return err
			}
			if att != nil {
				return api.Errorf(api.InUse, "volume %q is attached to node %q: `drover volume detach %s` first", v.Name,
					att.Spec.Node, v.Name)
			}
			base, id := v.DeepCopy(), string(api.NewUID())
			v.Spec.RevertTo = &api.RevertWish{Snapshot: s.Name, ID: id}
			delete(v.Annotations, api.AnnotationMkfs) // the revert overwrites the filesystem
			delete(v.Annotations, api.AnnotationFS)
			if err := c.Patch(ctx, &v, client.MergeFrom(base)); err != nil {
				return explain(ctx, err)
			}
			gone := api.Errorf(api.NotFound, "volume %q was deleted meanwhile", v.Name)
			vol, err := awaitObject(ctx, c, v.Name, gone, func(v *api.Volume) (bool, error) {
				is := v.Status.Reverted
				switch {
				case v.Spec.RevertTo == nil || v.Spec.RevertTo.ID != id:
					return true, api.Errorf(api.Busy, "volume %q was reverted by another command at the same time", v.Name)
				case is == nil || is.ID != id || is.State == api.CloneInitiated:
					return false, nil
				case is.State == api.CloneFailed:
					return true, api.Errorf(api.InUse, "volume %q was not reverted: %s", v.Name, is.Message)
				}
				return true, nil
			})
			if err != nil {
				return explainTimeout(err, "volume %q is still being reverted", v.Name)
			}
			return a.printObject(cmd.OutOrStdout(), vol, func(w io.Writer) {
				fmt.Fprintf(w, "volume %q has the content of snapshot %q, in "+
					"%s\n", vol.Name, s.Name, text.Seconds(time.Since(began)))
			})
		},
	}
}

// sourceOf resolves --from: a handle, or the name of a snapshot or a volume. sourceOf returns the source, its size, and
// its backing image.
func sourceOf(ctx context.Context, c client.Client, from string) (source string, size int64, image string, err error) {
	var ds api.DataSource
	if strings.Contains(from, "://") {
		if ds, err = api.ParseDataSource(from); err != nil {
			return "", 0, "", err
		}
	} else {
		var s api.Snapshot
		serr := c.Get(ctx, client.ObjectKey{Name: from}, &s)
		verr := c.Get(ctx, client.ObjectKey{Name: from}, &api.Volume{})
		if err := client.IgnoreNotFound(serr); err != nil {
			return "", 0, "", explain(ctx, err)
		}
		switch {
		case serr == nil && verr == nil:
			return "", 0, "", usagef("the name fits snapshot %q and volume %q: say snap://%s/%s or vol://%s", from, from,
				s.Spec.Volume, from, from)
		case serr == nil:
			ds = api.DataSource{Volume: s.Spec.Volume, Snapshot: from}
		default:
			ds = api.DataSource{Volume: from}
		}
	}
	var v api.Volume
	if err := getObject(ctx, c, "volume", ds.Volume, &v); err != nil {
		return "", 0, "", err
	}
	size = v.Spec.Size
	if ds.Snapshot == "" {
		if err := refuseUnusable(&v); err != nil {
			return "", 0, "", err
		}
	} else {
		var s api.Snapshot
		if err := getObject(ctx, c, "snapshot", ds.Snapshot, &s); err != nil {
			return "", 0, "", err
		}
		if s.Spec.Volume != ds.Volume {
			return "", 0, "", api.Errorf(api.NotFound, "snapshot %q is one of volume %q", ds.Snapshot, s.Spec.Volume)
		}
		if size = s.Status.RestoreSize; size == 0 {
			return "", 0, "", api.Errorf(api.InUse, "snapshot %q does not exist yet%s", ds.Snapshot, text.Colon(s.Status.Error))
		}
	}
	return ds.String(), size, v.Spec.BackingImage, nil
}

// refuseUnusable refuses work that needs the content of a deleted volume or of a standby volume: the work would wait.
func refuseUnusable(v *api.Volume) error {
	if v.DeletionTimestamp == nil {
		return v.RefuseStandby()
	}
	return api.Errorf(api.InUse, "volume %q is deleted; it is kept until its last snapshot is deleted", v.Name)
}
