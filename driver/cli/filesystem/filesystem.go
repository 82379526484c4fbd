// Package filesystem makes, grows, mounts and unmounts filesystems on devices of this machine, for the commands. The
// package runs the tools of the distribution, and starts no goroutines.
package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// Make makes a filesystem like the CSI node service.
func Make(ctx context.Context, fs, params, device string) error {
	argv := api.MkfsCommand(fs)
	if argv == nil {
		return api.Errorf(api.Unsupported, "no filesystem %q: a volume can have ext4, xfs or btrfs", fs)
	}
	_, err := runTool(ctx, argv[0], append(append(argv[1:], strings.Fields(params)...), device)...)
	return err
}

// Detect names the filesystem on a device, or returns "" for unknown content.
func Detect(ctx context.Context, device string) (string, error) {
	return probe(ctx, device, "-u", "filesystem", "-s", "TYPE")
}

// probe asks blkid for a value; unknown content is "".
func probe(ctx context.Context, device string, question ...string) (string, error) {
	argv := append(append([]string{"-p", "-o", "value"}, question...), device)
	out, err := exec.CommandContext(ctx, "blkid", argv...).Output()
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

// Grow grows a mounted filesystem to the size of its device, if necessary.
func Grow(ctx context.Context, fs, device, dir string) error {
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

// GrowUnmounted grows a filesystem that can grow while unmounted.
func GrowUnmounted(ctx context.Context, fs, device string) error {
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

// Mount mounts the filesystem fs of a device at a folder, with options such as ro,noatime.
func Mount(ctx context.Context, fs, device, dir, options string) error {
	if fs == "xfs" { // volumes from the same image carry the same filesystem UUID
		options = strings.Trim(options+",nouuid", ",")
	}
	argv := []string{"-t", fs}
	if options != "" {
		argv = append(argv, "-o", options)
	}
	_, err := runTool(ctx, "mount", append(argv, device, dir)...)
	return err
}

// MountReadOnly mounts the filesystem of a device, or of a partition of the device, at a folder, which it makes if
// necessary. The device is writable, because filesystems recover from a power cut only then, and show damaged folders
// without recovery. A device without a filesystem is an error of kind Unsupported.
func MountReadOnly(ctx context.Context, device string, partition int, dir string) (fs string, err error) {
	on := device
	if partition > 0 {
		if on, err = loopPartition(ctx, device, partition); err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, endLoops(ctx, []string{on})) }() // at once, or with the mount
	}
	if fs, err = Detect(ctx, on); err != nil {
		return "", err
	}
	if fs == "" {
		return "", explainContent(ctx, on, partition)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return fs, Mount(ctx, fs, on, dir, "ro,nosuid,nodev")
}

// explainContent is the error of a device without a filesystem.
func explainContent(ctx context.Context, device string, partition int) error {
	table, err := probe(ctx, device, "-s", "PTTYPE")
	switch {
	case err != nil:
		return err
	case table != "" && partition == 0:
		return api.Errorf(api.Unsupported, "%s has partitions (%s): name one with --partition", device, table)
	case partition > 0:
		return api.Errorf(api.Unsupported, "partition %d has no filesystem that could be mounted", partition)
	}
	return api.Errorf(api.Unsupported, "%s has no filesystem that could be mounted", device)
}

// UnmountVolume unmounts a volume, its partitions too, from all folders of this machine. device is that of its
// attachment; empty: none.
func UnmountVolume(ctx context.Context, volume api.UID, device string) error {
	devices := lostDevices(volume)
	if device != "" {
		devices = append(devices, device)
	}
	dirs, err := DirsOf(append(devices, loopsOn(devices)...)...)
	if err != nil {
		return err
	}
	if err := unmount(dirs); err != nil {
		return err
	}
	err = endLoops(ctx, loopsOn(devices)) // of an interrupted mount; the others end with their mounts
	if len(loopsOn(devices)) == 0 {
		return nil
	}
	return err
}

// unmount unmounts folders, the last one first, because later mounts may lie below earlier mounts.
func unmount(dirs []string) error {
	for _, dir := range slices.Backward(dirs) {
		if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil {
			if errors.Is(err, unix.EBUSY) {
				return api.Errorf(api.InUse, "%s is in use: end the programs that use it (`fuser -vm %s` lists them) and "+
					"try again", dir, dir)
			}
			return api.Errorf(api.Other, "umount %s: %w", dir, err)
		}
	}
	return nil
}

// Mounted is a line of this machine's mount table.
type Mounted struct{ Device, Dir, FS string }

// MountsWhere returns the mounts that match.
func MountsWhere(match func(Mounted) bool) ([]Mounted, error) {
	var out []Mounted
	_, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		e := Mounted{Device: m.Source, Dir: m.Mountpoint, FS: m.FSType}
		if match(e) {
			out = append(out, e)
		}
		return true, false
	})
	return out, err
}

// OnDevice matches the mounts of a device.
func OnDevice(device string) func(Mounted) bool {
	return func(e Mounted) bool { return device != "" && e.Device == device }
}

// DirsOf returns the folders where devices are mounted on this machine, in the order of the mounts.
func DirsOf(devices ...string) ([]string, error) {
	on, err := MountsWhere(func(e Mounted) bool { return e.Device != "" && slices.Contains(devices, e.Device) })
	var dirs []string
	for _, e := range on {
		dirs = append(dirs, e.Dir)
	}
	return dirs, err
}

// CheckDir refuses a folder with content, because a mount would hide the content.
func CheckDir(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return api.Errorf(api.Invalid, "cannot mount at %s: %w", dir, err)
	}
	on, err := MountsWhere(func(e Mounted) bool { return e.Dir == dir })
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
