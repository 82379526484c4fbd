package node

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// device is a block device of this node.
type device struct {
	volume       string // the device's volume
	path         string // resolved
	major, minor int
}

func openDevice(volume, path string) (device, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return device{}, api.Errorf(api.Unavailable, "device %s: %w", path, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(real, &st); err != nil {
		return device{}, api.Errorf(api.Unavailable, "device %s: %w", real, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return device{}, api.Errorf(api.Unavailable, "%s is not a block device", real)
	}
	return device{volume: volume, path: real, major: int(unix.Major(st.Rdev)), minor: int(unix.Minor(st.Rdev))}, nil
}

func (d device) sysfsPath() string { return fmt.Sprintf("/sys/dev/block/%d:%d", d.major, d.minor) }

// size is the device's size in bytes.
func (d device) size() (int64, error) {
	n, err := sysNumbers(filepath.Join(d.sysfsPath(), "size"))
	if err != nil || len(n) == 0 {
		return 0, api.Errorf(api.Unavailable, "size of %s: %w", d.path, err)
	}
	return n[0] * 512, nil
}

// looksBlank samples the device: both ends, where labels and tables are, and some blocks between.
func (d device) looksBlank() (bool, error) {
	size, err := d.size()
	if err != nil {
		return false, err
	}
	f, err := os.Open(d.path)
	if err != nil {
		return false, api.Errorf(api.Unavailable, "look at device %s: %w", d.path, err)
	}
	defer f.Close()
	const ends, samples = 1 << 20, 64
	buf := make([]byte, ends)
	zero := make([]byte, ends)
	look := func(off int64, n int64) (bool, error) {
		b := buf[:min(n, size-off)]
		if _, err := io.ReadFull(io.NewSectionReader(f, off, int64(len(b))), b); err != nil {
			return false, api.Errorf(api.Unavailable, "look at device %s: %w", d.path, err)
		}
		return bytes.Equal(b, zero[:len(b)]), nil
	}
	for _, off := range []int64{0, max(size-ends, 0)} {
		if ok, err := look(off, ends); !ok || err != nil {
			return false, err
		}
	}
	for i := range int64(samples) {
		if ok, err := look(size/samples*i/api.BlockSize*api.BlockSize, api.BlockSize); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

func sysNumbers(path string) ([]int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out []int64
	for f := range strings.FieldsSeq(string(b)) {
		var n int64
		if _, err := fmt.Sscan(f, &n); err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	return out, nil
}

// ownsMount reports whether a line of the mount table is a mount of the device's file system, or of the file that shows
// the volume's device to workloads.
func (d device) ownsMount(m *mountinfo.Info) (filesystem, block bool) {
	filesystem = (m.Major == d.major && m.Minor == d.minor) || (m.FSType == "btrfs" && m.Source == d.path)
	return filesystem, d.showsMine(m)
}

// resolveFolder follows links in the folder of a path, but not the path itself, which may be a dead mount.
func resolveFolder(path string) (string, error) {
	path = filepath.Clean(path)
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

// mountAt is the top mount at exactly this path, or nil. mountAt reads the mount table alone, so that a dead device
// cannot block the caller.
func mountAt(path string) (*mountinfo.Info, error) {
	real, err := resolveFolder(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, api.Errorf(api.Other, "path %s: %w", path, err)
	}
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != real, false })
	if err != nil {
		return nil, api.Errorf(api.Other, "read the mount table: %w", err)
	}
	for _, m := range all {
		// Stacked mounts are parent and child at one path; neither the table's order nor the ids tell which is newer.
		if !slices.ContainsFunc(all, func(over *mountinfo.Info) bool { return over.Parent == m.ID }) {
			return m, nil
		}
	}
	return nil, nil
}

// mountsOf are all mounts of the device's file system or of the device's file, oldest first.
func mountsOf(d device) ([]*mountinfo.Info, error) {
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		a, b := d.ownsMount(m)
		return !a && !b, false
	})
	if err != nil {
		return nil, api.Errorf(api.Other, "read the mount table: %w", err)
	}
	return all, nil
}

// isDeadMount reports whether the mount at a path has become unusable: the device or the server is gone.
func isDeadMount(path string) bool {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	for _, e := range []unix.Errno{unix.ENOTCONN, unix.ESTALE, unix.EIO, unix.ENODEV, unix.ENXIO, unix.EHOSTDOWN} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// isDeviceGone reports whether the device of a mount's file system no longer exists, or no process serves the device.
func isDeviceGone(m *mountinfo.Info) bool {
	if !strings.HasPrefix(m.Source, "/dev/") || m.Major == 0 {
		return false
	}
	size, err := sysNumbers(fmt.Sprintf("/sys/dev/block/%d:%d/size", m.Major, m.Minor))
	if errors.Is(err, fs.ErrNotExist) || (err == nil && len(size) == 1 && size[0] == 0) {
		return true
	}
	d := device{major: m.Major, minor: m.Minor}
	return d.isAt(m.Source) && !deviceAnswers(m.Source)
}

// backingFile returns the name of the file under a loop device in sysfs; empty: not a loop device, or no file.
func backingFile(sysfs string) string {
	b, err := os.ReadFile(filepath.Join(sysfs, "loop", "backing_file"))
	if err != nil {
		return ""
	}
	return filepath.Base(strings.TrimSpace(string(b)))
}

// isOf reports whether a device stands on the file that carries the volume's uid: the number of a removed device may
// belong to any other device now.
func (d device) isOf(volume api.UID) bool {
	key, ours := strings.CutPrefix(backingFile(d.sysfsPath()), "drover-")
	key, _, _ = strings.Cut(key, ".") // the rest is the host's mark
	return ours && key != "" && key == string(volume)
}

// replaces reports whether a mount is of an earlier device of the same volume: both stand on the file that carries
// the volume's name. The earlier device was lost with the processes that served the device.
func (d device) replaces(m *mountinfo.Info) bool {
	mine := backingFile(d.sysfsPath())
	return strings.HasPrefix(mine, "drover-") && mine == backingFile(fmt.Sprintf("/sys/dev/block/%d:%d", m.Major, m.Minor))
}

// unmountPath takes everything off a path, a dead mount even while a program still uses the mount.
func unmountPath(path string) error {
	for range 100 { // more than are ever stacked: a mount under another mount cannot be reached, and stays
		m, err := mountAt(path)
		if m == nil || err != nil {
			return err
		}
		flags := unix.UMOUNT_NOFOLLOW
		if isDeadMount(path) || isDeviceGone(m) {
			flags |= unix.MNT_DETACH
		}
		switch err := unix.Unmount(m.Mountpoint, flags); {
		case errors.Is(err, unix.EBUSY):
			return api.Errorf(api.InUse, "%s is in use: a program has files open there or works in it", path)
		case err != nil && !errors.Is(err, unix.EINVAL): // EINVAL: another call was quicker
			return api.Errorf(api.Other, "unmount %s: %w", path, err)
		}
	}
	return api.Errorf(api.Other, "unmount %s: it stays mounted; is another mount over a folder above it?", path)
}

// bindMount mounts the path from at the path at, read-only on demand.
func bindMount(from, at string, readOnly bool) error {
	if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
		return api.Errorf(api.Other, "bind %s to %s: %w", from, at, err)
	}
	if !readOnly {
		return nil
	}
	// A bind mount inherits the flags of the bound mount; a remount must repeat the flags or the kernel refuses.
	var st unix.Statfs_t
	err := unix.Statfs(at, &st)
	if err == nil {
		flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY)
		flags |= uintptr(st.Flags) &
			(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_NODIRATIME)
		if st.Flags&unix.ST_RELATIME != 0 {
			flags |= unix.MS_RELATIME
		}
		err = unix.Mount("", at, "", flags, "")
	}
	if err != nil {
		err = api.Errorf(api.Other, "make %s read-only: %w", at, err)
		return errors.Join(err, unmountPath(at))
	}
	return nil
}

func isReadOnly(m *mountinfo.Info) bool {
	return slices.Contains(strings.Split(m.Options, ","), "ro")
}

// removeEmpty removes a path that this door made: an empty folder or an empty file, never anything with content.
func removeEmpty(path string) error {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return api.Errorf(api.Other, "path %s: %w", path, err)
	case !st.IsDir() && !(st.Mode().IsRegular() && st.Size() == 0):
		return api.Errorf(api.InUse, "%s is neither an empty folder nor an empty file: not removed", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return api.Errorf(api.InUse, "remove %s: %w", path, err)
	}
	return nil
}
