package device

import (
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// brokenFlush passes everything on but flushes, which fail: a disk behind the device does not work any more.
type brokenFlush struct{ block.Submitter }

func (b brokenFlush) Submit(r *block.Request) {
	if r.Op != block.OpFlush {
		b.Submitter.Submit(r)
		return
	}
	r.Err = unix.EIO
	r.Done(r)
}

// A device whose last flush fails is taken away all the same: only a new attach can bring what stands behind it back to
// work.
func TestDetachAfterAFailedFlush(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "broken", 16*mib)
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	mustPwrite(t, fd, aligned(4096), 0)
	if err := l.Do(func() { d.conn.be = brokenFlush{be} }); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fsync(fd); err == nil {
		t.Fatal("a flush that failed behind the device was answered as done")
	}
	_ = unix.Close(fd)
	if err := d.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(ours()) != 0 {
		t.Error("the loop device is left")
	}
}

// Descriptors that are asked for while another client changes them are the ones of that key, or there are none.
func TestHolderSendsTheRightDescriptors(t *testing.T) {
	runDir := runHolder(t)
	open := func(key string) int {
		fd, err := unix.Open(filepath.Join(t.TempDir(), key), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	inode := func(fd int) uint64 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Error(err)
		}
		return st.Ino
	}
	a, b := open("a"), open("b")
	var wg sync.WaitGroup
	for key, fd := range map[string]int{"a": a, "b": b} {
		c := dial(t, runDir)
		wg.Go(func() {
			for range 3000 {
				if err := c.put(key, nil, fd); err != nil {
					t.Error(err)
					return
				}
				if err := c.delete(key); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	want := inode(a)
	for range 2 {
		c := dial(t, runDir)
		wg.Go(func() {
			for range 6000 {
				_, fds, err := c.get("a")
				if api.Is(err, api.NotFound) {
					continue // at the moment
				}
				if err != nil {
					t.Error(err)
					return
				}
				if len(fds) != 1 || inode(fds[0]) != want {
					t.Errorf("%d descriptors, not of this key", len(fds))
				}
				closeFds(fds)
			}
		})
	}
	wg.Wait()
}
