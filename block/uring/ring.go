package uring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's side of io_uring, as far as this package uses it (include/uapi/linux/io_uring.h).
const (
	setupCQSize       = 1 << 3
	setupRDisabled    = 1 << 6
	setupSingleIssuer = 1 << 12
	setupDeferTaskrun = 1 << 13

	enterGetEvents = 1 << 0

	registerEnableRings = 12
	registerIOWQWorkers = 19 // since 5.15

	// The kernel hands operations that would block (writes that allocate, syncs) to threads. Writes of one file take
	// turns there anyhow, and more threads only fight for the file's lock: on two processors, two threads wrote 1.1
	// to 1.4 times as fast as the default eight. One thread would let every write wait for a sync.
	kernelWorkers = 2
	// So many reads and writes go to the disk together. Fewer cost system calls; with more the disk idles while the
	// loop gathers.
	together = 4

	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1

	offSQRing = 0
	offSQEs   = 0x10000000

	fsyncDatasync = 1 << 0
	sqeAsync      = 1 << 4
)

type params struct {
	sqEntries, cqEntries, flags, cpu, idle, features, wq uint32
	_                                                    [3]uint32
	sq                                                   struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

type sqe struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	off, addr     uint64
	len, opFlags  uint32
	userData      uint64
	_             [3]uint64
}

type cqe struct {
	userData uint64
	res      int32
	flags    uint32
}

// User data that is no op's slot.
const (
	tagWake   = ^uint64(0)
	tagCancel = ^uint64(0) - 1
	tagNudge  = ^uint64(0) - 2
	slotMask  = 1<<24 - 1
)

// one is the value that wakes the reader of an eventfd.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// ring is an io_uring and the table of ops in progress.
type ring struct {
	fd       int
	single   bool // made for one issuer: submitted to by the loop's thread only
	mem      []byte
	sqeMem   []byte
	sqes     []sqe
	cqes     []cqe
	sqHead   *uint32
	sqTail   *uint32
	cqHead   *uint32
	cqTail   *uint32
	sqMask   uint32
	cqMask   uint32
	ops      []*Op // by slot; also keeps ops and their buffers reachable
	free     []uint32
	turn     uint64 // counts ops, so that a late cancel cannot hit the slot's next user
	stowed   []cqe  // taken from the completion queue to make room, not handled yet
	event    int
	eventBuf []byte
	nudged   bool
}

func setupRing(entries, flags uint32) (int, *params, error) {
	p := &params{flags: flags, cqEntries: max(entries*4, 1024)}
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, nil, e
	}
	return int(fd), p, nil
}

func newRing(entries uint32) (*ring, error) {
	r := &ring{event: -1, single: true, eventBuf: make([]byte, 8)}
	var p *params
	var err error
	r.fd, p, err = setupRing(entries, setupCQSize|setupRDisabled|setupSingleIssuer|setupDeferTaskrun)
	if errors.Is(err, unix.EINVAL) { // before 6.1
		r.single = false
		r.fd, p, err = setupRing(entries, setupCQSize)
	}
	if err != nil {
		return nil, fmt.Errorf("uring: io_uring_setup of %d entries: %w", entries, err)
	}
	if p.features&featSingleMmap == 0 || p.features&featNoDrop == 0 {
		r.close()
		return nil, fmt.Errorf("uring: this kernel's io_uring is too old (before 5.5): %w", unix.ENOSYS)
	}
	size := max(int(p.sq.array+p.sqEntries*4), int(p.cq.cqes+p.cqEntries*16))
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	if r.mem, err = unix.Mmap(r.fd, offSQRing, size, prot, flags); err != nil {
		r.close()
		return nil, fmt.Errorf("uring: map the rings: %w", err)
	}
	if r.sqeMem, err = unix.Mmap(r.fd, offSQEs, int(p.sqEntries)*64, prot, flags); err != nil {
		r.close()
		return nil, fmt.Errorf("uring: map the submissions: %w", err)
	}
	at := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.mem[off])) }
	r.sqes = unsafe.Slice((*sqe)(unsafe.Pointer(&r.sqeMem[0])), p.sqEntries)
	r.cqes = unsafe.Slice((*cqe)(unsafe.Pointer(&r.mem[p.cq.cqes])), p.cqEntries)
	r.sqHead, r.sqTail, r.sqMask = at(p.sq.head), at(p.sq.tail), *at(p.sq.mask)
	r.cqHead, r.cqTail, r.cqMask = at(p.cq.head), at(p.cq.tail), *at(p.cq.mask)
	// Submissions are always used in order, so the indirection is filled once.
	for i, arr := 0, unsafe.Slice(at(p.sq.array), p.sqEntries); i < len(arr); i++ {
		arr[i] = uint32(i)
	}
	if r.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		r.close()
		return nil, fmt.Errorf("uring: eventfd: %w", err)
	}
	return r, nil
}

// open binds the ring to the calling thread, and listens for wakes.
func (r *ring) open() error {
	if r.single {
		_, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), registerEnableRings, 0, 0, 0, 0)
		if e != 0 {
			return fmt.Errorf("uring: enable the ring: %w", e)
		}
	}
	r.allowBlocking(0)
	r.listenForWakes()
	return nil
}

func (r *ring) allowBlocking(extra int) {
	limit := [2]uint32{uint32(kernelWorkers + extra), 0} // 0: as it is
	_, _, _ = unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), registerIOWQWorkers,
		uintptr(unsafe.Pointer(&limit)), 2, 0, 0) // an older kernel does without
	if extra > 0 && !r.nudged { // only when a thread is given something the kernel looks whether there may be one more
		s := r.nextSubmission()
		s.opcode, s.flags, s.fd, s.userData = opNop, sqeAsync, -1, tagNudge
		r.nudged = true
	}
}

func (r *ring) listenForWakes() {
	s := r.nextSubmission()
	s.opcode, s.fd, s.userData = opRead, int32(r.event), tagWake
	s.addr, s.len = uint64(uintptr(unsafe.Pointer(&r.eventBuf[0]))), 8
}

func (r *ring) wakeLoop() {
	_, _ = unix.Write(r.event, one) // EAGAIN: the counter is full, so a wake is in progress anyhow
}

func (r *ring) close() {
	for _, m := range [][]byte{r.mem, r.sqeMem} {
		if m != nil {
			_ = unix.Munmap(m)
		}
	}
	_ = unix.Close(r.fd)
	if r.event >= 0 {
		_ = unix.Close(r.event)
	}
	r.mem, r.sqeMem = nil, nil
}

// nextSubmission returns a cleared submission, queued for the next enter.
func (r *ring) nextSubmission() *sqe {
	t := *r.sqTail
	for t-atomic.LoadUint32(r.sqHead) > r.sqMask {
		// Full. awaitCompletions meets a failure here again, and reports the error; only no room at all cannot be survived.
		// Busy says, before Linux 5.19, that completions do not fit: the kernel takes nothing until there is room.
		switch err := r.enter(false); {
		case err == nil, errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EBUSY):
			r.stowCompletions()
		default:
			panic("uring: submission queue is full and stays so: " + err.Error())
		}
	}
	s := &r.sqes[t&r.sqMask]
	*s = sqe{}
	atomic.StoreUint32(r.sqTail, t+1)
	return s
}

func (r *ring) enter(block bool) error {
	n := *r.sqTail - atomic.LoadUint32(r.sqHead)
	var e unix.Errno
	if block {
		_, _, e = unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 1, enterGetEvents, 0, 0)
	} else {
		// Does not wait: the scheduler need not hear of it.
		_, _, e = unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 0, enterGetEvents, 0, 0)
	}
	if e != 0 && e != unix.EINTR {
		return e
	}
	return nil
}

func (r *ring) startOp(op *Op) {
	if len(r.free) == 0 {
		r.ops = append(r.ops, nil)
		r.free = append(r.free, uint32(len(r.ops)-1))
	}
	op.slot = r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.ops[op.slot] = op
	r.turn++
	op.id = uint64(op.slot) | r.turn<<25>>1 // never one of the tags: the top bit is clear
	s := r.nextSubmission()
	s.opcode, s.fd, s.userData = op.code, op.fd, op.id
	if op.Blocks {
		s.flags = sqeAsync
	}
	switch op.code {
	case opRead, opWrite:
		if len(op.buf) > 0 {
			s.addr = uint64(uintptr(unsafe.Pointer(&op.buf[0])))
		}
		s.len, s.off = uint32(op.n), uint64(op.off)
	case opFsync:
		s.opFlags = fsyncDatasync
	case opFallocate:
		s.off, s.addr, s.len = uint64(op.off), uint64(op.n), op.mode
	case opPollAdd:
		s.opFlags = unix.POLLIN
	}
	if op.code == opRead || op.code == opWrite {
		r.submitQueued()
	}
}

// submitQueued starts the disk on what is queued, before more is gathered. A disk with little to do gets each at once.
func (r *ring) submitQueued() {
	queued := int(*r.sqTail - atomic.LoadUint32(r.sqHead))
	under := len(r.ops) - len(r.free) - queued
	if queued >= max(1, min(together, under/2)) {
		_ = r.enter(false) // the rest stays queued; awaitCompletions meets the error again
	}
}

func (r *ring) cancelPoll(op *Op) {
	s := r.nextSubmission()
	s.opcode, s.fd, s.userData, s.addr = opCancel, -1, tagCancel, op.id
}

func (r *ring) awaitCompletions(block bool, done func(op *Op, res int32)) error {
	if block && (len(r.stowed) > 0 || *r.cqHead != atomic.LoadUint32(r.cqTail)) {
		block = false
	}
	if err := r.enter(block); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("io_uring_enter: %w", err)
	}
	for {
		c, ok := r.takeCompletion()
		if !ok {
			return nil
		}
		switch c.userData {
		case tagWake:
			r.listenForWakes()
		case tagCancel: // the poll's own completion tells
		case tagNudge:
			r.nudged = false
		default:
			slot := uint32(c.userData) & slotMask
			op := r.ops[slot]
			r.ops[slot] = nil
			r.free = append(r.free, slot)
			done(op, c.res)
		}
	}
}

// takeCompletion returns the next completion.
func (r *ring) takeCompletion() (c cqe, ok bool) {
	if len(r.stowed) > 0 {
		c, r.stowed = r.stowed[0], r.stowed[1:]
		return c, true
	}
	return r.popCompletion()
}

func (r *ring) popCompletion() (c cqe, ok bool) {
	h := *r.cqHead
	if h == atomic.LoadUint32(r.cqTail) {
		return c, false
	}
	c = r.cqes[h&r.cqMask]
	atomic.StoreUint32(r.cqHead, h+1)
	return c, true
}

// stowCompletions makes room in the completion queue.
func (r *ring) stowCompletions() {
	for c, ok := r.popCompletion(); ok; c, ok = r.popCompletion() {
		r.stowed = append(r.stowed, c)
	}
}
