package uring

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// workers replaces an io_uring: goroutines that block in the kernel, and one goroutine that sits in epoll.
type workers struct {
	ops   chan *Op
	count int // of them, from the start
	begun int
	epoll int
	event int // ends the poller
	woken chan struct{}
	wg    sync.WaitGroup

	mu    sync.Mutex
	ready []result
	polls map[int32]*Op // one poll per descriptor at a time

	spare   []result
	backlog []*Op // did not fit into ops; the loop's thread only
}

type result struct {
	op  *Op
	res int32
}

func newWorkers(n int) (*workers, error) {
	w := &workers{ops: make(chan *Op, 256), count: max(n, 1), woken: make(chan struct{}, 1), polls: map[int32]*Op{}}
	var err error
	if w.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("uring: epoll: %w", err)
	}
	if w.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		_ = unix.Close(w.epoll)
		return nil, fmt.Errorf("uring: eventfd: %w", err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(w.event)}
	if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, w.event, &ev); err != nil {
		_, _ = unix.Close(w.epoll), unix.Close(w.event)
		return nil, fmt.Errorf("uring: epoll: %w", err)
	}
	return w, nil
}

func (w *workers) open() error {
	w.wg.Add(1)
	go w.runPoller()
	w.allowBlocking(0)
	return nil
}

// allowBlocking never makes the workers fewer.
func (w *workers) allowBlocking(extra int) {
	for ; w.begun < w.count+extra; w.begun++ {
		w.wg.Go(func() {
			for op := range w.ops {
				w.reportResult(op, op.runBlocking())
			}
		})
	}
}

func (w *workers) close() {
	close(w.ops)
	_, _ = unix.Write(w.event, one)
	w.wg.Wait()
	_ = unix.Close(w.event)
	_ = unix.Close(w.epoll)
}

func (w *workers) runPoller() {
	defer w.wg.Done()
	var evs [64]unix.EpollEvent
	for {
		n, err := unix.EpollWait(w.epoll, evs[:], -1)
		if err != nil && err != unix.EINTR {
			panic("uring: epoll_wait: " + err.Error()) // only a bug can do that
		}
		for _, ev := range evs[:max(n, 0)] {
			if ev.Fd == int32(w.event) {
				return
			}
			w.endPoll(ev.Fd, int32(ev.Events))
		}
	}
}

func (w *workers) endPoll(fd, res int32) {
	w.mu.Lock()
	op := w.polls[fd]
	delete(w.polls, fd)
	w.mu.Unlock()
	if op != nil {
		_ = unix.EpollCtl(w.epoll, unix.EPOLL_CTL_DEL, int(fd), nil)
		w.reportResult(op, res)
	}
}

func (w *workers) reportResult(op *Op, res int32) {
	w.mu.Lock()
	w.ready = append(w.ready, result{op, res})
	w.mu.Unlock()
	w.wakeLoop()
}

func (w *workers) wakeLoop() {
	select {
	case w.woken <- struct{}{}:
	default:
	}
}

func (w *workers) startOp(op *Op) {
	if op.code != opPollAdd {
		w.backlog = append(w.backlog, op)
		return
	}
	w.mu.Lock()
	w.polls[op.fd] = op
	w.mu.Unlock()
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: op.fd}
	if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, int(op.fd), &ev); err != nil {
		w.endPoll(op.fd, -errnoOf(err))
	}
}

func (w *workers) cancelPoll(op *Op) { w.endPoll(op.fd, -int32(unix.ECANCELED)) }

func (w *workers) awaitCompletions(block bool, done func(op *Op, res int32)) error {
	for len(w.backlog) > 0 {
		select {
		case w.ops <- w.backlog[0]:
			w.backlog = w.backlog[1:]
			continue
		default:
		}
		break
	}
	if block {
		<-w.woken
	}
	w.mu.Lock()
	ready := w.ready
	w.ready = w.spare[:0]
	w.mu.Unlock()
	for i, r := range ready {
		ready[i].op = nil
		done(r.op, r.res)
	}
	w.spare = ready
	return nil
}

// runBlocking does the op by blocking.
func (op *Op) runBlocking() int32 {
	for {
		var n int
		var err error
		switch op.code {
		case opRead:
			n, err = unix.Pread(int(op.fd), op.buf, op.off)
		case opWrite:
			n, err = unix.Pwrite(int(op.fd), op.buf, op.off)
		case opFsync:
			err = unix.Fdatasync(int(op.fd))
		case opFallocate:
			err = unix.Fallocate(int(op.fd), op.mode, op.off, op.n)
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return -errnoOf(err)
		}
		return int32(n)
	}
}

// errnoOf is the number of an error of a system call.
func errnoOf(err error) int32 {
	e := unix.EIO
	errors.As(err, &e)
	return int32(e)
}
