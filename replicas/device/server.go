package device

import (
	"errors"
	"log/slog"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

const (
	headSize  = inSize + ioSize // of READ and WRITE: puts a payload at the buffer's start
	batch     = 64              // requests read from one connection before another gets a turn
	copyMax   = 16 * page       // larger requests keep the buffer of the read
	trimWait  = 5 * time.Second // after which an idle pool is given back
	wantAgain = time.Second     // when memory was not to be had
	requests  = 256             // made at a time
	fewLeft   = requests / 4    // the number at which more are made
)

// server serves the connections of one loop. The server belongs to the loop's thread.
type server struct {
	loop *uring.Loop
	log  *slog.Logger
	pool pool

	stage    slot      // target of payload reads; no memory when a request had to keep the buffer
	head     []byte    // target of a request's fixed part; the rest of a longer one continues in stage
	vec      *[2]iovec // of both
	free     []*request
	hungry   []*conn // not polled until there is memory
	conns    int     // started and not ended; without any no memory is needed
	serving  bool    // somewhere up the stack: a backend may complete within Submit
	freed    bool    // memory came back since the hungry were last fed
	trimming bool
	growing  bool
	asking   bool // again, soon
	warn     func(error)
	aside    sync.WaitGroup // goroutines that take and give memory beside the thread
}

// request is one I/O in the backend. A request is reused, never freed.
type request struct {
	block.Request
	conn   *conn
	unique uint64
	slot   slot
	wire   *wire
}

type iovec struct{ base, length uintptr }

// wire is a reply's fixed part, in locked memory.
type wire struct {
	head  outHeader
	write writeOut
	vec   [2]iovec
	_     [8]byte
}

func newServer(loop *uring.Loop, log *slog.Logger) *server {
	s := &server{loop: loop, log: log}
	var once sync.Once
	s.warn = func(err error) {
		once.Do(func() { log.Warn("memory for requests is not locked or not to be had", "err", err) })
	}
	return s
}

// prepareMemory takes the memory for serving: to read the first request, and to continue without more.
func (s *server) prepareMemory() error {
	s.conns++
	if s.conns > 1 || s.stage.mem != nil && s.pool.size()-s.pool.leased >= reserved*slabSize {
		return nil
	}
	err := s.reserveMemory()
	if err != nil {
		s.conns--
	}
	return err
}

// reserveMemory takes the memory that exists as long as connections do; on an error, none of it.
func (s *server) reserveMemory() (err error) {
	var mapped [][]byte
	defer func() {
		for _, m := range mapped {
			if err != nil {
				unmapLocked(m)
			}
		}
	}()
	for range reserved {
		slab, err := mapLocked(slabSize, s.warn)
		if err != nil {
			return err
		}
		mapped = append(mapped, slab)
	}
	if s.head == nil { // stays
		m, err := mapLocked(page, s.warn)
		if err != nil {
			return err
		}
		mapped = append(mapped, m)
		made, err := s.makeRequests()
		if err != nil {
			return err
		}
		s.free = append(s.free, made...)
		s.head, s.vec = m[:headSize:headSize], view[[2]iovec](m[512:])
		s.vec[0] = iovec{uintptr(unsafe.Pointer(&s.head[0])), uintptr(headSize)}
	}
	for _, slab := range mapped[:reserved] {
		s.pool.addSlab(slab)
	}
	s.refillStage()
	return nil
}

// refillStage finds a missing staging buffer: without a buffer the server reads nothing.
func (s *server) refillStage() {
	if s.stage.mem == nil {
		s.stage, _ = s.pool.getSlot(maxIO)
	}
}

// keptSlabs is how many slabs stay when nothing is in progress.
func (s *server) keptSlabs() int {
	if s.conns == 0 {
		return 0
	}
	return reserved
}

// connectionEnded is called when a connection has ended.
func (s *server) connectionEnded() {
	s.conns--
	s.trimSoon()
}

// makeRequests makes requests. Any goroutine.
func (s *server) makeRequests() ([]*request, error) {
	const cell = int(unsafe.Sizeof(wire{}))
	arena, err := mapLocked(requests*cell, s.warn)
	if err != nil {
		return nil, err
	}
	all, made := make([]request, requests), make([]*request, requests)
	for i := range all {
		r := &all[i]
		r.wire = view[wire](arena[i*cell:])
		r.Done = r.answerKernel
		made[i] = r
	}
	return made, nil
}

// wantMemory asks for more memory, without waiting: the system may have to write through this very thread to find some.
func (s *server) wantMemory() {
	size := s.pool.size()
	slabs := (poolCap + s.pool.leased - size + slabSize - 1) / slabSize
	if slabs <= 0 && s.stage.mem == nil && size < poolCap+s.pool.leased+int64(s.conns)*slabSize {
		slabs = 1 // unanswered requests must not hold up connections with nothing in progress
	}
	slabs = min(slabs, int64(len(s.pool.slabs))) // twice as much as before
	few := len(s.free) < fewLeft
	if s.growing || (slabs <= 0 && !few) {
		return
	}
	s.growing = true
	s.aside.Go(func() {
		var got [][]byte
		var made []*request
		var err error
		for int64(len(got)) < slabs && err == nil {
			var m []byte
			if m, err = mapLocked(slabSize, s.warn); err == nil {
				got = append(got, m)
			}
		}
		if few && err == nil {
			made, err = s.makeRequests()
		}
		if err != nil {
			s.warn(err)
		}
		if !s.loop.Post(func() { s.addMemory(got, made) }) {
			for _, m := range got {
				unmapLocked(m)
			}
		}
	})
}

// addMemory takes in the memory from wantMemory. Meanwhile the last buffer may have been leased, or trimPool may have
// removed all.
func (s *server) addMemory(slabs [][]byte, made []*request) {
	s.growing = false
	for _, m := range slabs {
		s.pool.addSlab(m)
	}
	s.free = append(s.free, made...)
	s.refillStage()
	s.freed = true
	s.feedHungry()
	s.trimSoon()
	if len(s.hungry) > 0 && (s.stage.mem == nil || len(s.free) == 0) { // no memory, and maybe no later call of wantMemory
		s.wantSoon()
	}
}

func (s *server) wantSoon() {
	if s.asking {
		return
	}
	s.asking = true
	time.AfterFunc(wantAgain, func() { s.loop.Post(func() { s.asking = false; s.wantMemory() }) })
}

// mayRead reports whether c may read a request of unknown size. A device alone gets a third of the memory; the more is
// in use, the less each gets, and a device with nothing in progress is refused only when nothing is left at all: no
// device can starve the others.
func (s *server) mayRead(c *conn) bool {
	if len(s.free) < fewLeft {
		s.wantMemory()
	}
	if len(s.free) == 0 || s.stage.mem == nil {
		s.wantMemory()
		return false
	}
	if c.used == 0 || c.used+maxIO <= (s.pool.size()-s.pool.used)/2 {
		return true
	}
	s.wantMemory()
	return false
}

// newRequest is a free request. mayRead has checked that one exists.
func (s *server) newRequest() *request {
	n := len(s.free)
	r := s.free[n-1]
	s.free = s.free[:n-1]
	return r
}

// takeMemory finds memory for a request of n bytes in the staging buffer; keep says that the payload matters.
func (s *server) takeMemory(n int, keep bool) slot {
	if n <= copyMax {
		if m, ok := s.pool.getSlot(n); ok {
			if keep {
				copy(m.mem, s.stage.mem[:n])
			}
			return m
		}
	}
	m := s.stage
	s.stage, _ = s.pool.getSlot(maxIO) // none: the server reads nothing until a request is done
	return m
}

// giveBack takes a request's memory back.
func (s *server) giveBack(m slot) {
	s.freed = true
	if m.class == bigClass && s.stage.mem == nil {
		s.stage = m
		return
	}
	s.pool.putSlot(m)
}

// lendMemory leaves memory to a hanging disk until the disk's lease ends. Others get as much in exchange.
func (s *server) lendMemory(m slot, l *block.BufferLease) {
	n := int64(classSize[m.class])
	s.pool.leased += n
	l.OnRelease(func() {
		s.pool.leased -= n
		s.giveBack(m)
		s.feedHungry()
		s.trimSoon()
	})
	s.wantMemory()
}

// feedHungry lets connections continue that waited for memory.
func (s *server) feedHungry() {
	if s.serving {
		return
	}
	s.serving = true
	for s.freed && len(s.hungry) > 0 {
		s.freed = false
		for n := len(s.hungry); n > 0 && s.stage.mem != nil; n-- {
			c := s.hungry[0]
			s.hungry = append(s.hungry[:0], s.hungry[1:]...)
			c.hungry = false
			c.readRequests()
		}
	}
	s.serving = false
}

// trimSoon checks, after a request is done, whether the pool can be given back soon.
func (s *server) trimSoon() {
	if s.trimming || len(s.pool.slabs) <= s.keptSlabs() {
		return
	}
	s.trimming = true
	time.AfterFunc(trimWait, func() { s.loop.Post(s.trimPool) })
}

func (s *server) trimPool() {
	s.trimming = false
	if s.stage.mem == nil || s.pool.used != int64(classSize[bigClass]) {
		s.trimSoon()
		return
	}
	s.pool.putSlot(s.stage)
	s.stage = slot{}
	spare := s.pool.trimSlabs(s.keptSlabs())
	s.refillStage() // no buffer where no slab is kept
	s.aside.Go(func() {
		for _, m := range spare {
			unmapLocked(m)
		}
	})
}

// refuseRequest answers with an errno.
func (c *conn) refuseRequest(unique uint64, e unix.Errno) {
	w := view[outHeader](c.srv.head)
	*w = outHeader{uint32(outSize), -int32(e), unique}
	c.writeReply(uintptr(unsafe.Pointer(w)), uintptr(outSize))
}

func (c *conn) writeReply(base, n uintptr) {
	_, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(c.fd), base, n)
	c.replyWritten(e)
}

func (c *conn) replyWritten(e syscall.Errno) {
	// ENOENT: the kernel no longer wants the answer. ENODEV, EBADF: the connection was ended.
	if e != 0 && e != unix.ENOENT && e != unix.ENODEV && e != unix.EBADF {
		c.srv.log.Error("a reply to the kernel failed", "device", c.name, "err", e)
	}
}

// answerKernel answers a request after the backend.
func (r *request) answerKernel(*block.Request) {
	c, w := r.conn, r.wire
	w.head = outHeader{uint32(outSize), errnoOf(r.Err), r.unique}
	base := uintptr(unsafe.Pointer(w))
	switch {
	case r.Err != nil || r.Op > block.OpWrite:
		c.writeReply(base, uintptr(outSize))
	case r.Op == block.OpWrite:
		w.head.length = uint32(outSize + writeSize)
		w.write = writeOut{size: uint32(r.Len)}
		c.writeReply(base, uintptr(outSize+writeSize))
	default:
		w.head.length += uint32(r.Len)
		w.vec[0] = iovec{base, uintptr(outSize)}
		w.vec[1] = iovec{uintptr(unsafe.Pointer(&r.Buf[0])), uintptr(r.Len)} // the slot's, unless leased
		_, _, e := unix.RawSyscall(unix.SYS_WRITEV, uintptr(c.fd), uintptr(unsafe.Pointer(&w.vec[0])), 2)
		c.replyWritten(e)
	}
	if r.slot.mem != nil {
		c.used -= int64(classSize[r.slot.class])
		if r.Lease.Released() {
			c.srv.giveBack(r.slot)
		} else {
			c.srv.lendMemory(r.slot, r.Lease)
		}
	}
	r.slot, r.Buf, r.Err, r.Lease, r.conn = slot{}, nil, nil, nil, nil
	s := c.srv
	s.free = append(s.free, r)
	s.freed = true
	c.inflight--
	c.closeIfStopped()
	s.feedHungry()
	s.trimSoon()
}

// errnoOf returns the kernel's code for err.
func errnoOf(err error) int32 {
	if err == nil {
		return 0
	}
	var e syscall.Errno
	if errors.As(err, &e) && e > 0 && e < 512 {
		return -int32(e)
	}
	return -int32(unix.EIO)
}
