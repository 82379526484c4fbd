package replicas

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

// useFile is what the processes of an instance lock, each shared and for as long as it lives. It is made with the disk,
// so that a full one can be locked. nameFile says in words whose the locks are, where there is room for it.
const (
	useFile  = "drover-disk.json"
	nameFile = "owner"
)

// useWait is for a process of an earlier start that is being replaced.
const useWait = 3 * time.Second

// takeUse says that the disk at path is instance's, or refuses where another instance works on it: two would give the
// same space away twice, and each would miss what the other made. The disk is given up by closing the file.
//
// Each instance has a byte of the file to lock, far beyond its end, by its name. One's own byte is locked before the
// others are looked at, so two that come at once both see each other; then both let go and try again.
func takeUse(ctx context.Context, path, instance string) (_ *os.File, err error) {
	if instance == "" {
		return nil, nil
	}
	f, err := os.OpenFile(filepath.Join(path, useFile), os.O_RDWR|unix.O_CLOEXEC, 0)
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
			return nil, api.Errorf(api.Unavailable, "disk %s: lock %s: %w", path, useFile, err)
		}
		before, err1 := locked(f, first-1, mine-first+1)
		after, err2 := locked(f, mine+1, 0)
		switch {
		case errors.Join(err1, err2) != nil:
			return nil, api.Errorf(api.Unavailable, "disk %s: lock %s: %w", path, useFile, errors.Join(err1, err2))
		case !before && !after:
			// For people only: a full disk need not have room for it. A disk that hangs may hang at this, too.
			name := filepath.Join(path, nameFile)
			if is, err := os.ReadFile(name); err != nil || string(is) != instance {
				_ = os.WriteFile(name, []byte(instance), 0o600)
			}
			return f, nil
		case time.Since(began) > useWait:
			who, _ := os.ReadFile(filepath.Join(path, nameFile))
			return nil, api.Errorf(api.InUse, "disk %s is in use by another Drover (%s): stop that one, or choose another "+
				"folder", path, who)
		}
		if err := lockBytes(f, unix.F_OFD_SETLK, unix.F_UNLCK, mine, 1); err != nil {
			return nil, api.Errorf(api.Unavailable, "disk %s: unlock %s: %w", path, useFile, err)
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

// locked reports whether somebody else has a lock on n bytes; 0: all that follow.
func locked(f *os.File, from, n int64) (bool, error) {
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: from, Len: n}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l)
	return l.Type != unix.F_UNLCK, err
}
