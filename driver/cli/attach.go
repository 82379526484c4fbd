package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/filesystem"
	"drover.io/drover/driver/cli/machine"
	"drover.io/drover/driver/cli/text"
)

// getAttachment returns the workload's attachment of a volume, or nil.
func getAttachment(ctx context.Context, c client.Client, volume string) (*api.Attachment, error) {
	var att api.Attachment
	err := c.Get(ctx, client.ObjectKey{Name: volume}, &att)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return &att, explain(ctx, err)
}

func (a *app) volumeAttach() *cobra.Command {
	var node string
	var readOnly bool
	c := &cobra.Command{
		Use: "attach NAME", Short: "Make a volume's block device appear on a node",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			if node == "" {
				if node, err = machine.Node(ctx, c); err != nil {
					return explain(ctx, err)
				}
			}
			att, err := attachVolume(ctx, c, left[0], node, readOnly, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), att, func(w io.Writer) {
				fmt.Fprintf(w, "volume %q attached to node %q: %s, in %s\n", left[0], att.Spec.Node, att.Status.Device,
					text.Seconds(time.Since(began)))
			})
		},
	}
	c.Flags().StringVar(&node, "node", "", "node (default: this one)")
	c.Flags().BoolVar(&readOnly, "read-only", false, "the device refuses writes")
	return c
}

// attachVolume creates the attachment or joins an equal attachment, and waits for the device.
func attachVolume(ctx context.Context, c client.WithWatch, volume, node string, readOnly bool, remarks io.Writer) (
	*api.Attachment, error) {
	var v api.Volume
	if err := getObject(ctx, c, "volume", volume, &v); err != nil {
		return nil, err
	}
	if err := checkStrictLocal(ctx, c, &v, node); err != nil {
		return nil, err
	}
	if err := refuseUnusable(&v); err != nil { // a new attachment would also block the deletion
		have, herr := getAttachment(ctx, c, volume)
		if herr != nil {
			return nil, herr
		}
		if have == nil {
			return nil, err
		}
	}
	want := &api.Attachment{Spec: api.AttachmentSpec{Volume: volume, Node: node, ReadOnly: readOnly, Purpose: "workload"}}
	want.Name = volume
	want.Labels = map[string]string{api.LabelVolume: api.LabelValue(volume), api.LabelNode: api.LabelValue(node)}
	if err := c.Create(ctx, want); err != nil {
		if !apierrors.IsAlreadyExists(err) {
			return nil, explain(ctx, err)
		}
		have, err := getAttachment(ctx, c, volume)
		switch {
		case err != nil:
			return nil, err
		case have == nil:
			return nil, api.Errorf(api.Busy, "volume %q was being detached: try again", volume)
		case have.DeletionTimestamp != nil:
			return nil, api.Errorf(api.Busy, "node %[2]q detaches volume %[1]q now: try again after the detach",
				volume, have.Spec.Node)
		case have.Spec.Node != node:
			return nil, api.Errorf(api.InUse, "volume %q is attached to node %q: `drover volume detach %s` first", volume,
				have.Spec.Node, volume)
		case have.Spec.ReadOnly != readOnly:
			return nil, api.Errorf(api.InUse, "volume %q is attached with read-only %v: `drover volume detach %s` first",
				volume, have.Spec.ReadOnly, volume)
		}
	}
	var att *api.Attachment
	why, remark := "", remarkOn(remarks, "volume", volume)
	gone := api.Errorf(api.Busy, "volume %q was detached meanwhile", volume)
	_, err := awaitObject(ctx, c, volume, gone, func(t *api.Attachment) (bool, error) {
		if att = t; !t.Status.Ready {
			why = t.Status.Message
			remark(why)
		}
		return t.Status.Ready && t.Status.Device != "", nil
	})
	return att, explainTimeout(err, "volume %q is still being attached to node %q%s; see `drover volume show %s`", volume,
		node, text.Colon(why), volume)
}

// checkStrictLocal refuses to attach a strict-local volume on a node without its data.
func checkStrictLocal(ctx context.Context, c client.Client, v *api.Volume, node string) error {
	if v.Spec.DataLocality != "strict-local" || len(v.Status.Members) == 0 {
		return nil
	}
	var r api.Replica
	if err := c.Get(ctx, client.ObjectKey{Name: v.Status.Members[0]}, &r); err != nil || r.Spec.Node == node {
		return explain(ctx, client.IgnoreNotFound(err))
	}
	return api.Errorf(api.InUse, "volume %q cannot be attached to node %q: its data locality is strict-local, and its "+
		"data is on node %q", v.Name, node, r.Spec.Node)
}

func (a *app) volumeDetach() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "detach NAME...", Short: "Take a volume's device away; refused while it is mounted",
		Long: "Take a volume's device away, after its last writes are on the disk. Refused while it is mounted. Waits\n" +
			"while a program has it open, and while writes wait for room; the detach continues without the command.\n\n" +
			"With --force the command waits for no I/O: unanswered I/O fails, " +
			"programs that have the device open or mounted get\nerrors, and writes since the last sync may be lost.",
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			for _, name := range left {
				was, err := detachVolume(ctx, c, name, force, cmd.ErrOrStderr())
				if err != nil {
					return err
				}
				if was {
					a.printOutcome(cmd, "volume", name, "detached")
				} else {
					a.printOutcome(cmd, "volume", name, "was not attached")
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&force, "force", false, "fail the volume's I/O instead of waiting for it")
	return c
}

// detachVolume deletes the attachment and waits until the device is gone. detachVolume reports whether an attachment
// existed. A remark says why the detach waits.
func detachVolume(ctx context.Context, c client.WithWatch, volume string, force bool, remarks io.Writer) (
	bool, error) {
	var v api.Volume
	if err := getObject(ctx, c, "volume", volume, &v); err != nil {
		return false, err
	}
	att, err := getAttachment(ctx, c, volume)
	if att == nil || err != nil {
		return false, err
	}
	if force {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, api.AnnotationForce)
		if err := c.Patch(ctx, att, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return true, explain(ctx, err)
		}
	} else if here, err := machine.Is(ctx, c, att.Spec.Node); err != nil {
		return true, explain(ctx, err)
	} else if here {
		dirs, err := filesystem.DirsOf(att.Status.Device)
		if err != nil {
			return true, err
		}
		if len(dirs) > 0 {
			return true, api.Errorf(api.InUse, "volume %q is mounted at %s: `drover volume umount %s` first", volume,
				strings.Join(dirs, ", "), volume)
		}
	}
	err = c.Delete(ctx, att, client.Preconditions{UID: &att.UID})
	if err != nil && !apierrors.IsNotFound(err) {
		return true, explain(ctx, err)
	}
	return true, awaitGone(ctx, c, remarks, "attachment", att, func(t *api.Attachment) string { return t.Status.Message })
}
