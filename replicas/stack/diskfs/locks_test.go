package diskfs

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
)

// TestLockOfAProcessThatIsBeingStarted: TryLock waits for a lock of a starting process, however long the start takes.
func TestLockOfAProcessThatIsBeingStarted(t *testing.T) {
	name := filepath.Join(t.TempDir(), "f")
	open := func() file.Handle {
		h, err := file.OS.Open(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	child, h := open(), open() // child stands for a descriptor which a started process inherited
	defer h.Close()
	if err := Flock(child, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(h, unix.LOCK_EX); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Fatalf("a lock that somebody has: %v", err)
	}
	syscall.ForkLock.Lock() // as the start of a process does
	runs := time.AfterFunc(4*ForkTime, func() {
		_ = child.Close()
		syscall.ForkLock.Unlock()
	})
	defer runs.Stop()
	if err := TryLock(h, unix.LOCK_EX); err != nil {
		t.Fatalf("a lock that a process has until it runs its program: %v", err)
	}

	// The started process closes inherited descriptors a moment after the starting process continues. TryLock gets the
	// lock in at least one of the attempts.
	for range 20 {
		if err := Flock(h, unix.LOCK_UN); err != nil {
			t.Fatal(err)
		}
		child := open()
		if err := Flock(child, unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		syscall.ForkLock.Lock()
		closed := make(chan struct{})
		time.AfterFunc(ForkTime+ForkTime/4, func() {
			syscall.ForkLock.Unlock()
			<-time.After(CloseTime / 4)
			_ = child.Close()
			close(closed)
		})
		err := TryLock(h, unix.LOCK_EX)
		if <-closed; err == nil {
			return
		}
	}
	t.Error("a lock that a process has which runs its program and is closing it is not waited for")
}
