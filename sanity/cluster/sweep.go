package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Sweep removes the remains of clusters whose owners were killed.
func Sweep(log io.Writer) {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "alive")); err != nil {
			continue // the cluster is starting
		}
		lock, err := lockDir(dir, 0)
		if err != nil {
			continue // the cluster is alive
		}
		fmt.Fprintf(log, "removing the rest of an earlier cluster: %s\n", dir)
		if err := remove(dir); err != nil {
			fmt.Fprintf(log, "%s: %v\n", dir, err)
		}
		_ = lock.Close()
	}
}

// remove removes the loop devices and the files of a cluster whose machines are off.
func remove(dir string) error {
	var errs []error
	volumes := map[string]bool{}
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if d.IsDir() {
			_ = setImmutable(path, false)
			return nil
		}
		if d.Type().IsRegular() {
			_ = setImmutable(path, false)
		}
		if d.Name() == "stack.json" {
			for _, uid := range volumeUIDs(path) {
				volumes[uid] = true
			}
		}
		return nil
	})
	b, err := os.ReadFile(filepath.Join(dir, "volumes")) // names the volumes of unmounted disks
	if err == nil {
		for uid := range strings.FieldsSeq(string(b)) {
			volumes[uid] = true
		}
	}
	for n, file := range loops() {
		for uid := range volumes {
			if strings.Contains(file, "drover-"+uid) {
				errs = append(errs, detachLoop(n, file))
			}
		}
	}
	return errors.Join(append(errs, os.RemoveAll(dir))...)
}

// volumeUIDs returns the volumes in a replica's record.
func volumeUIDs(path string) []string {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	var uids []string
	var look func(v any)
	look = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, x := range v {
				if s, ok := x.(string); ok && k == "volumeUID" {
					uids = append(uids, s)
				}
				look(x)
			}
		case []any:
			for _, x := range v {
				look(x)
			}
		}
	}
	var v any
	if json.Unmarshal(b, &v) == nil {
		look(v)
	}
	return uids
}

// loops returns the loop devices in use and their files.
func loops() map[string]string {
	out := map[string]string{}
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil {
			out[strings.Split(f, "/")[3]] = strings.TrimSpace(string(b))
		}
	}
	return out
}

// detachLoop detaches a loop device from a file, unless the device has another file by now: an open device keeps its
// file.
func detachLoop(name, file string) error {
	fd, err := unix.Open("/dev/"+name, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loop device %s stays: %w", name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if loops()[name] != file {
		return nil
	}
	if err := unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("loop device %s stays: %w", name, err)
	}
	return nil
}

// setImmutable sets or clears the flag that forbids even root to change a file.
func setImmutable(path string, on bool) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	next := flags &^ immutableFlag
	if on {
		next = flags | immutableFlag
	}
	if next == flags {
		return nil
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(next))
}

const immutableFlag = 0x10 // FS_IMMUTABLE_FL
