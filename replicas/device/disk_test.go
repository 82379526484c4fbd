package device

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
)

// disk is a block.Submitter over a plain file, by direct I/O on the loop.
type disk struct {
	loop *uring.Loop
	fd   int
	free []*diskOp
	// hold, when set, decides on the loop's thread which requests wait in held.
	hold func(*block.Request) bool
	held []*block.Request
}

type diskOp struct {
	uring.Op
	req *block.Request
}

func openDisk(loop *uring.Loop, path string, size int64) (*disk, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_DIRECT, 0o600)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Size < size {
		if err := unix.Ftruncate(fd, size); err != nil {
			return nil, err
		}
	}
	return &disk{loop: loop, fd: fd}, nil
}

// drain waits for direct I/O which a dead process left in the kernel: a fallocate takes the inode's lock and waits.
func (d *disk) drain(size int64) error {
	return unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, (size+4095)&^4095, 4096)
}

func (d *disk) Submit(r *block.Request) {
	if d.hold != nil && d.hold(r) {
		d.held = append(d.held, r)
		return
	}
	var op *diskOp
	if n := len(d.free); n > 0 {
		op, d.free = d.free[n-1], d.free[:n-1]
	} else {
		op = &diskOp{}
		op.Done = func(_ *uring.Op, res int32) { d.done(op, res) }
	}
	op.req = r
	switch r.Op {
	case block.OpRead:
		d.loop.Read(&op.Op, d.fd, r.Buf, r.Off)
	case block.OpWrite:
		d.loop.Write(&op.Op, d.fd, r.Buf, r.Off)
	case block.OpFlush:
		d.loop.Fdatasync(&op.Op, d.fd)
	case block.OpDiscard:
		d.loop.Fallocate(&op.Op, d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Off, r.Len)
	case block.OpZero:
		d.loop.Fallocate(&op.Op, d.fd, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, r.Off, r.Len)
	}
}

func (d *disk) done(op *diskOp, res int32) {
	r := op.req
	op.req = nil
	d.free = append(d.free, op)
	switch {
	case res < 0:
		r.Err = unix.Errno(-res)
	case r.Op == block.OpRead:
		clear(r.Buf[res:])
	case r.Op == block.OpWrite && int64(res) < r.Len:
		r.Err = unix.EIO
	}
	r.Done(r)
}

// letGo submits the held requests; on the loop's thread.
func (d *disk) letGo() {
	d.hold = nil
	held := d.held
	d.held = nil
	for _, r := range held {
		d.Submit(r)
	}
}

func (d *disk) close() { _ = unix.Close(d.fd) }

func needRoot(t testing.TB) {
	t.Helper()
	suite.System(t)
	if err := ResendSupported(); err != nil {
		t.Skip(err)
	}
}

func runLoop(t testing.TB) *uring.Loop {
	t.Helper()
	l, err := uring.New(256)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- l.Run() }()
	t.Cleanup(func() {
		l.Close()
		if err := within(t, "end of the loop", ended); err != nil {
			t.Error(err)
		}
	})
	return l
}

// runHolder serves a holder for the length of the test, and checks at the end for leftover devices and mounts.
func runHolder(t testing.TB) (runDir string) {
	t.Helper()
	needRoot(t)
	runDir = t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- RunHolder(ctx, filepath.Join(runDir, "hold.sock")) }()
	t.Cleanup(func() {
		cancel()
		if err := within(t, "end of the holder", ended); err != nil {
			t.Error(err)
		}
		// A loop device ends with its last user, and another process in search of a free device may have it open just
		// now.
		await(t, func() bool { return len(ours()) == 0 })
		if b, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(b), " - fuse drover ") {
			t.Error("a mount is left in the mount table")
		}
	})
	await(t, func() bool {
		c, err := net.Dial("unixpacket", filepath.Join(runDir, "hold.sock"))
		return err == nil && c.Close() == nil
	})
	return runDir
}

// testKey is a key, and a name in /dev/drover, of this process's tests alone: several processes may run on a machine.
func testKey(name string) string { return fmt.Sprintf("test-%d-%s", os.Getpid(), name) }

// ours are the loop devices of this process's tests.
func ours() (out []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(filepath.Base(string(b)), oldFileName(testKey(""))) {
			out = append(out, f)
		}
	}
	return out
}

func await(t testing.TB, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			_, file, line, _ := runtime.Caller(1)
			t.Fatalf("%s:%d: waited too long", filepath.Base(file), line)
		}
	}
}

// tooLong is more than any step takes, on any machine.
const tooLong = 3 * time.Minute

// within returns a value from a channel; a missing value ends the test.
func within[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(tooLong)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
	}
	t.Fatalf("no %s within %v", what, tooLong)
	panic("not reached")
}

func openHost(t testing.TB, runDir string) *Host {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	h, err := Open(ctx, runDir)
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	t.Cleanup(func() { once.Do(func() { _ = h.Close() }) })
	return h
}

const mib = 1 << 20

// attach makes a device over a new file of a test.
func attach(t testing.TB, h *Host, l *uring.Loop, name string, size int64) (*Device, *disk) {
	t.Helper()
	be, err := openDisk(l, filepath.Join(t.TempDir(), "data"), size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(be.close)
	spec := Spec{Key: testKey(name), Name: testKey(name), Size: size, Blob: []byte("{}")}
	d, err := h.Attach(t.Context(), spec, l, be)
	if err != nil {
		t.Fatal(err)
	}
	// In the end all waiting I/O fails: a thread that waits in the kernel cannot be killed, and this process could not
	// end.
	late := time.AfterFunc(3*tooLong, func() {
		t.Errorf("device %s is still in use after %v: all its I/O fails from now on", name, 3*tooLong)
		_ = d.Abort()
	})
	t.Cleanup(func() {
		late.Stop()
		_ = d.Abort()
	})
	return d, be
}

func openDev(t testing.TB, path string, flags int) int {
	t.Helper()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open %s: %v", path, err)
	}
	return fd
}
