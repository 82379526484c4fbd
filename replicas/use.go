package replicas

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// useFile names, on a disk, who works on it. Each process of that instance has a shared lock on the file for as long
// as it lives; a name that nobody locks means nothing.
const useFile = "owner"

// useWait is for a process of an earlier start that is being replaced.
const useWait = 3 * time.Second

// takeUse says that the disk at path is instance's, or refuses where another instance works on it: two would give the
// same space away twice, and each would miss what the other made. The disk is given up by closing the file.
func takeUse(ctx context.Context, path, instance string) (_ *os.File, err error) {
	if instance == "" {
		return nil, nil
	}
	f, err := os.OpenFile(filepath.Join(path, useFile), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "disk %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for began := time.Now(); ; {
		// Alone: the name may be written. The step down to a shared lock is not atomic, so what counts is read under it.
		if tryLock(f, unix.LOCK_EX) {
			if err := errors.Join(f.Truncate(0), writeAll(f, instance)); err != nil {
				return nil, api.Errorf(api.Unavailable, "disk %s: who uses it: %w", path, err)
			}
		}
		if tryLock(f, unix.LOCK_SH) {
			b, err := io.ReadAll(io.NewSectionReader(f, 0, 4096))
			if err != nil {
				return nil, api.Errorf(api.Unavailable, "disk %s: who uses it: %w", path, err)
			}
			if string(b) == instance {
				return f, nil
			}
			if time.Since(began) > useWait {
				return nil, api.Errorf(api.InUse, "disk %s is in use by another Drover, %s: stop that one, or choose another "+
					"folder", path, b)
			}
			_ = unix.Flock(int(f.Fd()), unix.LOCK_UN) // not in the way of others meanwhile
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("disk %s: %w", path, ctx.Err())
		}
	}
}

func tryLock(f *os.File, how int) bool {
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}

func writeAll(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}
