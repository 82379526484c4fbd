package disks

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// Every process of an instance locks lockFile, shared, until the process ends. The file is created with the disk, so
// that a full disk can be locked. nameFile holds the instance's name for error messages, if the disk has room.
const (
	lockFile = "drover-disk.json"
	nameFile = "owner"
)

// lockWait covers the end of an earlier process of another instance.
const lockWait = 3 * time.Second

// lockDisk locks the disk at path for an instance, or refuses a disk that another instance has locked: two instances
// would allocate the same space twice, and neither would see the files of the other. Closing the file gives the disk
// back.
//
// Each instance locks one byte, far beyond the file's end, by the hash of its name. A process locks its own byte before
// the check for other bytes, so that two processes that start together see each other; both then unlock and retry.
func lockDisk(ctx context.Context, path, instance string) (_ *os.File, err error) {
	if instance == "" {
		return nil, nil
	}
	f, err := os.OpenFile(filepath.Join(path, lockFile), os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "disk %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	h := fnv.New32a()
	_, _ = h.Write([]byte(instance)) // never fails
	first, mine := int64(1)<<40, int64(1)<<40+int64(h.Sum32())
	for began := time.Now(); ; {
		if err := lockBytes(f, unix.F_OFD_SETLK, unix.F_RDLCK, mine, 1); err != nil {
			return nil, api.Errorf(api.Unavailable, "disk %s: lock %s: %w", path, lockFile, err)
		}
		before, err1 := isLocked(f, first-1, mine-first+1)
		after, err2 := isLocked(f, mine+1, 0)
		switch {
		case errors.Join(err1, err2) != nil:
			return nil, api.Errorf(api.Unavailable, "disk %s: lock %s: %w", path, lockFile, errors.Join(err1, err2))
		case !before && !after:
			// The name is for people only; the write may fail on a full disk.
			name := filepath.Join(path, nameFile)
			if is, err := os.ReadFile(name); err != nil || string(is) != instance {
				_ = os.WriteFile(name, []byte(instance), 0o600)
			}
			return f, nil
		case time.Since(began) > lockWait:
			who, _ := os.ReadFile(filepath.Join(path, nameFile))
			return nil, api.Errorf(api.InUse, "disk %s is in use by another Drover (%s): stop that one, or choose another "+
				"folder", path, who)
		}
		if err := lockBytes(f, unix.F_OFD_SETLK, unix.F_UNLCK, mine, 1); err != nil {
			return nil, api.Errorf(api.Unavailable, "disk %s: unlock %s: %w", path, lockFile, err)
		}
		select {
		case <-time.After(10*time.Millisecond + rand.N(20*time.Millisecond)):
		case <-ctx.Done():
			return nil, fmt.Errorf("disk %s: %w", path, ctx.Err())
		}
	}
}

func lockBytes(f *os.File, cmd int, how int16, from, n int64) error {
	return unix.FcntlFlock(f.Fd(), cmd, &unix.Flock_t{Type: how, Whence: io.SeekStart, Start: from, Len: n})
}

// isLocked reports whether another process has a lock on n bytes; with n 0, on any byte from there on.
func isLocked(f *os.File, from, n int64) (bool, error) {
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: from, Len: n}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l)
	return l.Type != unix.F_UNLCK, err
}
