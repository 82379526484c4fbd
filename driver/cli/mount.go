package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/filesystem"
	"drover.io/drover/driver/cli/machine"
	"drover.io/drover/driver/cli/text"
)

func (a *app) volumeMount() *cobra.Command {
	var options string
	c := &cobra.Command{
		Use:   "mount NAME DIR",
		Short: "Attach a volume to this machine and mount its filesystem; make one first on a blank volume",
		Long: "Attaches the volume to this machine and mounts it. The command makes a filesystem only if the volume's " +
			"map proves\nthat the volume is blank, and refuses a volume that holds data without a filesystem.",
		Args: checkArgs(cobra.ExactArgs(2)), ValidArgsFunction: a.completeNames(volumes, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			m := &mounting{c: c, volume: left[0], dir: left[1], options: options, remarks: cmd.ErrOrStderr()}
			if err := m.mountVolume(ctx); err != nil {
				return err
			}
			return a.printObject(cmd.OutOrStdout(), m.att, func(w io.Writer) {
				fmt.Fprintf(w, "volume %q mounted at %s: %s on %s, in %s\n", m.volume, m.dir, m.fs, m.att.Status.Device,
					text.Seconds(time.Since(began)))
			})
		},
	}
	c.Flags().StringVar(&options, "options", "", "mount options: ro,noatime")
	return c
}

// mounting is a `volume mount` in progress.
type mounting struct {
	c                    client.WithWatch
	volume, dir, options string
	remarks              io.Writer

	node string
	att  *api.Attachment
	fs   string
}

func (m *mounting) mountVolume(ctx context.Context) (err error) {
	if m.dir, err = filepath.Abs(m.dir); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return api.Errorf(api.Denied, "mounting needs root: run this with sudo")
	}
	if err := filesystem.CheckDir(m.dir); err != nil {
		return err
	}
	if m.node, err = machine.Node(ctx, m.c); err != nil {
		return explain(ctx, err)
	}
	before, err := getAttachment(ctx, m.c, m.volume)
	if err != nil {
		return err
	}
	ro := slices.Contains(strings.Split(m.options, ","), "ro")
	if m.att, err = attachVolume(ctx, m.c, m.volume, m.node, ro, m.remarks); err != nil {
		return err
	}
	defer func() {
		if err != nil && before == nil { // restore the former state
			ctx, cancel := cleanup(ctx)
			defer cancel()
			_, derr := detachVolume(ctx, m.c, m.volume, false, m.remarks)
			err = errors.Join(err, derr)
		}
	}()
	if err := m.ensureFilesystem(ctx, before != nil); err != nil {
		return err
	}
	if err := os.MkdirAll(m.dir, 0o755); err != nil {
		return err
	}
	if m.fs != "xfs" && m.fs != "btrfs" && !ro { // xfs and btrfs grow while mounted
		if err := filesystem.GrowUnmounted(ctx, m.fs, m.att.Status.Device); err != nil {
			return err
		}
	}
	if err := filesystem.Mount(ctx, m.fs, m.att.Status.Device, m.dir, m.options); err != nil {
		return err
	}
	if !ro {
		return filesystem.Grow(ctx, m.fs, m.att.Status.Device, m.dir)
	}
	return nil
}

// ensureFilesystem detects the content of the device, and makes a filesystem only on a volume that is proven blank. The
// proof dates from the attach. A device that stood before this command may have been written since, so ensureFilesystem
// detaches and attaches the volume for a new proof.
func (m *mounting) ensureFilesystem(ctx context.Context, stood bool) (err error) {
	var v api.Volume
	if err := getObject(ctx, m.c, "volume", m.volume, &v); err != nil {
		return err
	}
	begun, had := v.Annotations[api.AnnotationMkfs], v.Annotations[api.AnnotationFS]
	if m.fs, err = filesystem.Detect(ctx, m.att.Status.Device); err != nil {
		return err
	}
	switch {
	case m.fs != "" && begun == "":
		return nil
	case m.att.Spec.ReadOnly:
		return api.Errorf(api.InUse, "volume %q has no filesystem yet: mount the volume writable first", m.volume)
	case begun != "" && m.fs != "" && m.fs != begun:
		return api.Errorf(api.InUse, "volume %q: a %s filesystem was being made on it, but it holds %s: it is not formatted",
			m.volume, begun, m.fs)
	case begun != "": // an unfinished mkfs wrote the only data, so mkfs may run again
	case had != "":
		return api.Errorf(api.Corrupt, "volume %q had a %s filesystem, which blkid does not recognise any more: Drover "+
			"does not format the volume again; repair the filesystem on %s, or restore the "+
			"volume", m.volume, had, m.att.Status.Device)
	case stood && m.att.Status.Blank:
		if _, err := detachVolume(ctx, m.c, m.volume, false, m.remarks); err != nil {
			return err
		}
		if m.att, err = attachVolume(ctx, m.c, m.volume, m.node, false, m.remarks); err != nil {
			return err
		}
	}
	if begun == "" && !m.att.Status.Blank {
		return api.Errorf(api.InUse, "volume %q (%s) holds data, but no filesystem that could be "+
			"mounted (a partition table, "+
			"or raw data?): it is not formatted; use the device itself", m.volume, m.att.Status.Device)
	}
	if m.fs = v.Spec.FSType; m.fs == "" {
		m.fs = "ext4"
	}
	if err := m.recordFilesystem(ctx, m.fs, ""); err != nil {
		return err
	}
	if err := filesystem.Make(ctx, m.fs, v.Spec.MkfsParams, m.att.Status.Device); err != nil {
		return err
	}
	return m.recordFilesystem(ctx, "", m.fs)
}

// recordFilesystem records on the volume the filesystem that mkfs begins, so that a killed mkfs can run again, and the
// finished filesystem, so that mkfs never runs again.
func (m *mounting) recordFilesystem(ctx context.Context, making, made string) error {
	var v api.Volume
	if err := getObject(ctx, m.c, "volume", m.volume, &v); err != nil {
		return err
	}
	base := v.DeepCopy()
	for key, value := range map[string]string{api.AnnotationMkfs: making, api.AnnotationFS: made} {
		if delete(v.Annotations, key); value != "" {
			if v.Annotations == nil {
				v.Annotations = map[string]string{}
			}
			v.Annotations[key] = value
		}
	}
	return explain(ctx, m.c.Patch(context.WithoutCancel(ctx), &v, client.MergeFrom(base)))
}

// growMounted grows the filesystem of a volume that is mounted here, and describes the growth for the report.
func growMounted(ctx context.Context, c client.WithWatch, v *api.Volume) (string, error) {
	att, err := getAttachment(ctx, c, v.Name)
	if att == nil || err != nil {
		return "", err
	}
	here, err := machine.Is(ctx, c, att.Spec.Node)
	if !here || err != nil {
		return "", explain(ctx, err)
	}
	gone := api.Errorf(api.Busy, "volume %q was detached meanwhile", v.Name)
	_, err = awaitObject(ctx, c, v.Name, gone, func(t *api.Attachment) (bool, error) {
		return t.Status.Size >= v.Spec.Size,
			nil
	})
	if err != nil {
		return "", explainTimeout(err, "the device of volume %q has not grown yet", v.Name)
	}
	on, err := filesystem.MountsWhere(filesystem.OnDevice(att.Status.Device))
	if len(on) == 0 || err != nil {
		return ", its device too", err
	}
	if err := filesystem.Grow(ctx, on[0].FS, att.Status.Device, on[0].Dir); err != nil {
		return "", fmt.Errorf("volume %q and its device are %s now, but the filesystem "+
			"at %s did not grow: %w; it grows when it "+
			"is mounted next", v.Name, api.SizeText(v.Status.Size), on[0].Dir, err)
	}
	return ", the " + on[0].FS + " filesystem at " + on[0].Dir + " too", nil
}

func (a *app) volumeUmount() *cobra.Command {
	var keep bool
	c := &cobra.Command{
		Use: "umount NAME...", Short: "Unmount a volume on this machine and detach it", Aliases: []string{"unmount"},
		Args: checkArgs(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeNames(volumes, false),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			for _, name := range left {
				if err := unmountVolume(ctx, c, name, keep, cmd.ErrOrStderr()); err != nil {
					return err
				}
				a.printOutcome(cmd, "volume", name, map[bool]string{true: "unmounted", false: "unmounted and detached"}[keep])
			}
			return nil
		},
	}
	c.Flags().BoolVar(&keep, "keep-attached", false, "leave the device")
	return c
}

func unmountVolume(ctx context.Context, c client.WithWatch, volume string, keep bool, remarks io.Writer) error {
	var v api.Volume
	if err := getObject(ctx, c, "volume", volume, &v); err != nil {
		return err
	}
	att, err := getAttachment(ctx, c, volume)
	if err != nil {
		return err
	}
	device := ""
	if att != nil {
		here, err := machine.Is(ctx, c, att.Spec.Node)
		if err != nil {
			return explain(ctx, err)
		}
		if !here {
			return api.Errorf(api.InUse, "volume %q is attached to node %q: unmount it there", volume, att.Spec.Node)
		}
		device = att.Status.Device
	}
	if err := filesystem.UnmountVolume(ctx, v.Status.UID, device); err != nil {
		return err
	}
	if keep || att == nil {
		return nil
	}
	_, err = detachVolume(ctx, c, volume, false, remarks)
	return err
}
