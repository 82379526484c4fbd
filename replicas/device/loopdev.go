package device

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device/loophelper"
)

const pollStep = 20 * time.Millisecond

func loopPath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

func loopSys(n int, name string) string {
	return filepath.Join("/sys/block", "loop"+strconv.Itoa(n), name)
}

// loopFile is the file under loop device n, read without asking the file's server.
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
	loopFresh   = -2 // the file cannot have a loop device
)

// findLoop is the loop device on the named file, or -1; findLoop looks at hint first.
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

// claimLoop checks that no program has claimed a loop device. A mounted device, for example, is refused with kind in
// use; a device no longer on file with loophelper.ErrGone.
func claimLoop(ctx context.Context, n int, file string) error {
	return inUse(n, loophelper.Claim(ctx, n, file))
}

// inUse turns a helper's finding into an error for a user.
func inUse(n int, err error) error {
	switch {
	case errors.Is(err, loophelper.ErrClaimed):
		return api.Errorf(api.InUse, "%s is mounted or held (%s); unmount it first", loopPath(n), loopHolder(n))
	case errors.Is(err, loophelper.ErrOpen):
		return api.Errorf(api.InUse, "%s is open in some process; end that process first", loopPath(n))
	}
	return err
}

func loopHolder(n int) string {
	if names, err := os.ReadDir(loopSys(n, "holders")); err == nil && len(names) > 0 {
		return "by " + names[0].Name()
	}
	return "a file system, or a process"
}

// dropLoop detaches the loop device from file with the last opener. The number may belong to another device by now,
// so dropLoop first opens the device, which keeps the number from changing hands, and then looks at the file. The
// device's I/O fails already, so that dropLoop does not wait.
func dropLoop(n int, file string) {
	if d, err := loophelper.Open(n, unix.O_RDONLY); err == nil {
		if loopFile(n) == file {
			_, _ = unix.IoctlRetInt(d, unix.LOOP_CLR_FD)
		}
		_ = unix.Close(d)
	}
}

// awaitGone returns when loop device n no longer stands on file.
func awaitGone(ctx context.Context, n int, file string) error {
	tick := time.NewTicker(pollStep)
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
