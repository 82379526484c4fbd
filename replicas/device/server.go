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
	headSize = inSize + ioSize // of READ and WRITE: a payload then stands at its buffer's start
	batch    = 64              // requests read from one connection before another gets its turn
	copyMax  = 16 * page       // larger requests keep the buffer they were read into
	trimWait = 5 * time.Second // after which an idle pool is given back
)

// server serves the connections of one loop. All of it belongs to the loop's thread.
type server struct {
	loop *uring.Loop
	log  *slog.Logger
	pool pool

	stage    slot      // where payloads are read to; no memory when a request had to keep it
	head     []byte    // where the fixed part of a request is read to: what is longer goes on in stage
	vec      *[2]iovec // of both
	free     []*request
	hungry   []*conn // not polled until there is memory
	serving  bool    // somewhere up the stack: a backend may complete within Submit
	freed    bool    // memory came back since the hungry were last fed
	trimming bool
	arena    []byte // for the fixed parts of requests
}

// request is one I/O on its way through the backend. It is reused, never freed.
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
	s.pool.warn = func(err error) {
		once.Do(func() { log.Warn("memory for requests is not locked or not to be had", "err", err) })
	}
	return s
}

// prepare makes sure that there is memory to read the first request.
func (s *server) prepare() error {
	if s.stage.mem != nil || s.pool.used > 0 { // with a request that keeps it, which will give it back
		return nil
	}
	if s.head == nil {
		m, err := locked(page, s.pool.warn)
		if err != nil {
			return err
		}
		s.head, s.vec, m = m[:headSize:headSize], view[[2]iovec](m[512:]), m[1024:]
		s.arena = m
		s.vec[0] = iovec{uintptr(unsafe.Pointer(&s.head[0])), uintptr(headSize)}
	}
	var ok bool
	if s.stage, ok = s.pool.get(maxIO); !ok {
		return syscall.ENOMEM
	}
	return nil
}

// may reports whether c may read a request of unknown size. A device alone gets a third of the cap; the more is in use,
// the less each gets, and a device with nothing under way is never refused: none can starve the others.
func (s *server) may(c *conn) bool {
	return s.stage.mem != nil && (c.used == 0 || c.used+maxIO <= (poolCap-s.pool.used)/2)
}

func (s *server) request() *request {
	if n := len(s.free); n > 0 {
		r := s.free[n-1]
		s.free = s.free[:n-1]
		return r
	}
	const cell = int(unsafe.Sizeof(wire{}))
	if len(s.arena) < cell {
		m, err := locked(page, s.pool.warn)
		if err != nil {
			s.pool.warn(err)
			m = make([]byte, page)
		}
		s.arena = m
	}
	r := &request{wire: view[wire](s.arena)}
	s.arena = s.arena[cell:]
	r.Done = r.finish
	return r
}

// take finds memory for a request of n bytes that was read into the staging buffer; keep says that its payload
// matters.
func (s *server) take(n int, keep bool) slot {
	if n <= copyMax {
		if m, ok := s.pool.get(n); ok {
			if keep {
				copy(m.mem, s.stage.mem[:n])
			}
			return m
		}
	}
	m := s.stage
	s.stage, _ = s.pool.get(maxIO) // none: nothing is read until some request is done
	return m
}

// give takes a request's memory back.
func (s *server) give(m slot) {
	s.freed = true
	if m.class == bigClass && s.stage.mem == nil {
		s.stage = m
		return
	}
	s.pool.put(m)
}

// feed lets the connections go on that waited for memory.
func (s *server) feed() {
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
			c.drain()
		}
	}
	s.serving = false
}

// settle looks, after a request is done, whether the pool can be given back soon.
func (s *server) settle() {
	if s.trimming || s.pool.size() <= slabSize {
		return
	}
	s.trimming = true
	time.AfterFunc(trimWait, func() { s.loop.Post(s.trim) })
}

func (s *server) trim() {
	s.trimming = false
	if s.stage.mem == nil || s.pool.used != int64(classSize[bigClass]) {
		if s.pool.size() > slabSize {
			s.settle()
		}
		return
	}
	s.pool.put(s.stage)
	s.stage = slot{}
	s.pool.trim()
	if err := s.prepare(); err != nil {
		s.log.Error("no memory to serve devices", "err", err)
	}
}

// refuse answers with an errno.
func (c *conn) refuse(unique uint64, e unix.Errno) {
	w := view[outHeader](c.srv.head)
	*w = outHeader{uint32(outSize), -int32(e), unique}
	c.write(uintptr(unsafe.Pointer(w)), uintptr(outSize))
}

func (c *conn) write(base, n uintptr) {
	_, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(c.fd), base, n)
	c.written(e)
}

func (c *conn) written(e syscall.Errno) {
	// ENOENT: the kernel no longer wants that answer. ENODEV, EBADF: the connection was ended.
	if e != 0 && e != unix.ENOENT && e != unix.ENODEV && e != unix.EBADF {
		c.srv.log.Error("a reply to the kernel failed", "device", c.name, "err", e)
	}
}

// finish answers a request that the backend is done with.
func (r *request) finish(*block.Request) {
	c, w := r.conn, r.wire
	w.head = outHeader{uint32(outSize), errno(r.Err), r.unique}
	base := uintptr(unsafe.Pointer(w))
	switch {
	case r.Err != nil || r.Op > block.OpWrite:
		c.write(base, uintptr(outSize))
	case r.Op == block.OpWrite:
		w.head.length = uint32(outSize + writeSize)
		w.write = writeOut{size: uint32(r.Len)}
		c.write(base, uintptr(outSize+writeSize))
	default:
		w.head.length += uint32(r.Len)
		w.vec[0] = iovec{base, uintptr(outSize)}
		w.vec[1] = iovec{uintptr(unsafe.Pointer(&r.slot.mem[0])), uintptr(r.Len)}
		_, _, e := unix.RawSyscall(unix.SYS_WRITEV, uintptr(c.fd), uintptr(unsafe.Pointer(&w.vec[0])), 2)
		c.written(e)
	}
	if r.slot.mem != nil {
		c.used -= int64(classSize[r.slot.class])
		c.srv.give(r.slot)
	}
	r.slot, r.Buf, r.Err, r.conn = slot{}, nil, nil, nil
	s := c.srv
	s.free = append(s.free, r)
	c.inflight--
	c.ended()
	s.feed()
	s.settle()
}

// errno is how the kernel is told of err.
func errno(err error) int32 {
	if err == nil {
		return 0
	}
	var e syscall.Errno
	if errors.As(err, &e) && e > 0 && e < 512 {
		return -int32(e)
	}
	return -int32(unix.EIO)
}
