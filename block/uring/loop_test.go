package uring

import (
	"bytes"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
)

// worlds runs a test on an io_uring and on the worker threads, the stand-in of io_uring.
func worlds(t *testing.T, fn func(t *testing.T, l *Loop)) {
	t.Run("uring", func(t *testing.T) {
		r, err := newRing(32)
		if err != nil {
			t.Skipf("no io_uring here: %v", err)
		}
		fn(t, newLoop(r))
	})
	t.Run("workers", func(t *testing.T) {
		w, err := newWorkers(4)
		if err != nil {
			t.Fatal(err)
		}
		fn(t, newLoop(w))
	})
}

// within returns the next value of a channel; a missing value ends the test under the given name.
func within[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(10 * time.Minute)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
	}
	t.Fatal("no " + what)
	panic("not reached")
}

// run starts l and returns a function which stops l and waits for the end.
func run(t *testing.T, l *Loop) (stop func()) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- l.Run() }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			l.Close()
			if err := within(t, "end of the loop", ended); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func do(t *testing.T, l *Loop, start func(op *Op)) int32 {
	t.Helper()
	res := make(chan int32, 1)
	op := &Op{Done: func(_ *Op, n int32) { res <- n }}
	if !l.Post(func() { start(op) }) {
		t.Fatal("the loop has ended")
	}
	return <-res
}

func tempFile(t *testing.T, flags int) int {
	t.Helper()
	fd, err := unix.Open(filepath.Join(t.TempDir(), "f"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func TestFile(t *testing.T) {
	worlds(t, func(t *testing.T, l *Loop) {
		run(t, l)
		fd := tempFile(t, unix.O_DIRECT)
		in, out := block.AlignedBuffer(64<<10), block.AlignedBuffer(64<<10)
		_, _ = rand.Read(in)
		if n := do(t, l, func(op *Op) { l.Write(op, fd, in, 4096) }); n != int32(len(in)) {
			t.Fatalf("write: %d", n)
		}
		if n := do(t, l, func(op *Op) { l.Fdatasync(op, fd) }); n != 0 {
			t.Fatalf("fdatasync: %d", n)
		}
		if n := do(t, l, func(op *Op) { l.Read(op, fd, out, 4096) }); n != int32(len(out)) || !bytes.Equal(in, out) {
			t.Fatalf("read: %d, equal %v", n, bytes.Equal(in, out))
		}
		mode := uint32(unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE)
		if n := do(t, l, func(op *Op) { l.Fallocate(op, fd, mode, 4096, 8192) }); n != 0 {
			t.Fatalf("fallocate: %d", n)
		}
		if n := do(t, l, func(op *Op) { l.Read(op, fd, out, 4096) }); n != int32(len(out)) ||
			!bytes.Equal(out[:8192], make([]byte, 8192)) || !bytes.Equal(out[8192:], in[8192:]) {
			t.Fatalf("read after the punch: %d, or other content", n)
		}
		if n := do(t, l, func(op *Op) { l.Read(op, -1, out, 0) }); n != -int32(unix.EBADF) {
			t.Fatalf("read of a bad descriptor: %d, want -EBADF", n)
		}
		if n := do(t, l, func(op *Op) { l.Read(op, fd, out, 1<<30) }); n != 0 {
			t.Fatalf("read after the end: %d, want 0", n)
		}
	})
}

// TestMany runs more ops at once than the ring has entries. Each Done starts the op again, and checks all content.
func TestMany(t *testing.T) {
	worlds(t, func(t *testing.T, l *Loop) {
		run(t, l)
		fd := tempFile(t, 0)
		const ops, rounds = 200, 20
		var left atomic.Int64
		left.Store(ops)
		done := make(chan struct{})
		l.Post(func() {
			for i := range ops {
				buf, round, writing := make([]byte, 512), 0, false
				op := &Op{Tag: uint64(i)}
				op.Done = func(op *Op, n int32) {
					if n != 512 {
						t.Errorf("op %d: %d", i, n)
					}
					if !writing && (buf[0] != byte(i) || buf[511] != byte(round)) {
						t.Errorf("op %d round %d: content is of %d round %d", i, round, buf[0], buf[511])
					}
					if writing {
						writing = false
						clear(buf)
						l.Read(op, fd, buf, int64(i)*512)
						return
					}
					if round++; round == rounds {
						if left.Add(-1) == 0 {
							close(done)
						}
						return
					}
					writing, buf[0], buf[511] = true, byte(i), byte(round)
					l.Write(op, fd, buf, int64(i)*512)
				}
				writing, buf[0] = true, byte(i)
				l.Write(op, fd, buf, int64(i)*512)
			}
		})
		within(t, "end of all writes", done)
	})
}

// TestOverflow: Done runs once per start, with more ops in progress than the completion queue has room for. Done starts
// ops again while the loop handles completions, and the test sets some completions aside meanwhile.
func TestOverflow(t *testing.T) {
	worlds(t, func(t *testing.T, l *Loop) {
		run(t, l)
		fd := tempFile(t, 0)
		if err := unix.Ftruncate(fd, 4096); err != nil {
			t.Fatal(err)
		}
		const ops, rounds = 6000, 3
		starts, dones, left := make([]int, ops), make([]int, ops), ops
		end := make(chan struct{})
		l.Post(func() {
			for i := range ops {
				buf := make([]byte, 64)
				op := &Op{}
				op.Done = func(op *Op, n int32) {
					if n != 64 {
						t.Errorf("op %d: %d", i, n)
					}
					if dones[i]++; dones[i] != starts[i] {
						t.Errorf("op %d: %d starts, %d ends", i, starts[i], dones[i])
					}
					if r, ok := l.be.(*ring); ok && i%100 == 0 {
						r.stowCompletions() // as on an older kernel
					}
					if starts[i] < rounds {
						starts[i]++
						l.Read(op, fd, buf, 0)
					} else if left--; left == 0 {
						close(end)
					}
				}
				starts[i]++
				l.Read(op, fd, buf, 0)
			}
			if r, ok := l.be.(*ring); ok {
				_ = r.enter(false)
				r.stowCompletions()
			}
		})
		within(t, "end of all reads", end)
	})
}

func TestPoll(t *testing.T) {
	worlds(t, func(t *testing.T, l *Loop) {
		stop := run(t, l)
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _, _ = r.Close(), w.Close() }()
		rfd := int(r.Fd())
		for range 3 { // oneshot: each must be armed again
			fired := make(chan int32, 1)
			l.Post(func() { l.PollIn(&Op{Done: func(_ *Op, n int32) { fired <- n }}, rfd) })
			if _, err := w.Write([]byte{1}); err != nil {
				t.Fatal(err)
			}
			if n := within(t, "event", fired); n&unix.POLLIN == 0 {
				t.Fatalf("poll: %d, want POLLIN", n)
			}
			if _, err := r.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		fired := make(chan int32, 1)
		op := &Op{Done: func(_ *Op, n int32) { fired <- n }}
		l.Post(func() { l.PollIn(op, rfd); l.CancelPoll(op); l.CancelPoll(op) })
		if n := within(t, "event", fired); n != -int32(unix.ECANCELED) {
			t.Fatalf("cancelled poll: %d", n)
		}
		l.Post(func() { l.CancelPoll(op); l.PollIn(op, rfd) })
		stop() // must not wait for the pipe
		if n := within(t, "event", fired); n != -int32(unix.ECANCELED) {
			t.Fatalf("poll at the end: %d", n)
		}
	})
}

func TestPostOrderAndEnd(t *testing.T) {
	worlds(t, func(t *testing.T, l *Loop) {
		stop := run(t, l)
		const callers, each = 8, 500
		var seen [callers]int // the loop's thread only
		var wg sync.WaitGroup
		for c := range callers {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := range each {
					l.Post(func() {
						if seen[c] != i {
							t.Errorf("caller %d: %d ran after %d", c, i, seen[c])
						}
						seen[c] = i + 1
					})
				}
			}()
		}
		wg.Wait()
		if err := l.Do(func() {}); err != nil {
			t.Fatal(err)
		}
		for c, n := range seen {
			if n != each {
				t.Errorf("caller %d: %d of %d ran", c, n, each)
			}
		}
		ran := make(chan struct{})
		l.Post(func() { l.Post(func() { close(ran) }) })
		within(t, "call of what was posted", ran)
		stop()
		l.Close()
		if l.Post(func() { t.Error("ran after the end") }) {
			t.Error("Post accepted after the end")
		}
		if err := l.Do(func() {}); !errors.Is(err, ErrClosed) {
			t.Errorf("Do after the end: %v", err)
		}
	})
}

func TestCloseBeforeRun(t *testing.T) {
	worlds(t, func(t *testing.T, l *Loop) {
		l.Close()
		if err := l.Run(); err == nil {
			t.Error("Run after Close did not fail")
		}
	})
}

// brokenBackend fails when the loop waits, and notes a wake after the backend's end.
type brokenBackend struct {
	backend
	l          *Loop
	over, late bool
}

var errBroken = errors.New("broken")

func (b *brokenBackend) open() error { return nil }
func (b *brokenBackend) close()      { b.over = true }
func (b *brokenBackend) wakeLoop()   { b.late = b.late || b.over }

func (b *brokenBackend) awaitCompletions(bool, func(*Op, int32)) error {
	b.l.Post(func() {}) // by another goroutine, just now
	return errBroken
}

// TestFailedLoopRefusesPosts: a loop refuses functions after a failure of the backend, and leaves the closed backend
// alone.
func TestFailedLoopRefusesPosts(t *testing.T) {
	b := &brokenBackend{}
	b.l = newLoop(b)
	if err := b.l.Run(); !errors.Is(err, errBroken) {
		t.Fatal(err)
	}
	if b.l.Post(func() {}) {
		t.Error("the loop has ended and took a function")
	}
	b.l.Close()
	if b.late {
		t.Error("the loop woke its backend after the backend's end")
	}
}

func TestNoAllocation(t *testing.T) {
	l, err := New(64)
	if err != nil {
		t.Fatal(err)
	}
	if !l.Native() {
		t.Skip("no io_uring here")
	}
	run(t, l)
	fd, buf := tempFile(t, 0), make([]byte, 4096)
	res := make(chan int32, 1)
	op := &Op{Done: func(_ *Op, n int32) { res <- n }}
	write := func() { l.Write(op, fd, buf, 0) }
	allocs := testing.AllocsPerRun(1000, func() {
		l.Post(write)
		<-res
	})
	if allocs > 0.1 {
		t.Errorf("%v allocations per I/O", allocs)
	}
}
