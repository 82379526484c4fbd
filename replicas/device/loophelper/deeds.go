package loophelper

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Short openers (udev, blkid) are gone after this time; a workload is not.
	lookWait = 2 * time.Second
	lookStep = 20 * time.Millisecond
)

// helperMain is the life of a helper.
func helperMain(asked string) error {
	var deed, file string
	var n int
	if _, err := fmt.Sscanf(asked, "%s %d %s", &deed, &n, &file); err != nil {
		return fmt.Errorf("%q is no operation of a loop device: %w", asked, err)
	}
	flags := unix.O_RDONLY
	if deed != deedGrow {
		flags |= unix.O_EXCL
	}
	path := fmt.Sprintf("/dev/loop%d", n)
	d, err := Open(n, flags)
	if !standsOn(n, file) { // an open device does not change hands
		return ErrGone
	}
	if errors.Is(err, unix.EBUSY) {
		return ErrClaimed
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(d) }()
	switch deed {
	case deedClaim:
		return nil
	case deedGrow:
		if _, err := unix.IoctlRetInt(d, unix.LOOP_SET_CAPACITY); err != nil {
			return fmt.Errorf("resize %s: %w", path, err)
		}
		return nil
	case deedClear:
		word := flushed
		if err := unix.Fsync(d); err != nil {
			word = fmt.Sprintf("flush %s: %v", path, err)
		}
		if _, err := fmt.Fprintln(os.Stdout, word); err != nil {
			return nil // the caller is gone
		}
		if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
			return nil // the caller gave up
		}
		return clearLoop(d, n)
	}
	return fmt.Errorf("%q is no operation of a loop device", deed)
}

// Major is the device number of all loop devices.
const Major = 7

// Open opens a loop device, and makes the device's node where the kernel does not keep /dev.
func Open(n, flags int) (int, error) {
	path := fmt.Sprintf("/dev/loop%d", n)
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		err = unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(Major, uint32(n))))
		if err == nil || err == unix.EEXIST {
			fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		}
	}
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	return fd, nil
}

// clearLoop takes a claimed loop device off the file.
func clearLoop(d, n int) error {
	tick := time.NewTicker(lookStep) // nothing tells of openers
	defer tick.Stop()
	for end := time.Now().Add(lookWait); ; <-tick.C {
		late := time.Now().After(end)
		if hasIO(n) { // the device is open; removing the mark below would wait for this I/O and stop all other
			if late {
				return ErrOpen
			}
			continue
		}
		_, err := unix.IoctlRetInt(d, unix.LOOP_CLR_FD)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("clear /dev/loop%d: %w", n, err)
		}
		// Without another opener the kernel has detached the file, or does so when d is closed. Otherwise the kernel
		// has only marked the device to go with the last opener, and clearLoop removes the mark again.
		info, err := unix.IoctlLoopGetStatus64(d)
		if err != nil {
			return nil
		}
		info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
		if err := unix.IoctlLoopSetStatus64(d, info); err != nil {
			return nil
		}
		if late {
			return ErrOpen
		}
	}
}

// hasIO reports whether I/O of the loop device is in progress.
func hasIO(n int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/inflight", n))
	if err != nil {
		return false
	}
	for _, count := range strings.Fields(string(b)) {
		if count != "0" {
			return true
		}
	}
	return false
}

// standsOn asks without the file's server.
func standsOn(n int, file string) bool {
	b, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", n))
	return err == nil && filepath.Base(strings.TrimSpace(string(b))) == file
}
