package driver

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// openState makes the state folder and takes it for this process. The lock lasts until the file is closed.
func openState(dir string) (*os.File, error) {
	for _, d := range []string{dir, filepath.Join(dir, "run"), filepath.Join(dir, "log")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, api.Errorf(api.Unavailable, "state folder: %w", err)
		}
	}
	if err := refuseOwnVolume(dir); err != nil {
		return nil, err
	}
	lock, err := lockFile(filepath.Join(dir, "run", "serve.lock"))
	if err != nil {
		return nil, api.Errorf(api.InUse, "another `drover serve` runs on state folder %s: stop it, or choose another "+
			"folder with --state-dir", dir)
	}
	return lock, nil
}

// refuseOwnVolume refuses a folder on a volume of ours: serving that volume would need the folder, and the folder the
// volume.
func refuseOwnVolume(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return api.Errorf(api.Unavailable, "%s: %w", dir, err)
	}
	major, minor := unix.Major(st.Dev), unix.Minor(st.Dev)
	devs := []string{fmt.Sprintf("%d:%d", major, minor)}
	if major == 0 { // btrfs and others have no device number of their own: ask the mount table
		devs = mountSources(major, minor)
	}
	for _, dev := range devs {
		if name := ownVolume(filepath.Join("/sys/dev/block", dev), 0); name != "" {
			return api.Errorf(api.Invalid, "%s is on %s, a Drover volume: choose a folder on a disk of the machine",
				dir, name)
		}
	}
	return nil
}

// mountSources are the block devices behind mounts with device number major:minor, as major:minor themselves.
func mountSources(major, minor uint32) []string {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close()
	var out []string
	for sc := bufio.NewScanner(f); sc.Scan(); {
		left, right, ok := strings.Cut(sc.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 3 || len(r) < 2 || l[2] != fmt.Sprintf("%d:%d", major, minor) {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(r[1], &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			out = append(out, fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
		}
	}
	return out
}

// ownVolume names the Drover device at or below a block device in sysfs, or returns "".
func ownVolume(sys string, depth int) string {
	if depth > 8 {
		return ""
	}
	if real, err := filepath.EvalSymlinks(sys); err == nil {
		sys = real
	}
	links, _ := filepath.Glob("/dev/drover/*")
	for _, l := range links {
		if to, err := filepath.EvalSymlinks(l); err == nil && filepath.Base(to) == filepath.Base(sys) {
			return l
		}
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
