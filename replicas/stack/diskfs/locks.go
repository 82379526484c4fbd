package diskfs

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// Flock takes or frees a flock.
func Flock(h file.Handle, how int) error {
	err := RetryEINTR(func() error { return unix.Flock(int(h.Fd()), how) })
	if err != nil {
		return fmt.Errorf("flock: %w", err)
	}
	return nil
}

// RetryEINTR calls f again after interrupts.
func RetryEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Drain waits until disk I/O of a dead owner has ended. Each I/O holds a reference to the open file of the dead owner,
// and so the flock that Drain takes; the fallocate waits for direct I/O in the inode itself.
func Drain(ctx context.Context, h file.Handle, size int64) error {
	if err := awaitLock(ctx, h, unix.LOCK_EX); err != nil {
		return err
	}
	return awaitIO(h, size)
}

// ForkTime is how long TryLock waits for a process between fork and exec, which has all descriptors of its parent, and
// so the parent's locks.
const ForkTime = 100 * time.Millisecond

// TryLock takes a flock that should be free; EWOULDBLOCK: another process holds the lock.
func TryLock(h file.Handle, how int) error {
	err := lockWithin(ForkTime, h, how)
	if errors.Is(err, unix.EWOULDBLOCK) {
		AwaitForks()
		err = lockWithin(CloseTime, h, how)
	}
	return err
}

// CloseTime is how long TryLock waits after AwaitForks, because a new process closes descriptors a moment after its
// parent continues.
const CloseTime = 20 * time.Millisecond

func lockWithin(limit time.Duration, h file.Handle, how int) error {
	soon, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err := awaitLock(soon, h, how)
	if api.Is(err, api.Busy) {
		return unix.EWOULDBLOCK
	}
	return err
}

// AwaitForks waits until no process is between fork and exec, however long a busy machine takes: then no child holds a
// file that this process closed before.
func AwaitForks() {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
}

// awaitLock takes a flock as soon as the lock is free.
func awaitLock(ctx context.Context, h file.Handle, how int) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if err := Flock(h, how|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return api.Errorf(api.Busy, "disk I/O of its former owner is still in progress: %w", ctx.Err())
		}
	}
}

// awaitIO waits until no direct I/O is in progress in a file of size bytes.
func awaitIO(h file.Handle, size int64) error {
	err := RetryEINTR(func() error {
		return unix.Fallocate(int(h.Fd()), unix.FALLOC_FL_KEEP_SIZE, size, blockSize)
	})
	if err != nil && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.EFBIG) {
		return fmt.Errorf("wait for disk I/O in progress: %w", err)
	}
	return h.Punch(size, blockSize)
}

// settleTime bounds the wait of AwaitQuiet.
const settleTime = 10 * time.Second

// AwaitQuiet waits until no I/O of a dead process writes to a former head: direct I/O holds a reference to the open
// file, and the lock ends with the last reference.
func AwaitQuiet(ctx context.Context, h file.Handle) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	if err := awaitLock(ctx, h, unix.LOCK_SH); err != nil {
		return err
	}
	st, err := h.Stat()
	if err == nil {
		err = awaitIO(h, st.Size())
	}
	return errors.Join(err, Flock(h, unix.LOCK_UN))
}
