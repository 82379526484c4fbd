package device

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// Below names the Drover volume under a folder or file, directly or through partitions, device mapper and loop
// devices; empty: none. A server of volumes must not keep its own data on a volume: each would wait for the other.
func Below(path string) (name string, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", api.Errorf(api.Unavailable, "%s: %w", path, err)
	}
	major, minor := unix.Major(st.Dev), unix.Minor(st.Dev)
	devs := []string{fmt.Sprintf("%d:%d", major, minor)}
	if major == 0 { // btrfs and others have no own device number: ask the mount table
		devs = mountSources(major, minor)
	}
	for _, dev := range devs {
		if name := ownVolume(filepath.Join("/sys/dev/block", dev), 0); name != "" {
			return name, nil
		}
	}
	return "", nil
}

// mountSources are the block devices behind mounts with device number major:minor, as major:minor themselves.
func mountSources(major, minor uint32) []string {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Major != int(major) || m.Minor != int(minor), false
	})
	if err != nil {
		return nil
	}
	var out []string
	for _, m := range mounts {
		var st unix.Stat_t
		if unix.Stat(m.Source, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			out = append(out, fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
		}
	}
	return out
}

// ourFile matches the kernel's name of the file behind a device of Drover: at the top of a mount that is in no tree.
var ourFile = regexp.MustCompile(`^/drover-[^/]+\.[0-9a-f]{8}$`)

// isDroverLoop reports whether a loop device belongs to Drover, whatever its name.
func isDroverLoop(sys string) bool {
	b, err := os.ReadFile(filepath.Join(sys, "loop", "backing_file"))
	return err == nil && ourFile.MatchString(strings.TrimSpace(string(b)))
}

// ownVolume names the Drover device at or below a block device in sysfs, or returns "".
func ownVolume(sys string, depth int) string {
	if depth > 8 {
		return ""
	}
	if real, err := filepath.EvalSymlinks(sys); err == nil {
		sys = real
	}
	dev := "/dev/" + filepath.Base(sys)
	for name, to := range readLinks() {
		if _, _, ok := loopOwner(to); ok && to == dev { // a name may outlive its device
			return filepath.Join(linkDir, name)
		}
	}
	if isDroverLoop(sys) { // no name, or another volume's: of an instance beside, or left behind
		return dev
	}
	if _, err := os.Stat(filepath.Join(sys, "partition")); err == nil {
		return ownVolume(filepath.Dir(sys), depth+1)
	}
	slaves, _ := filepath.Glob(filepath.Join(sys, "slaves", "*"))
	for _, s := range slaves {
		if name := ownVolume(s, depth+1); name != "" {
			return name
		}
	}
	// A loop device over a file on a volume of ours is no better than the volume.
	if b, err := os.ReadFile(filepath.Join(sys, "loop", "backing_file")); err == nil {
		var st unix.Stat_t
		if unix.Stat(strings.TrimSpace(string(b)), &st) == nil && unix.Major(st.Dev) != 0 {
			return ownVolume(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), depth+1)
		}
	}
	return ""
}
