package loophelper

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// Descriptors that the set-up helper inherits.
const (
	treeFd = 3 + iota // of the mount
	lockFd            // of the set-up's lock, open until the helper ends
)

// SetUp puts a free loop device on the one file of a mount, and returns the device's number. Meanwhile the kernel
// opens and flushes the file, and waits for the process that serves the file. If that process dies, the helper lives
// on until the successor has answered the kernel. The helper keeps the lock until its end, so a successor with the
// lock finds either the finished device or none.
func SetUp(tree, lock int, file, name string, readOnly bool) (n int, err error) {
	var inherited []*os.File
	defer func() {
		for _, f := range inherited {
			_ = f.Close()
		}
	}()
	for _, fd := range []int{tree, lock} {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("helper for a loop device: %w", err)
		}
		inherited = append(inherited, os.NewFile(uintptr(own), ""))
	}
	flag := 0
	if readOnly {
		flag = 1
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %s %s", variable, deedSetUp, flag, file, name))
	cmd.ExtraFiles = inherited
	out, err := cmd.Output()
	if err != nil {
		said := ""
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			said = string(exit.Stderr)
		}
		return -1, helperError(err, said)
	}
	if n, err = strconv.Atoi(strings.TrimSpace(string(out))); err != nil {
		return -1, fmt.Errorf("helper for a loop device: %w", err)
	}
	return n, nil
}

// setUp is the life of a helper of SetUp.
func setUp(asked string) error {
	var deed, file, name string
	var flag int
	if _, err := fmt.Sscanf(asked, "%s %d %s %s", &deed, &flag, &file, &name); err != nil {
		return fmt.Errorf("%q is no operation of a loop device: %w", asked, err)
	}
	unix.CloseOnExec(treeFd)
	unix.CloseOnExec(lockFd)
	fd, err := OpenFile(treeFd, file, flag == 1)
	if err != nil {
		return fmt.Errorf("open the device's file: %w", err)
	}
	n, err := Configure(fd, name, flag == 1)
	_ = unix.Close(fd)
	if err != nil {
		return err
	}
	removeScheduler(n)
	_, _ = fmt.Fprintln(os.Stdout, n) // the parent may have died: the successor finds the device
	return nil
}

// OpenFile opens the one file of a mount.
func OpenFile(tree int, name string, readOnly bool) (int, error) {
	flags := unix.O_RDWR | unix.O_CLOEXEC | unix.O_NOFOLLOW
	if readOnly {
		flags = unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOFOLLOW
	}
	for {
		fd, err := unix.Openat(tree, name, flags, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// Configure puts a free loop device on a file that another process serves.
func Configure(file int, name string, readOnly bool) (int, error) {
	ctl, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, api.Errorf(api.Unsupported, "/dev/loop-control: %w; load the kernel module loop", err)
	}
	defer func() { _ = unix.Close(ctl) }()
	for range 1000 { // other programs take free devices too
		n, err := unix.IoctlRetInt(ctl, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return -1, fmt.Errorf("find a free loop device: %w", err)
		}
		d, err := Open(n, unix.O_RDWR)
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
			return -1, api.Errorf(api.Unsupported, "set up /dev/loop%d with direct I/O: %w; Drover needs Linux 5.8", n, err)
		}
		return -1, fmt.Errorf("set up /dev/loop%d: %w", n, err)
	}
	return -1, api.Errorf(api.Busy, "other programs took every free loop device; try again")
}

// removeScheduler removes the I/O scheduler, which only costs time above a file with its own queue. removeScheduler
// does not write where no scheduler is set: each write makes the kernel wait for all processors.
func removeScheduler(n int) {
	path := fmt.Sprintf("/sys/block/loop%d/queue/scheduler", n)
	if b, err := os.ReadFile(path); err == nil && !strings.Contains(string(b), "[none]") {
		_ = os.WriteFile(path, []byte("none"), 0)
	}
}
