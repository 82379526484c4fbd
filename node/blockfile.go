package node

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/validation"

	"drover.io/drover/api"
)

// shownDir holds one device file for each volume that is published as a block device. Workloads get a bind mount of
// the file: so the mount table names the volume of a mount. The device's own file cannot tell, since after a crash
// its number may belong to another volume while old mounts of the file still exist.
const shownDir = "/dev/drover-published"

// deviceFile returns the file that is bound to the workloads of a volume.
func (d device) deviceFile() string { return filepath.Join(shownDir, d.volume) }

// makeDeviceFile makes the file, again if an earlier life of the volume left a file of another device.
func (d device) makeDeviceFile() error {
	dev := unix.Mkdev(uint32(d.major), uint32(d.minor))
	fail := func(err error) error {
		return api.Errorf(api.Other, "make a device file of volume %s in %s: %w", d.volume, shownDir, err)
	}
	if d.isAt(d.deviceFile()) {
		return nil
	}
	var err error
	for range 10 { // the last volume to go takes the folder along
		if err = os.MkdirAll(shownDir, 0o755); err != nil {
			return fail(err)
		}
		next := filepath.Join(shownDir, "~"+d.volume) // no volume has such a name
		if err = os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fail(err)
		}
		if err = unix.Mknod(next, unix.S_IFBLK|0o660, int(dev)); err == nil {
			err = os.Rename(next, d.deviceFile())
		}
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

// isAt reports whether the file at a path is this device.
func (d device) isAt(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK &&
		st.Rdev == unix.Mkdev(uint32(d.major), uint32(d.minor))
}

// showsAny reports whether a mount is of such a file, of any volume.
func showsAny(m *mountinfo.Info) bool {
	return strings.Contains(m.Root, "/"+filepath.Base(shownDir)+"/")
}

func (d device) showsMine(m *mountinfo.Info) bool {
	return strings.HasSuffix(m.Root, "/"+filepath.Base(shownDir)+"/"+d.volume)
}

// removeDeviceFile removes the file of a volume that is no longer published.
func removeDeviceFile(volume string) error {
	if len(validation.IsDNS1123Subdomain(volume)) > 0 {
		return nil // no volume has such a name
	}
	d := device{volume: volume}
	if _, err := os.Lstat(d.deviceFile()); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	left, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !d.showsMine(m), false })
	if err != nil {
		return api.Errorf(api.Other, "read the mount table: %w", err)
	}
	if len(left) > 0 {
		return nil
	}
	if err := os.Remove(d.deviceFile()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return api.Errorf(api.Other, "remove the device file of volume %s: %w", volume, err)
	}
	_ = os.Remove(shownDir) // only an empty folder
	return nil
}
