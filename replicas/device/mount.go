package device

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// initWait is how long the kernel may take to greet a new connection, in milliseconds.
const initWait = 10_000

// mountFuse makes a FUSE file system that is attached to no tree: no mount table shows the mount, and the kernel
// removes the mount with the last descriptor. resend says whether the kernel can repeat requests that a dead server
// left unanswered.
func mountFuse() (fuse, tree int, resend bool, err error) {
	fuse, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, -1, false, api.Errorf(api.Unsupported, "/dev/fuse: %w; load the kernel module fuse", err)
	}
	if tree, err = mountTree(fuse); err == nil {
		if resend, err = answerInit(fuse); err == nil {
			return fuse, tree, resend, nil
		}
		_ = unix.Close(tree)
	}
	_ = unix.Close(fuse)
	return -1, -1, false, err
}

func mountTree(fuse int) (int, error) {
	fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, api.Errorf(api.Unsupported, "fsopen of fuse: %w; Drover needs Linux 5.8 with FUSE", err)
	}
	defer func() { _ = unix.Close(fs) }()
	for _, kv := range [][2]string{
		{"source", "drover"}, {"fd", fmt.Sprint(fuse)}, {"rootmode", "40700"}, {"user_id", "0"}, {"group_id", "0"},
		{"max_read", fmt.Sprint(maxIO)},
	} {
		if err := unix.FsconfigSetString(fs, kv[0], kv[1]); err != nil {
			return -1, fmt.Errorf("fuse option %s=%s: %w", kv[0], kv[1], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("create a fuse file system: %w", err)
	}
	tree, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return -1, fmt.Errorf("fsmount of fuse: %w", err)
	}
	return tree, nil
}

// answerInit answers the kernel's INIT.
func answerInit(fuse int) (resend bool, err error) {
	fds := []unix.PollFd{{Fd: int32(fuse), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, initWait)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("wait for the kernel's fuse greeting: %w", err)
		}
		if n == 0 {
			return false, api.Errorf(api.Unavailable, "the kernel sent no fuse greeting within %d ms", initWait)
		}
		break
	}
	buf := make([]byte, page+maxIO)
	n, err := unix.Read(fuse, buf)
	if err != nil {
		return false, fmt.Errorf("read the kernel's fuse greeting: %w", err)
	}
	h := *view[inHeader](buf)
	in := *view[initIn](buf[inSize:])
	if n < inSize || h.opcode != opInit || in.major != protoMajor || in.minor < 31 {
		return false, api.Errorf(api.Unsupported, "fuse protocol %d.%d (request %d); Drover needs Linux 5.8", in.major,
			in.minor, h.opcode)
	}
	offered := uint64(in.flags)
	if offered&capInitExt != 0 {
		offered |= uint64(in.flags2) << 32
	}
	f := offered & (capAsyncRead | capBigWrites | capAsyncDIO | capMaxPages | capInitExt | capResend)
	out := buf[:outSize]
	k := put(buf[outSize:], initOut{
		major: protoMajor, minor: min(in.minor, protoMinor), readahead: in.readahead,
		flags: uint32(f), flags2: uint32(f >> 32), background: 1024, congestion: 1024,
		maxWrite: maxIO, timeGran: 1, maxPages: maxIO / page,
	})
	*view[outHeader](out) = outHeader{uint32(outSize + k), 0, h.unique}
	if _, err := unix.Write(fuse, buf[:outSize+k]); err != nil {
		return false, fmt.Errorf("answer the kernel's fuse greeting: %w", err)
	}
	return offered&capResend != 0, nil
}

var resendSupported = sync.OnceValue(func() error {
	fuse, tree, resend, err := mountFuse()
	if err != nil {
		return err
	}
	_ = unix.Close(tree)
	_ = unix.Close(fuse)
	if resend {
		return nil
	}
	var u unix.Utsname
	_ = unix.Uname(&u)
	return api.Errorf(api.Unsupported, "Linux %s cannot repeat unanswered FUSE requests (6.9 and later can): a device "+
		"whose data process dies fails its I/O and must be attached again", unix.ByteSliceToString(u.Release[:]))
})

// ResendSupported is nil when devices outlive the process that serves them, which takes Linux 6.9. Otherwise the
// error is of kind unsupported and explains so to the user.
func ResendSupported() error { return resendSupported() }
