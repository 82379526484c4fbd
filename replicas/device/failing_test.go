package device

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

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

// TestDetachAfterAFailedFlush: a detach removes the device although the last flush fails: only a new attach can make
// the backend work again.
func TestDetachAfterAFailedFlush(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "broken", 16*mib)
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	mustPwrite(t, fd, block.AlignedBuffer(4096), 0)
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
	await(t, func() bool { return len(ours()) == 0 })
}

// TestHolderSendsTheRightDescriptors: while other clients put and delete records, a get returns the key's own
// descriptors, or reports a missing record.
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
				if err := c.putRecord(key, nil, fd); err != nil {
					t.Error(err)
					return
				}
				if err := c.deleteRecord(key); err != nil {
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
				_, fds, err := c.getRecord("a")
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

// startHolder serves a holder until stop is called. For clients, a stop looks like the holder's death.
func startHolder(t *testing.T, runDir string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- RunHolder(ctx, filepath.Join(runDir, "hold.sock")) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := within(t, "end of the holder", ended); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	await(t, func() bool {
		c, err := dialHolder(t.Context(), filepath.Join(runDir, "hold.sock"))
		if err == nil {
			_ = c.close()
		}
		return err == nil
	})
	return stop
}

// TestHolderDies: the death of a holder loses nothing. The next holder gets all devices again, without a call of the
// test, and the data process continues, may end, and has a successor.
func TestHolderDies(t *testing.T) {
	needRoot(t)
	runDir := t.TempDir()
	stop := startHolder(t, runDir)
	h, l := openHost(t, runDir), runLoop(t)
	d, be := attach(t, h, l, "heir", 16*mib)
	gone, _ := attach(t, h, l, "gone", 16*mib)
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	b := block.AlignedBuffer(4096)
	copy(b, "before")
	mustPwrite(t, fd, b, 0)

	stop()
	if err := h.SetBlob(testKey("heir"), []byte("lost")); err == nil {
		t.Error("something was kept without a holder")
	}
	copy(b, "during")
	mustPwrite(t, fd, b, 4096)
	stop = startHolder(t, runDir)
	await(t, func() bool {
		keys, err := dial(t, runDir).listKeys()
		return err == nil && len(keys) == 2
	})
	if err := gone.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	startHolder(t, runDir)
	if err := unix.Ftruncate(be.fd, 32*mib); err != nil {
		t.Fatal(err)
	}
	if err := d.Resize(t.Context(), 32*mib); err != nil { // perhaps the first message to this holder
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h2 := openHost(t, runDir)
	held := h2.Held()
	if len(held) != 1 || held[0].Size != 32*mib || h2.Incarnation() <= h.Incarnation() {
		t.Fatalf("held: %+v, incarnation %d after %d", held, h2.Incarnation(), h.Incarnation())
	}
	d2, err := h2.Resume(t.Context(), held[0], l, be)
	if err != nil {
		t.Fatal(err)
	}
	for off, want := range map[int64]string{0: "before", 4096: "during"} {
		if got := mustPread(t, fd, 4096, off); string(got[:6]) != want {
			t.Errorf("at %d: %q", off, got[:6])
		}
	}
	_ = unix.Close(fd)
	if err := d2.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return len(ours()) == 0 })
}

// TestIncarnationsGrowAcrossHolders: a later holder gives no smaller numbers, even if the clock went back.
func TestIncarnationsGrowAcrossHolders(t *testing.T) {
	h := &holder{kept: map[string]held{}}
	if out, _ := h.handleAsk(ask{Op: askHello, Least: 41}, nil); out.Incarnation != 42 {
		t.Errorf("%d after 41", out.Incarnation)
	}
}

// TestOneBadRead: a request whose payload cannot be read fails alone; the device continues.
func TestOneBadRead(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, _ := attach(t, h, l, "bad", 16*mib)
	fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
	defer func() { _ = unix.Close(fd) }()
	protect := func(prot int) {
		var err error
		if lerr := l.Do(func() { err = unix.Mprotect(h.serverOf(l).stage.mem, prot) }); lerr != nil || err != nil {
			t.Fatal(lerr, err)
		}
	}
	protect(unix.PROT_NONE)
	if _, err := unix.Pwrite(fd, block.AlignedBuffer(4096), 0); err == nil {
		t.Error("a write whose payload could not be read was answered as done")
	}
	protect(unix.PROT_READ | unix.PROT_WRITE)
	done := make(chan error, 1)
	go func() {
		_, err := unix.Pwrite(fd, block.AlignedBuffer(4096), 0)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Error("the device does not serve any more")
		_ = d.Abort()
		_ = within(t, "end of a write to a device that was aborted", done)
	}
}

// heldWrites keeps writes until fail is set.
type heldWrites struct {
	block.Submitter
	held []*block.Request
	fail bool
}

func (w *heldWrites) Submit(r *block.Request) {
	if r.Op != block.OpWrite || w.fail {
		w.Submitter.Submit(r)
		return
	}
	w.held = append(w.held, r)
}

// TestLastFlushFailsLate: the host logs a failed last flush, even if the caller of the detach gave up before the flush
// ended.
func TestLastFlushFailsLate(t *testing.T) {
	h, l := openHost(t, runHolder(t)), runLoop(t)
	said := &lockedBuffer{}
	h.log = slog.New(slog.NewTextHandler(said, nil))
	d, be := attach(t, h, l, "late", 16*mib)
	w := &heldWrites{Submitter: be}
	if err := l.Do(func() { d.conn.be = w }); err != nil {
		t.Fatal(err)
	}
	fd := openDev(t, d.Path(), unix.O_RDWR) // a close would flush
	defer func() { _ = unix.Close(fd) }()
	mustPwrite(t, fd, []byte("lost"), 2*page)
	short, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- d.Detach(short) }()
	await(t, func() (is bool) {
		_ = l.Do(func() { is = len(w.held) > 0 })
		return is
	})
	cancel()
	if err := <-first; !api.Is(err, api.Busy) {
		t.Errorf("given up: %v", err)
	}
	err := l.Do(func() {
		w.fail = true
		for _, r := range w.held {
			r.Err = unix.EIO
			r.Done(r)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.leaving.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	_ = unix.Close(fd)
	fd = -1
	detachSoon(t, d)
	if !strings.Contains(said.String(), "the last flush of a device failed") {
		t.Errorf("said only: %s", said)
	}
}

// lockedBuffer is a buffer for logs.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
