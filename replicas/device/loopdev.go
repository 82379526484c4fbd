package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

const (
	loopMajor = 7

	// Openers that only have a look (udev, blkid) are gone after this; a workload is not.
	lookWait = 2 * time.Second
	lookStep = 20 * time.Millisecond
)

func loopPath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

func loopSys(n int, name string) string {
	return filepath.Join("/sys/block", "loop"+strconv.Itoa(n), name)
}

// openLoop opens a loop device, and makes its node where /dev is not kept by the kernel.
func openLoop(n, flags int) (int, error) {
	path := loopPath(n)
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		err = unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajor, uint32(n))))
		if err == nil || err == unix.EEXIST {
			fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		}
	}
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	return fd, nil
}

// setUpLoop puts a free loop device on file.
func setUpLoop(file int, name string, readOnly bool) (int, error) {
	ctl, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, api.Errorf(api.Unsupported, "/dev/loop-control: %w; load the kernel module loop", err)
	}
	defer func() { _ = unix.Close(ctl) }()
	for range 1000 { // others take free devices too
		n, err := unix.IoctlRetInt(ctl, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return -1, fmt.Errorf("find a free loop device: %w", err)
		}
		d, err := openLoop(n, unix.O_RDWR)
		if err != nil {
			return -1, err
		}
		cfg := unix.LoopConfig{Fd: uint32(file), Size: 512}
		cfg.Info.Flags = unix.LO_FLAGS_DIRECT_IO
		if readOnly {
			cfg.Info.Flags |= unix.LO_FLAGS_READ_ONLY
		}
		copy(cfg.Info.File_name[:63], name)
		err = unix.IoctlLoopConfigure(d, &cfg)
		_ = unix.Close(d)
		switch {
		case err == nil:
			return n, nil
		case errors.Is(err, unix.EBUSY):
			continue
		case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL):
			return -1, api.Errorf(api.Unsupported, "set up %s with direct I/O: %w; Drover needs Linux 5.8", loopPath(n), err)
		}
		return -1, fmt.Errorf("set up %s: %w", loopPath(n), err)
	}
	return -1, api.Errorf(api.Busy, "every free loop device was taken by somebody else; try again")
}

// loopFile is the file that loop device n stands on, without asking that file's server.
func loopFile(n int) string {
	b, err := os.ReadFile(loopSys(n, "loop/backing_file"))
	if err != nil {
		return ""
	}
	return filepath.Base(strings.TrimSpace(string(b)))
}

// Hints for findLoop beside a device's number.
const (
	loopUnknown = -1
	loopFresh   = -2 // there cannot be one
)

// findLoop is the loop device that stands on the file of that name, or -1; it looks at hint first.
func findLoop(file string, hint int) int {
	if hint == loopFresh {
		return -1
	}
	if hint >= 0 && loopFile(hint) == file {
		return hint
	}
	dirs, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, d := range dirs {
		n, err := strconv.Atoi(strings.TrimPrefix(strings.Split(d, "/")[3], "loop"))
		if err == nil && loopFile(n) == file {
			return n
		}
	}
	return -1
}

func loopSize(n int) (int64, error) {
	b, err := os.ReadFile(loopSys(n, "size"))
	if err != nil {
		return 0, err
	}
	k, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return k * 512, err
}

// growLoop makes the loop device as large as its file.
func growLoop(n int) error {
	d, err := openLoop(n, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(d) }()
	if _, err := unix.IoctlRetInt(d, unix.LOOP_SET_CAPACITY); err != nil {
		return fmt.Errorf("resize %s: %w", loopPath(n), err)
	}
	return nil
}

// claimLoop opens the device so that nobody can mount it. A device that somebody has claimed, a mounted one for
// example, is refused with kind in use; one that does not stand on file any more with errLoopGone.
func claimLoop(n int, file string) (int, error) {
	d, err := openLoop(n, unix.O_RDONLY|unix.O_EXCL)
	if loopFile(n) != file { // while it is open it changes hands no more
		if err == nil {
			_ = unix.Close(d)
		}
		return -1, errLoopGone
	}
	if errors.Is(err, unix.EBUSY) {
		return -1, api.Errorf(api.InUse, "%s is mounted or held (%s); unmount it first", loopPath(n), holders(n))
	}
	return d, err
}

var errLoopGone = errors.New("the loop device is another one's")

// flushLoop flushes the device from a process of its own. A thread of ours that waits for a device which we serve could
// not end if we are killed meanwhile; with it our files would stay open, and nobody could take over.
func flushLoop(n int) <-chan error {
	done := make(chan error, 1)
	cmd := exec.Command("sync", loopPath(n)) // of the coreutils: fsync(2)
	var out bytes.Buffer
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		done <- fmt.Errorf("flush %s: %w", loopPath(n), err)
		return done
	}
	go func() { // ends with the process, which the kernel ends with its I/O
		if err := cmd.Wait(); err != nil {
			done <- fmt.Errorf("flush %s: %w: %s", loopPath(n), err, strings.TrimSpace(out.String()))
			return
		}
		done <- nil
	}()
	return done
}

func holders(n int) string {
	if names, err := os.ReadDir(loopSys(n, "holders")); err == nil && len(names) > 0 {
		return "by " + names[0].Name()
	}
	return "a file system, or a process"
}

// clearLoop takes a claimed loop device off its file, and closes it. Openers other than d make it kind in use.
func clearLoop(ctx context.Context, n, d int) error {
	defer func() { _ = unix.Close(d) }()
	deadline := time.NewTimer(lookWait)
	defer deadline.Stop()
	for {
		_, err := unix.IoctlRetInt(d, unix.LOOP_CLR_FD)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("clear %s: %w", loopPath(n), err)
		}
		// With no other opener the kernel has let go of the file, or does so when d is closed. Else it only marks
		// the device to go with its last opener, and that mark is taken off again.
		info, err := unix.IoctlLoopGetStatus64(d)
		if err != nil {
			return nil
		}
		info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
		if err := unix.IoctlLoopSetStatus64(d, info); err != nil {
			return nil
		}
		select {
		case <-time.After(lookStep):
		case <-ctx.Done():
			return api.Errorf(api.Busy, "%s is still open: %w", loopPath(n), ctx.Err())
		case <-deadline.C:
			return api.Errorf(api.InUse, "%s is open in some process; end what uses it first", loopPath(n))
		}
	}
}

// dropLoop lets the loop device go with its last opener, if it stands on file still: it may have gone in the meantime,
// and the number be somebody else's by now. While it is open here it is nobody else's.
func dropLoop(n int, file string) {
	if d, err := openLoop(n, unix.O_RDONLY); err == nil {
		if loopFile(n) == file {
			_, _ = unix.IoctlRetInt(d, unix.LOOP_CLR_FD)
		}
		_ = unix.Close(d)
	}
}

// awaitGone returns when loop device n no longer stands on file.
func awaitGone(ctx context.Context, n int, file string) error {
	tick := time.NewTicker(lookStep)
	defer tick.Stop()
	for loopFile(n) == file {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return api.Errorf(api.Busy, "%s does not let go of its file: %w", loopPath(n), ctx.Err())
		}
	}
	return nil
}

// tuneLoop takes away a scheduler, which only costs time on a device that has a queue of its own below. Writing what is
// set already would cost a wait for all processors too.
func tuneLoop(n int) {
	path := loopSys(n, "queue/scheduler")
	if b, err := os.ReadFile(path); err == nil && !strings.Contains(string(b), "[none]") {
		_ = os.WriteFile(path, []byte("none"), 0)
	}
}
