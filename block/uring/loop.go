// Package uring runs asynchronous file I/O on one thread. A Loop is an OS thread with an io_uring; where the kernel
// or a seccomp filter forbids io_uring, the same Loop works through a few worker goroutines.
//
// Everything but New, Post, Do and Close belongs to the loop's thread: the thread starts ops and calls their Done, so
// the data behind a Loop needs no locks. An Op is reusable as soon as its Done runs, and nothing is allocated per
// I/O. Ops that are started while completions are handled reach the kernel in small groups.
//
// Syncs, allocations and some writes block in threads of the kernel, of which a Loop has two: more only fight for the
// locks of files. Hanging threads do not count: for each op that takes longer than a second or two the kernel may use
// one more thread.
//
// The caller's goroutine in Run is the loop's thread; Run starts and awaits the fallback's goroutines.
package uring

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrClosed is returned by Do when the loop has ended.
var ErrClosed = errors.New("uring: the loop has ended")

// Op is one operation. The zero value with a Done is ready; an Op in progress must not be copied or reused.
type Op struct {
	// Done is called exactly once per start, on the loop's thread; res is a count of bytes or -errno.
	Done func(op *Op, res int32)
	// Tag and Ctx belong to the caller.
	Tag uint64
	Ctx any
	// Blocks says that the op surely blocks, as a write does where a file has no blocks yet: the kernel skips the try
	// without blocking. Blocks holds for one start.
	Blocks bool

	code  uint8
	busy  bool
	slot  uint32
	id    uint64
	fd    int32
	mode  uint32
	off   int64
	n     int64
	check uint32 // number of checks at the start of the op
	buf   []byte // keeps the memory reachable while the kernel uses it
	prev  *Op    // list of polls in progress, for Close to cancel
	next  *Op
}

// Codes of ops, as io_uring numbers them.
const (
	opNop       = 0
	opFsync     = 3
	opPollAdd   = 6
	opCancel    = 14
	opFallocate = 17
	opRead      = 22
	opWrite     = 23
)

// backend is the io_uring or the worker goroutines. All but wakeLoop is called on the loop's thread only.
type backend interface {
	open() error
	startOp(op *Op)
	cancelPoll(op *Op)
	// awaitCompletions hands the queue to the kernel, waits for a completion or a wake unless told not to, and calls done
	// for each completion.
	awaitCompletions(block bool, done func(op *Op, res int32)) error
	wakeLoop()
	// allowBlocking lets extra more ops block in the kernel at a time than at the start, waiting ops included.
	allowBlocking(extra int)
	close()
}

// Loop is one thread of I/O.
type Loop struct {
	be backend

	mu     sync.Mutex
	posted []func()
	closed bool // Close was called
	ran    bool // Run was called
	ended  bool // nothing posted from now on will run
	done   chan struct{}

	// The loop's thread only:
	spare    []func()
	polls    *Op
	inflight int
	complete func(op *Op, res int32)
	// Ops on a hanging disk keep the threads that they block in, and ops on other disks would wait for these threads.
	// So while ops are in progress the loop checks now and then for long ones: the kernel may use one more thread for
	// each.
	checks uint32
	ages   [3]int // ops in progress, polls excepted: since the last check, since the check before, and longer
	extra  int
	timer  *time.Timer // of the next check
	awake  bool        // a next check is scheduled
}

const (
	checkEvery = time.Second
	extraMost  = 256
)

// New makes a loop whose ring has room for entries submissions at a time; more may be in progress.
func New(entries int) (*Loop, error) {
	r, err := newRing(uint32(entries))
	if err == nil {
		return newLoop(r), nil
	}
	if !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return nil, err
	}
	w, err := newWorkers(min(entries, 8))
	if err != nil {
		return nil, err
	}
	return newLoop(w), nil
}

func newLoop(be backend) *Loop {
	l := &Loop{be: be, done: make(chan struct{})}
	l.complete = l.finishOp
	return l
}

// Native reports whether the loop has an io_uring; false means worker goroutines.
func (l *Loop) Native() bool {
	_, ok := l.be.(*ring)
	return ok
}

// Run is the loop. Run returns after Close, when every op is complete; polls are cancelled (-ECANCELED).
func (l *Loop) Run() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	l.mu.Lock()
	if l.ran || l.ended {
		l.mu.Unlock()
		return errors.New("uring: Run called twice, or after Close")
	}
	l.ran = true
	l.mu.Unlock()
	defer close(l.done)
	defer l.be.close()
	defer l.refusePosts() // before the backend closes: a Post after it would wake what is closed
	defer func() {
		if l.timer != nil {
			l.timer.Stop()
		}
	}()
	if err := l.be.open(); err != nil {
		return err
	}
	for {
		if l.runPosted() {
			for op := l.polls; op != nil; op = op.next {
				l.be.cancelPoll(op)
			}
			if l.inflight == 0 && l.endPosting() {
				return nil
			}
		}
		if err := l.be.awaitCompletions(!l.hasPosted(), l.complete); err != nil {
			return fmt.Errorf("uring: the loop cannot continue: %w", err)
		}
	}
}

// runPosted runs the posted functions and reports whether the loop is to end.
func (l *Loop) runPosted() bool {
	l.mu.Lock()
	fns := l.posted
	l.posted = l.spare[:0]
	closed := l.closed
	l.mu.Unlock()
	for i, fn := range fns {
		fn()
		fns[i] = nil
	}
	l.spare = fns
	return closed
}

func (l *Loop) hasPosted() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.posted) > 0
}

// refusePosts has Post report false from now on. A loop that failed never runs the functions it has left.
func (l *Loop) refusePosts() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
}

// endPosting has Post report false from now on, unless something came in.
func (l *Loop) endPosting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.posted) > 0 && l.inflight == 0 {
		return false
	}
	l.ended = true
	return true
}

// Post has fn run on the loop's thread soon, in the order of the calls. Any goroutine may call Post, the loop's own
// too. Post reports false, and fn never runs, once the loop has ended.
func (l *Loop) Post(fn func()) bool {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return false
	}
	l.posted = append(l.posted, fn)
	first := len(l.posted) == 1
	if first {
		l.be.wakeLoop() // under the lock, so that the loop cannot end and close the backend in between
	}
	l.mu.Unlock()
	return true
}

// Do has fn run on the loop's thread and waits for fn's end. The loop's own thread must not call Do.
func (l *Loop) Do(fn func()) error {
	ran := make(chan struct{})
	if !l.Post(func() { fn(); close(ran) }) {
		return ErrClosed
	}
	select {
	case <-ran:
		return nil
	case <-l.done:
		select {
		case <-ran:
			return nil
		default:
			return ErrClosed
		}
	}
}

// Close asks the loop to end; Run returns once every op is done. A repeated Close does nothing.
func (l *Loop) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	if !l.ran {
		l.ended = true
		l.be.close()
		return
	}
	if !l.ended {
		l.be.wakeLoop()
	}
}

func (l *Loop) startOp(op *Op) {
	if op.busy {
		panic("uring: op started while it is in progress")
	}
	op.busy = true
	l.inflight++
	if op.code != opPollAdd {
		op.check = l.checks
		l.ages[0]++
		l.scheduleCheck()
	}
	l.be.startOp(op)
}

func (l *Loop) scheduleCheck() {
	switch {
	case l.awake:
		return
	case l.timer == nil:
		l.timer = time.AfterFunc(checkEvery, func() { l.Post(l.checkLongOps) })
	default:
		l.timer.Reset(checkEvery)
	}
	l.awake = true
}

// checkLongOps lets so many more ops block in the kernel as take long. An idle loop does not check.
func (l *Loop) checkLongOps() {
	l.checks++
	l.ages = [3]int{0, l.ages[0], l.ages[1] + l.ages[2]}
	if extra := min(l.ages[2], extraMost); extra+l.extra > 0 {
		l.extra = extra
		l.be.allowBlocking(extra)
	}
	if l.awake = false; l.ages[1]+l.ages[2]+l.extra > 0 {
		l.scheduleCheck()
	}
}

func (l *Loop) finishOp(op *Op, res int32) {
	l.inflight--
	op.busy, op.Blocks = false, false
	op.buf = nil
	if op.code == opPollAdd {
		l.unlinkPoll(op)
	} else {
		l.ages[min(l.checks-op.check, 2)]--
	}
	op.Done(op, res)
}

func (l *Loop) unlinkPoll(op *Op) {
	if op.prev != nil {
		op.prev.next = op.next
	} else {
		l.polls = op.next
	}
	if op.next != nil {
		op.next.prev = op.prev
	}
	op.prev, op.next = nil, nil
}

// Read reads into buf from off. Fewer bytes than asked for is not an error.
func (l *Loop) Read(op *Op, fd int, buf []byte, off int64) {
	op.code, op.fd, op.buf, op.off, op.n = opRead, int32(fd), buf, off, int64(len(buf))
	l.startOp(op)
}

// Write writes buf at off. Fewer bytes than asked for is not an error.
func (l *Loop) Write(op *Op, fd int, buf []byte, off int64) {
	op.code, op.fd, op.buf, op.off, op.n = opWrite, int32(fd), buf, off, int64(len(buf))
	l.startOp(op)
}

// Fdatasync makes all writes durable that completed before this call.
func (l *Loop) Fdatasync(op *Op, fd int) {
	op.code, op.fd, op.off, op.n = opFsync, int32(fd), 0, 0
	l.startOp(op)
}

// Fallocate is fallocate(2).
func (l *Loop) Fallocate(op *Op, fd int, mode uint32, off, n int64) {
	op.code, op.fd, op.mode, op.off, op.n = opFallocate, int32(fd), mode, off, n
	l.startOp(op)
}

// PollIn waits once until fd is readable or broken; res is the poll events, or -ECANCELED.
func (l *Loop) PollIn(op *Op, fd int) {
	op.code, op.fd, op.off, op.n = opPollAdd, int32(fd), 0, 0
	if l.polls != nil {
		l.polls.prev = op
	}
	op.prev, op.next, l.polls = nil, l.polls, op
	l.startOp(op)
}

// CancelPoll ends a poll in progress with -ECANCELED, unless the poll completes at the same moment. Done still runs,
// later. CancelPoll ignores an idle poll.
func (l *Loop) CancelPoll(op *Op) {
	if op.busy && op.code == opPollAdd {
		l.be.cancelPoll(op)
	}
}
