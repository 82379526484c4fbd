package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
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
					seconds(time.Since(began)))
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
	if err := checkTarget(m.dir); err != nil {
		return err
	}
	if m.node, err = thisNode(ctx, m.c); err != nil {
		return err
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
			_, derr := detachVolume(context.WithoutCancel(ctx), m.c, m.volume, false)
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
		if err := growUnmounted(ctx, m.fs, m.att.Status.Device); err != nil {
			return err
		}
	}
	if err := m.mountDevice(ctx); err != nil {
		return err
	}
	if !ro {
		return growFS(ctx, m.fs, m.att.Status.Device, m.dir)
	}
	return nil
}

// checkTarget refuses a folder with content, because a mount would hide the content.
func checkTarget(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return api.Errorf(api.Invalid, "cannot mount at %s: %w", dir, err)
	}
	on, err := mountsWhere(func(e mountEntry) bool { return e.dir == dir })
	if err != nil {
		return err
	}
	if len(on) > 0 {
		return api.Errorf(api.InUse, "a file system is mounted at %s already", dir)
	}
	if len(entries) > 0 {
		return api.Errorf(api.InUse, "%s is not empty: choose an empty or a new folder", dir)
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
	if m.fs, err = detectFilesystem(ctx, m.att.Status.Device); err != nil {
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
		if _, err := detachVolume(ctx, m.c, m.volume, false); err != nil {
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
	if err := makeFilesystem(ctx, m.fs, v.Spec.MkfsParams, m.att.Status.Device); err != nil {
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

func (m *mounting) mountDevice(ctx context.Context) error {
	opts := m.options
	if m.fs == "xfs" { // volumes from the same image carry the same filesystem UUID
		opts = strings.Trim(opts+",nouuid", ",")
	}
	argv := []string{"-t", m.fs}
	if opts != "" {
		argv = append(argv, "-o", opts)
	}
	_, err := runTool(ctx, "mount", append(argv, m.att.Status.Device, m.dir)...)
	return err
}

// makeFilesystem makes a filesystem like the CSI node service.
func makeFilesystem(ctx context.Context, fs, params, device string) error {
	argv := api.MkfsCommand(fs)
	if argv == nil {
		return api.Errorf(api.Unsupported, "no filesystem %q: a volume can have ext4, xfs or btrfs", fs)
	}
	_, err := runTool(ctx, argv[0], append(append(argv[1:], strings.Fields(params)...), device)...)
	return err
}

// detectFilesystem names the filesystem on a device, or returns "" for unknown content.
func detectFilesystem(ctx context.Context, device string) (string, error) {
	out, err := exec.CommandContext(ctx, "blkid", "-p", "-u", "filesystem", "-s", "TYPE", "-o", "value", device).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 2 {
		return "", nil
	}
	if err != nil {
		return "", api.Errorf(api.Other, "content of %s is unknown: blkid: %w", device, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// runTool runs a tool. The error carries the tool's last words.
func runTool(ctx context.Context, name string, argv ...string) (string, error) {
	out, err := exec.CommandContext(ctx, name, argv...).CombinedOutput()
	if err == nil {
		return string(out), nil
	}
	if errors.Is(err, exec.ErrNotFound) {
		return "", api.Errorf(api.Unavailable, "%s is not installed: `drover preflight` says which package has it", name)
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	said := strings.Join(strings.Fields(string(out)), " ")
	return "", api.Errorf(api.Other, "%s %s: %w: %s", name, strings.Join(argv, " "), err, said)
}

// growMounted grows the filesystem of a volume that is mounted here, and describes the growth for the report.
func growMounted(ctx context.Context, c client.WithWatch, v *api.Volume) (string, error) {
	att, err := getAttachment(ctx, c, v.Name)
	if att == nil || err != nil {
		return "", err
	}
	here, err := isHere(ctx, c, att.Spec.Node)
	if !here || err != nil {
		return "", err
	}
	gone := api.Errorf(api.Busy, "volume %q was detached meanwhile", v.Name)
	_, err = awaitObject(ctx, c, v.Name, gone, func(t *api.Attachment) (bool, error) {
		return t.Status.Size >= v.Spec.Size,
			nil
	})
	if err != nil {
		return "", explainTimeout(err, "the device of volume %q has not grown yet", v.Name)
	}
	on, err := mountsWhere(onDevice(att.Status.Device))
	if len(on) == 0 || err != nil {
		return ", its device too", err
	}
	if err := growFS(ctx, on[0].fs, att.Status.Device, on[0].dir); err != nil {
		return "", fmt.Errorf("volume %q and its device are %s now, but the filesystem "+
			"at %s did not grow: %w; it grows when it "+
			"is mounted next", v.Name, api.SizeText(v.Status.Size), on[0].dir, err)
	}
	return ", the " + on[0].fs + " filesystem at " + on[0].dir + " too", nil
}

// growFS grows a mounted filesystem to the size of its device, if necessary.
func growFS(ctx context.Context, fs, device, dir string) error {
	var err error
	switch fs {
	case "xfs":
		_, err = runTool(ctx, "xfs_growfs", "-d", dir)
	case "btrfs":
		_, err = runTool(ctx, "btrfs", "filesystem", "resize", "max", dir)
	case "ext4", "ext3", "ext2":
		var smaller bool
		if smaller, err = extSmaller(ctx, device); smaller {
			_, err = runTool(ctx, "resize2fs", device)
		}
	}
	return err
}

// growUnmounted grows a filesystem that can grow while unmounted.
func growUnmounted(ctx context.Context, fs, device string) error {
	if !strings.HasPrefix(fs, "ext") {
		return nil
	}
	smaller, err := extSmaller(ctx, device)
	if !smaller || err != nil {
		return err
	}
	// resize2fs requires a check first. Exit code 1 means a successful repair.
	if _, err := runTool(ctx, "e2fsck", "-f", "-p", device); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() > 1 {
			return err
		}
	}
	_, err = runTool(ctx, "resize2fs", device)
	return err
}

// extSmaller reports whether an ext filesystem is smaller than its device.
func extSmaller(ctx context.Context, device string) (bool, error) {
	out, err := runTool(ctx, "dumpe2fs", "-h", device)
	if err != nil {
		return false, err
	}
	var count, size int64
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "Block count:"); ok {
			count, err = strconv.ParseInt(strings.TrimSpace(v), 10, 64)
		} else if v, ok := strings.CutPrefix(line, "Block size:"); ok {
			size, err = strconv.ParseInt(strings.TrimSpace(v), 10, 64)
		}
		if err != nil {
			return false, fmt.Errorf("dumpe2fs of %s: %w", device, err)
		}
	}
	f, err := os.Open(device)
	if err != nil {
		return false, err
	}
	defer f.Close()
	have, err := f.Seek(0, io.SeekEnd)
	return count*size < have, err
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
				if err := unmountVolume(ctx, c, name, keep); err != nil {
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

func unmountVolume(ctx context.Context, c client.WithWatch, volume string, keep bool) error {
	var v api.Volume
	if err := getObject(ctx, c, "volume", volume, &v); err != nil {
		return err
	}
	att, err := getAttachment(ctx, c, volume)
	if err != nil {
		return err
	}
	devices := lostDevices(v.Status.UID)
	if att != nil {
		here, err := isHere(ctx, c, att.Spec.Node)
		if err != nil {
			return err
		}
		if !here {
			return api.Errorf(api.InUse, "volume %q is attached to node %q: unmount it there", volume, att.Spec.Node)
		}
		devices = append(devices, att.Status.Device)
	}
	var dirs []string
	on, err := mountsWhere(func(e mountEntry) bool { return e.device != "" && slices.Contains(devices, e.device) })
	for _, e := range on {
		dirs = append(dirs, e.dir)
	}
	if err != nil {
		return err
	}
	for _, dir := range slices.Backward(dirs) { // later mounts may lie below earlier mounts
		if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil {
			if errors.Is(err, unix.EBUSY) {
				return api.Errorf(api.InUse, "%s is in use: end the programs that use it (`fuser -vm %s` lists them) and "+
					"try again", dir, dir)
			}
			return api.Errorf(api.Other, "umount %s: %w", dir, err)
		}
	}
	if keep || att == nil {
		return nil
	}
	_, err = detachVolume(ctx, c, volume, false)
	return err
}

// lostDevices returns the loop devices of this machine on a volume's file, by the data process's name of the file:
// drover-UID.MARK, without the mark from older versions. Beside the attachment's device, lostDevices returns devices
// that lost all processes of Drover: such devices may still be mounted, and only return errors.
func lostDevices(volume api.UID) []string {
	var out []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		on, err := os.ReadFile(f)
		file, _, _ := strings.Cut(filepath.Base(strings.TrimSpace(string(on))), ".")
		if err == nil && volume != "" && file == "drover-"+string(volume) {
			out = append(out, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return out
}

// mountEntry is a line of this machine's mount table.
type mountEntry struct{ device, dir, fs string }

func mountsWhere(match func(mountEntry) bool) ([]mountEntry, error) {
	var out []mountEntry
	_, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		e := mountEntry{device: m.Source, dir: m.Mountpoint, fs: m.FSType}
		if match(e) {
			out = append(out, e)
		}
		return true, false
	})
	return out, err
}

func onDevice(device string) func(mountEntry) bool {
	return func(e mountEntry) bool { return device != "" && e.device == device }
}

// mountsOf returns the folders where a device is mounted on this machine.
func mountsOf(device string) ([]string, error) {
	on, err := mountsWhere(onDevice(device))
	var dirs []string
	for _, e := range on {
		dirs = append(dirs, e.dir)
	}
	return dirs, err
}
