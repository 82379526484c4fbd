package device

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

func mustPwrite(t *testing.T, fd int, b []byte, off int64) {
	t.Helper()
	if n, err := unix.Pwrite(fd, b, off); err != nil || n != len(b) {
		t.Fatalf("write of %d at %d: %d, %v", len(b), off, n, err)
	}
}

func mustPread(t *testing.T, fd, n int, off int64) []byte {
	t.Helper()
	b := block.AlignedBuffer(n)
	if k, err := unix.Pread(fd, b, off); err != nil || k != n {
		t.Fatalf("read of %d at %d: %d, %v", n, off, k, err)
	}
	return b
}

// TestContent: the device, and the file behind the device, have the written content, for writes of any size.
func TestContent(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "content", 64*mib)
	if to, err := os.Readlink(d.Link()); err != nil || to != d.Path() {
		t.Errorf("link: %s, %v; want %s", to, err, d.Path())
	}
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	model := make([]byte, 64*mib)
	off := int64(0)
	for _, n := range []int{512, 4096, 1024, 8192, 16384, 20480, 65536, 69632, 131072, mib, mib + 4096, 4 * mib, 1536} {
		b := block.AlignedBuffer(n)
		_, _ = rand.Read(b)
		mustPwrite(t, fd, b, off)
		copy(model[off:], b)
		off += int64(n)
	}
	check := func(what string) {
		t.Helper()
		if got := mustPread(t, fd, 16*mib, 0); !bytes.Equal(got, model[:16*mib]) {
			t.Fatalf("%s: the device's content differs", what)
		}
		file, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", be.fd))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(file, model) {
			t.Fatalf("%s: the file's content differs", what)
		}
	}
	if err := unix.Fsync(fd); err != nil {
		t.Fatal(err)
	}
	check("written")
	for _, c := range []struct {
		name   string
		req    uint
		off, n uint64
	}{{"discard", unix.BLKDISCARD, 8192, 64 << 10}, {"zero", unix.BLKZEROOUT, 128 << 10, mib}} {
		rng := [2]uint64{c.off, c.n}
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(c.req), uintptr(unsafe.Pointer(&rng))); e != 0 {
			t.Fatalf("%s: %v", c.name, e)
		}
		clear(model[c.off : c.off+c.n])
		check(c.name)
	}
	_ = unix.Close(fd)
	if err := d.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(d.Link()); !os.IsNotExist(err) {
		t.Errorf("the link is left: %v", err)
	}
	if err := d.Detach(t.Context()); err != nil {
		t.Errorf("a second detach: %v", err)
	}
	if len(h.Devices()) != 0 {
		t.Error("the host still lists the device")
	}
}

// TestFlushAndErrors: each flush reaches the backend once, and the backend's errors reach the caller.
func TestFlushAndErrors(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "flush", 16*mib)
	flushes := 0
	if err := l.Do(func() {
		be.hold = func(r *block.Request) bool {
			if r.Op == block.OpFlush {
				flushes++
			}
			return false
		}
	}); err != nil {
		t.Fatal(err)
	}
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	defer func() { _ = unix.Close(fd) }()
	mustPwrite(t, fd, block.AlignedBuffer(4096), 0)
	if err := unix.Fsync(fd); err != nil {
		t.Fatal(err)
	}
	var n int
	_ = l.Do(func() { n = flushes })
	if n != 1 {
		t.Errorf("%d flushes reached the backend, want 1", n)
	}
	_ = l.Do(func() { d.conn.be = failing{} })
	if _, err := unix.Pwrite(fd, block.AlignedBuffer(4096), 0); err == nil {
		t.Error("a write that failed behind the device was answered as done")
	}
	if err := unix.Fsync(fd); err == nil {
		t.Error("a flush that failed behind the device was answered as done")
	}
	_ = l.Do(func() { d.conn.be = be })
}

type failing struct{}

func (failing) Submit(r *block.Request) {
	r.Err = unix.ENOSPC
	r.Done(r)
}

func TestReadOnly(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	be, err := openDisk(l, filepath.Join(t.TempDir(), "data"), 16*mib)
	if err != nil {
		t.Fatal(err)
	}
	defer be.close()
	spec := Spec{Key: testKey("ro"), Name: testKey("ro"), Size: 16 * mib, ReadOnly: true}
	d, err := h.Attach(t.Context(), spec, l, be)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Abort() }()
	if fd, err := unix.Open(d.Path(), unix.O_RDWR|unix.O_CLOEXEC|unix.O_DIRECT, 0); err == nil {
		if _, err := unix.Pwrite(fd, block.AlignedBuffer(4096), 0); err == nil {
			t.Error("a read-only device was written to")
		}
		_ = unix.Close(fd)
	}
	fd := openDev(t, d.Path(), unix.O_RDONLY|unix.O_DIRECT)
	mustPread(t, fd, 4096, 0)
	if err := unix.Ftruncate(be.fd, 32*mib); err != nil {
		t.Fatal(err)
	}
	if err := d.Resize(t.Context(), 32*mib); err != nil {
		t.Error(err)
	}
	if n, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil || n != 32*mib {
		t.Errorf("size %d, %v; want %d", n, err, 32*mib)
	}
	_ = unix.Close(fd)
	if err := d.Detach(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestBusy: a detach fails while the device is open or mounted, and succeeds afterwards.
func TestBusy(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, _ := attach(t, h, l, "busy", 64*mib)
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	if err := d.Detach(t.Context()); !api.Is(err, api.InUse) {
		t.Errorf("detach while open: %v, want kind in use", err)
	}
	mustPwrite(t, fd, block.AlignedBuffer(4096), 0)
	_ = unix.Close(fd)
	mnt := t.TempDir()
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", d.Path()).CombinedOutput(); err != nil {
		t.Fatalf("mkfs: %v: %s", err, out)
	}
	if err := unix.Mount(d.Path(), mnt, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(mnt, "f"), make([]byte, mib), 0o600); err != nil {
		t.Error(err)
	}
	err := d.Detach(t.Context())
	if uerr := unix.Unmount(mnt, 0); uerr != nil {
		t.Fatal(uerr)
	}
	if !api.Is(err, api.InUse) {
		t.Errorf("detach while mounted: %v, want kind in use", err)
	}
	detachSoon(t, d) // another process may still have the mount in its namespace
}

func TestResize(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "resize", 16*mib)
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(be.fd, 48*mib); err != nil {
		t.Fatal(err)
	}
	if err := d.Resize(t.Context(), 48*mib); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil || n != 48*mib {
		t.Errorf("size %d, %v; want %d", n, err, 48*mib)
	}
	b := block.AlignedBuffer(mib)
	_, _ = rand.Read(b)
	mustPwrite(t, fd, b, 47*mib)
	if !bytes.Equal(mustPread(t, fd, mib, 47*mib), b) {
		t.Error("other content at the new end")
	}
	if err := d.Resize(t.Context(), 16*mib); !api.Is(err, api.OutOfRange) {
		t.Errorf("shrink: %v, want kind out of range", err)
	}
	if d.Spec().Size != 48*mib {
		t.Errorf("spec says %d", d.Spec().Size)
	}
}

// TestAbort: Abort ends I/O that waits for a silent backend.
func TestAbort(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "abort", 16*mib)
	if err := l.Do(func() { be.hold = func(*block.Request) bool { return true } }); err != nil {
		t.Fatal(err)
	}
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	failed := make(chan error, 1)
	go func() {
		_, err := unix.Pwrite(fd, block.AlignedBuffer(4096), 0)
		failed <- err
	}()
	await(t, func() (some bool) {
		_ = l.Do(func() { some = len(be.held) > 0 })
		return some
	})
	if err := d.Abort(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-failed:
		if err == nil {
			t.Error("a write to an aborted device succeeded")
		}
	case <-time.After(time.Minute):
		t.Fatal("a write still waits after Abort")
	}
	if _, err := unix.Pread(fd, block.AlignedBuffer(4096), 0); err == nil {
		t.Error("a read of an aborted device succeeded")
	}
	_ = unix.Close(fd)
	await(t, func() bool { return len(ours()) == 0 })
	_ = l.Do(be.letGo) // late completions must do no harm
	d2, _ := attach(t, h, l, "abort", 16*mib)
	if err := d2.Detach(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestStuckNeighbour: a stuck device takes neither all memory nor the turn of another device.
func TestStuckNeighbour(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	stuck, be := attach(t, h, l, "stuck", 256*mib)
	d, _ := attach(t, h, l, "free", 256*mib)
	if err := l.Do(func() { be.hold = func(*block.Request) bool { return true } }); err != nil {
		t.Fatal(err)
	}
	fd := openDev(t, stuck.Path(), unix.O_RDWR|unix.O_DIRECT)
	defer func() { _ = unix.Close(fd) }()
	const writers = 100
	done := make(chan error, writers)
	for i := range writers {
		go func() {
			b := block.AlignedBuffer(mib)
			b[0] = byte(i)
			_, err := unix.Pwrite(fd, b, int64(i)*mib)
			done <- err
		}()
	}
	srv := h.serverOf(l)
	await(t, func() (hungry bool) {
		_ = l.Do(func() { hungry = len(srv.hungry) > 0 })
		return hungry
	})
	fd2 := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	for i := range 64 {
		mustPwrite(t, fd2, block.AlignedBuffer(mib), int64(i)*mib)
	}
	_ = unix.Close(fd2)
	var size int64
	_ = l.Do(func() { size = srv.pool.size(); be.letGo() })
	if size > poolCap+slabSize {
		t.Errorf("the pool took %d bytes", size)
	}
	for range writers {
		if err := within(t, "end of a write", done); err != nil {
			t.Error(err)
		}
	}
	for i := range writers {
		if b := mustPread(t, fd, mib, int64(i)*mib); b[0] != byte(i) {
			t.Fatalf("block %d has content of %d", i, b[0])
		}
	}
	if size := sizeTrimmed(l, srv, func(n int64) bool { return n <= reserved*slabSize }); size > reserved*slabSize {
		t.Errorf("an idle pool of %d bytes", size)
	}
}

// sizeTrimmed trims until the pool's size is right, or for ten seconds: requested slabs may come after a trim.
func sizeTrimmed(l *uring.Loop, srv *server, right func(int64) bool) (size int64) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range 500 {
		_ = l.Do(func() { srv.trimPool(); size = srv.pool.size() })
		if right(size) {
			break
		}
		<-tick.C
	}
	return size
}

func TestHundred(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	const n = 100
	devs := make([]*Device, n)
	start := time.Now()
	for i := range n {
		devs[i], _ = attach(t, h, l, fmt.Sprintf("hundred-%d", i), 64*mib)
	}
	t.Logf("%d attached in %v", n, time.Since(start))
	errs := make(chan error, n)
	for i, d := range devs {
		go func() {
			errs <- func() error {
				fd, err := unix.Open(d.Path(), unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer func() { _ = unix.Close(fd) }()
				b, got := block.AlignedBuffer(64<<10), block.AlignedBuffer(64<<10)
				for k := range 20 {
					b[0], b[1] = byte(i), byte(k)
					if _, err := unix.Pwrite(fd, b, int64(k)<<16); err != nil {
						return err
					}
				}
				for k := range 20 {
					if _, err := unix.Pread(fd, got, int64(k)<<16); err != nil {
						return err
					}
					if got[0] != byte(i) || got[1] != byte(k) {
						return fmt.Errorf("device %d block %d has content of %d/%d", i, k, got[0], got[1])
					}
				}
				return nil
			}()
		}()
	}
	for range n {
		if err := within(t, "end of what uses a device", errs); err != nil {
			t.Error(err)
		}
	}
	for _, d := range devs {
		if err := d.Detach(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestHandOver: devices move from one Host to the next; I/O begun in between waits and succeeds.
func TestHandOver(t *testing.T) {
	runDir := runHolder(t)
	l := runLoop(t)
	h := openHost(t, runDir)
	d, be := attach(t, h, l, "over", 16*mib)
	if err := h.SetBlob(testKey("over"), []byte("new")); err != nil {
		t.Fatal(err)
	}
	if err := d.Resize(t.Context(), 16*mib); err != nil {
		t.Fatal(err)
	}
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	defer func() { _ = unix.Close(fd) }()
	b := block.AlignedBuffer(4096)
	_, _ = rand.Read(b)

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, runDir); !api.Is(err, api.Busy) {
		t.Errorf("a second host beside the first: %v, want kind busy", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := unix.Pwrite(fd, b, 4096)
		wrote <- err
	}()
	h2 := openHost(t, runDir)
	if h2.Incarnation() <= h.Incarnation() {
		t.Errorf("incarnation %d after %d", h2.Incarnation(), h.Incarnation())
	}
	held := h2.Held()
	if len(held) != 1 || string(held[0].Blob) != "new" || held[0].Name != testKey("over") {
		t.Fatalf("held: %+v", held)
	}
	if _, err := h2.Attach(t.Context(), held[0], l, be); !api.Is(err, api.Exists) {
		t.Errorf("attach of a held device: %v, want kind exists", err)
	}
	select {
	case err := <-wrote:
		t.Fatalf("a write was answered while nobody served: %v", err)
	default:
	}
	held[0].Size = 32 * mib
	if err := unix.Ftruncate(be.fd, 32*mib); err != nil {
		t.Fatal(err)
	}
	// A blob set before the resume counts, also for the next process if this process ends right now.
	if err := h2.SetBlob(testKey("over"), []byte("newer")); err != nil {
		t.Error(err)
	}
	if rec, fds, err := h2.fetchRecord(testKey("over")); err != nil || string(rec.Blob) != "newer" || len(fds) != 2 {
		t.Errorf("the holder has %q and %d descriptors, %v", rec.Blob, len(fds), err)
	} else {
		closeFds(fds)
	}
	if again := h2.Held(); len(again) != 1 || string(again[0].Blob) != "newer" {
		t.Errorf("held: %+v", again)
	}
	d2, err := h2.Resume(t.Context(), held[0], l, be)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d2.Abort() }()
	if got := d2.Spec().Blob; string(got) != "newer" {
		t.Errorf("the device knows %q", got)
	}
	if err := within(t, "end of the write", wrote); err != nil {
		t.Fatal(err)
	}
	if d2.Path() != d.Path() || len(h2.Held()) != 0 {
		t.Errorf("path %s after %s, %d held", d2.Path(), d.Path(), len(h2.Held()))
	}
	if n, _ := unix.Seek(fd, 0, unix.SEEK_END); n != 32*mib {
		t.Errorf("size %d after a resume with %d", n, 32*mib)
	}
	if !bytes.Equal(mustPread(t, fd, 4096, 4096), b) {
		t.Error("other content")
	}
}

func TestDiscard(t *testing.T) {
	runDir := runHolder(t)
	l := runLoop(t)
	h := openHost(t, runDir)
	attach(t, h, l, "lost", 16*mib)
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h2 := openHost(t, runDir)
	if err := h2.Discard(testKey("lost")); err != nil {
		t.Fatal(err)
	}
	if len(h2.Held()) != 0 {
		t.Errorf("held %v", h2.Held())
	}
	await(t, func() bool { return len(ours()) == 0 })
}

func TestSpec(t *testing.T) {
	ok := Spec{Key: "k", Name: "n", Size: 512}
	if err := ok.validate(); err != nil {
		t.Error(err)
	}
	for _, s := range []Spec{
		{Key: "../k", Name: "n", Size: 512}, {Key: "k", Name: "a/b", Size: 512}, {Key: "k", Name: ".", Size: 512},
		{Key: "k", Name: "n", Size: 511}, {Key: "k", Name: "n"}, {Key: strings.Repeat("k", 201), Name: "n", Size: 512},
		{Key: "k", Name: "n", Size: 512, Blob: make([]byte, 33<<10)},
	} {
		if err := s.validate(); err == nil {
			t.Errorf("%.60v was accepted", s)
		}
	}
}
