package diskfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// Lifetime names the time during which a disk keeps acknowledged writes that were not flushed: one boot of the machine
// and one mount of the file system. A restart loses such writes, and so does a shutdown of the file system.
type Lifetime struct {
	Boot  string
	Mount string // empty: the kernel does not tell mounts apart, and the boot alone counts
}

// Ended reports whether l is over now. A record of an older version names no mount.
func (l Lifetime) Ended(now Lifetime) bool {
	return l.Boot != now.Boot || l.Mount != "" && now.Mount != "" && l.Mount != now.Mount
}

// CurrentLifetime reads the lifetime of the file system below a folder.
func CurrentLifetime(path string) (Lifetime, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Lifetime{}, fmt.Errorf("boot id of the machine: %w", err)
	}
	mount, err := MountIdentity("/sys", path)
	if err != nil {
		return Lifetime{}, fmt.Errorf("mount of the file system: %w", err)
	}
	return Lifetime{strings.TrimSpace(string(b)), mount}, nil
}

// MountIdentity names the mount of the file system below path: ext4, xfs and btrfs make a folder in sysfs for each file
// system that they mount, and remove the folder with the last mount point. The kernel does not reuse the number of that
// folder's inode in one boot (fs/kernfs counts a generation), while it reuses device numbers, and mount ids differ in
// each container. Other file systems have no name here.
func MountIdentity(sysfs, path string) (string, error) {
	var st unix.Statfs_t
	if err := RetryEINTR(func() error { return unix.Statfs(path, &st) }); err != nil {
		return "", err
	}
	kind := FSName(st.Type)
	var name string
	var err error
	switch kind {
	case "ext4", "xfs":
		name, err = blockDeviceName(sysfs, path)
	case "btrfs":
		name, err = btrfsUUID(path)
	default:
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var folder unix.Stat_t
	err = RetryEINTR(func() error { return unix.Stat(filepath.Join(sysfs, "fs", kind, name), &folder) })
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil // a container without sysfs, or an old kernel
	}
	if err != nil {
		return "", fmt.Errorf("sysfs folder of %s: %w", name, err)
	}
	return fmt.Sprintf("%s/%s/%d", kind, name, folder.Ino), nil
}

// blockDeviceName is the kernel's name of the block device below path, "sda1".
func blockDeviceName(sysfs, path string) (string, error) {
	var st unix.Stat_t
	if err := RetryEINTR(func() error { return unix.Stat(path, &st) }); err != nil {
		return "", err
	}
	link := filepath.Join(sysfs, "dev/block", fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	to, err := os.Readlink(link)
	if errors.Is(err, fs.ErrNotExist) {
		return "none", nil // then the file system's folder is missing, too
	}
	return filepath.Base(to), err
}

// btrfsUUID is the UUID of the btrfs file system below path (BTRFS_IOC_FS_INFO, linux/btrfs.h).
func btrfsUUID(path string) (string, error) {
	const fsInfo = 0x8400941f
	var info struct {
		maxID, devices uint64
		fsid           [16]byte
		_              [1024 - 32]byte
	}
	dir, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), fsInfo, uintptr(unsafe.Pointer(&info)))
	if errno != 0 {
		return "", fmt.Errorf("information about the btrfs file system: %w", errno)
	}
	return uuid.UUID(info.fsid).String(), nil
}
