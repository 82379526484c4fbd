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

const lookStep = 20 * time.Millisecond

func loopPath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

func loopSys(n int, name string) string {
	return filepath.Join("/sys/block", "loop"+strconv.Itoa(n), name)
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

// claimLoop sees whether nobody has a loop device for himself. A mounted one, for example, is refused with kind in use;
// one that does not stand on file any more with loophelper.ErrGone.
func claimLoop(ctx context.Context, n int, file string) error {
	return inUse(n, loophelper.Claim(ctx, n, file))
}

// inUse tells a user what a helper found.
func inUse(n int, err error) error {
	switch {
	case errors.Is(err, loophelper.ErrClaimed):
		return api.Errorf(api.InUse, "%s is mounted or held (%s); unmount it first", loopPath(n), holders(n))
	case errors.Is(err, loophelper.ErrOpen):
		return api.Errorf(api.InUse, "%s is open in some process; end what uses it first", loopPath(n))
	}
	return err
}

func holders(n int) string {
	if names, err := os.ReadDir(loopSys(n, "holders")); err == nil && len(names) > 0 {
		return "by " + names[0].Name()
	}
	return "a file system, or a process"
}

// dropLoop lets the loop device go with its last opener, if it stands on file still: it may have gone in the meantime,
// and the number be somebody else's by now. While it is open here it is nobody else's. Its I/O fails already, so that
// nothing waits for it.
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
