package uring

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/suite"
)

// frozen mounts a file system with some files, which takes no change until thaw.
func frozen(t *testing.T, files int) (fds []int, thaw func()) {
	t.Helper()
	sh := func(format string, args ...any) error {
		out, err := exec.Command("sh", "-ec", fmt.Sprintf(format, args...)).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}
	dir := t.TempDir()
	on := filepath.Join(dir, "on")
	if err := sh("mkdir %s; truncate -s 64M %s/image; mkfs.ext4 -q %[2]s/image; mount -o loop %[2]s/image %[1]s", on, dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		if err := sh("umount %s", on); err != nil {
			t.Error(err)
		}
	})
	for i := range files {
		fd, err := unix.Open(filepath.Join(on, fmt.Sprint(i)), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	// The guard thaws the file system, even if the test process ends early.
	guard := exec.Command("sh", "-c", "sleep 300; fsfreeze --unfreeze "+on)
	guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := guard.Start(); err != nil {
		t.Fatal(err)
	}
	is := false
	thaw = func() {
		if is {
			if err := sh("fsfreeze --unfreeze %s", on); err != nil {
				t.Error(err)
			}
			is = false
		}
	}
	t.Cleanup(func() {
		thaw()
		_ = syscall.Kill(-guard.Process.Pid, syscall.SIGKILL)
		_ = guard.Wait()
	})
	if err := sh("fsfreeze --freeze %s", on); err != nil {
		t.Fatal(err)
	}
	is = true
	return fds, thaw
}

// TestBesideADiskThatHangs: while more ops than may block at a time hang on a disk, the loop completes ops of another
// disk, also an op queued before the loop noticed the hang. After the thaw the loop has no extra threads.
func TestBesideADiskThatHangs(t *testing.T) {
	suite.System(t)
	worlds(t, func(t *testing.T, l *Loop) {
		fds, thaw := frozen(t, 8)
		other, err := os.Create(filepath.Join(t.TempDir(), "other"))
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		stop := run(t, l)
		defer stop()
		defer thaw()
		hung, done := make(chan int32, len(fds)), make(chan int32, 1)
		l.Post(func() {
			for _, fd := range fds {
				l.Fallocate(&Op{Done: func(_ *Op, res int32) { hung <- res }}, fd, unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
			}
			l.Fdatasync(&Op{Done: func(_ *Op, res int32) { done <- res }}, int(other.Fd()))
		})
		select {
		case res := <-done:
			if res != 0 {
				t.Errorf("the sync of another disk's file: %d", res)
			}
		case <-time.After(time.Minute):
			t.Error("the sync of another disk's file waits for the disk that hangs")
		}
		if len(hung) > 0 {
			t.Errorf("nothing hangs: %d", <-hung)
		}
		thaw()
		for range fds {
			if res := <-hung; res != 0 {
				t.Errorf("an op of the disk that hung: %d", res)
			}
		}
		for until := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // between checks
			var extra int
			var awake bool
			if err := l.Do(func() { extra, awake = l.extra, l.awake }); err != nil {
				t.Fatal(err)
			}
			if extra == 0 && !awake {
				break
			}
			if time.Now().After(until) {
				t.Fatalf("%d ops more may block, although nothing hangs; it looks again: %t", extra, awake)
			}
		}
	})
}

// told is a backend without effect.
type told struct {
	backend
	extra int
}

func (b *told) startOp(*Op)             {}
func (b *told) allowBlocking(extra int) { b.extra = extra }

// TestLongOpsGetMoreThreads: an op counts as long from the second check after the start; a poll never counts.
func TestLongOpsGetMoreThreads(t *testing.T) {
	b := &told{}
	l := newLoop(b)
	begin := func(n int) (list []*Op) {
		for range n {
			op := &Op{Done: func(*Op, int32) {}}
			l.Fdatasync(op, 0)
			list = append(list, op)
		}
		return list
	}
	end := func(list []*Op) {
		for _, op := range list {
			l.finishOp(op, 0)
		}
	}
	look := func(want int) {
		t.Helper()
		l.timer.Stop()
		if l.checkLongOps(); b.extra != want {
			t.Errorf("%d ops more may block, not %d", b.extra, want)
		}
	}
	l.PollIn(&Op{}, 0)
	if l.awake {
		t.Error("it looks at polls")
	}
	first := begin(3)
	look(0)
	second := begin(2)
	end(begin(4))
	look(3)
	end(first[:1])
	look(4)
	end(second)
	look(2)
	many := begin(2 * extraMost)
	look(2)
	look(extraMost)
	end(many)
	end(first[1:])
	look(0)
	if l.ages != [3]int{} || l.awake {
		t.Errorf("nothing is under way: %v; it looks again: %t", l.ages, l.awake)
	}
}
