package device

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Lost is a loop device whose data process and holder are both dead: all I/O fails, and no process can resume the
// device.
type Lost struct {
	Path   string
	Mounts []string // folders where the device's file system is still mounted
}

// TakeLost detaches the lost loop devices of a volume, at the latest with the last user, and returns the devices that
// still exist. The caller owns the volume's member, so that no other process can be serving the volume.
func (h *Host) TakeLost(key, name string) []Lost {
	h.mu.Lock()
	d, busy := h.devices[key], h.taken[key]
	_, held := h.waiting[key]
	h.mu.Unlock()
	if held || busy {
		return nil
	}
	var out []Lost
	file := h.fileName(key)
	for _, n := range append(loopsOn(file), loopsOn(oldFileName(key))...) {
		if d != nil && d.dev == n {
			continue
		}
		dropLoop(n, file)
		dropLoop(n, oldFileName(key))
		if link := filepath.Join(linkDir, name); d == nil {
			if to, err := os.Readlink(link); err == nil && to == loopPath(n) {
				_ = os.Remove(link)
			}
		}
		if f := loopFile(n); f == file || f == oldFileName(key) {
			out = append(out, Lost{loopPath(n), mountsOfLoop(n)})
		}
	}
	return out
}

// loopsOn are the loop devices on files of the given name.
func loopsOn(file string) []int {
	var out []int
	dirs, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, d := range dirs {
		n, err := strconv.Atoi(strings.TrimPrefix(strings.Split(d, "/")[3], "loop"))
		if err == nil && loopFile(n) == file {
			out = append(out, n)
		}
	}
	return out
}

// mountsOfLoop are the folders where a loop device is mounted in this process's view. Only the mount table is read:
// the file system may not answer.
func mountsOfLoop(n int) []string {
	mounts, _ := mountsOn(n)
	var out []string
	for _, m := range mounts {
		out = append(out, m.Mountpoint)
	}
	return out
}
