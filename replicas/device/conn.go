package device

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

// conn is one FUSE connection: the file under one loop device. Fields that change belong to the loop's thread.
//
//	start ----> serving ----> stopping ----> idle (fd closed)
//	                 (stopServing, or the end of the connection by the kernel)
type conn struct {
	srv      *server
	fd       int
	be       block.Submitter
	file     string // the file's name
	name     string // the volume's name, for messages
	readOnly bool
	size     int64

	poll     uring.Op
	armed    bool
	hungry   bool
	stopping bool
	prepared bool // counted by the server
	idleDone bool
	cutDone  bool
	used     int64 // bytes of the pool
	inflight int
	resent   int64         // requests that a predecessor left unanswered
	idle     chan struct{} // closed when nothing is in progress any more and fd is closed
	aborted  chan struct{} // closed when fd is closed, answers or not
}

const forever = 1 << 25 // seconds an answer about names and attributes holds

// startServing begins to serve; resume first asks for a predecessor's unanswered requests.
func (c *conn) startServing(resume bool) error {
	if err := c.srv.prepareMemory(); err != nil {
		return err
	}
	if resume {
		note := outHeader{length: uint32(outSize), err: notifyResend}
		if _, err := unix.Write(c.fd, unsafe.Slice((*byte)(unsafe.Pointer(&note)), outSize)); err != nil {
			c.srv.connectionEnded()
			return err
		}
	}
	c.prepared = true
	c.poll.Done = c.pollDone
	c.armPoll()
	return nil
}

func (c *conn) armPoll() {
	c.armed = true
	c.srv.loop.PollIn(&c.poll, c.fd)
}

func (c *conn) pollDone(_ *uring.Op, res int32) {
	c.armed = false
	if res == -int32(unix.ECANCELED) {
		c.stopping = true
	}
	if !c.stopping {
		c.serveRequests()
	}
	c.closeIfStopped()
}

// stopServing reads no further request, answers the requests in progress, then closes the descriptor.
func (c *conn) stopServing() {
	c.stopping = true
	c.srv.loop.CancelPoll(&c.poll)
	c.closeIfStopped()
}

// closeNow closes the descriptor without waiting for the backend, and then done.
func (c *conn) closeNow(done chan struct{}) {
	c.aborted = done
	c.stopServing()
}

// closeIfStopped closes the descriptor of a stopped connection, and reports the end of the last request.
func (c *conn) closeIfStopped() {
	if !c.stopping || c.armed {
		return
	}
	if (c.inflight == 0 || c.aborted != nil) && c.fd >= 0 {
		_ = unix.Close(c.fd)
		c.fd = -1
	}
	if c.aborted != nil && !c.cutDone {
		c.cutDone = true
		close(c.aborted)
	}
	if c.inflight == 0 && !c.idleDone {
		c.idleDone = true
		close(c.idle)
		if c.prepared {
			c.srv.connectionEnded()
		}
	}
}

// serveRequests takes the waiting requests and listens for more.
func (c *conn) serveRequests() {
	s := c.srv
	s.serving = true
	c.readRequests()
	s.serving = false
	s.feedHungry()
}

func (c *conn) readRequests() {
	s := c.srv
	for n := 0; !c.stopping; n++ {
		if !s.mayRead(c) {
			if !c.hungry {
				c.hungry = true
				s.hungry = append(s.hungry, c)
			}
			break
		}
		if n == batch || !c.readRequest() {
			if !c.stopping {
				c.armPoll()
			}
			break
		}
	}
	c.closeIfStopped()
}

// readRequest takes one request; false: there is none.
func (c *conn) readRequest() bool {
	s := c.srv
	s.vec[1] = iovec{uintptr(unsafe.Pointer(&s.stage.mem[0])), maxIO}
	for {
		n, _, e := unix.RawSyscall(unix.SYS_READV, uintptr(c.fd), uintptr(unsafe.Pointer(s.vec)), 2)
		switch e {
		case 0:
			c.dispatchRequest(int(n))
			return true
		case unix.EINTR, unix.ENOENT: // ENOENT: the kernel gave the request up before the read
			continue
		case unix.EAGAIN:
			return false
		case unix.EIO, unix.EFAULT, unix.ENOMEM, unix.E2BIG: // the copy failed: the kernel has failed the request
			s.log.Error("a request of the kernel was lost", "device", c.name, "err", e)
			return true
		case unix.ENODEV: // unmounted or aborted
		default:
			s.log.Error("a device's connection broke", "device", c.name, "err", e)
		}
		c.stopping = true
		return false
	}
}

func (c *conn) dispatchRequest(n int) {
	mem := c.srv.head
	h := *view[inHeader](mem)
	if h.unique>>63 != 0 {
		c.resent++
	}
	body := mem[inSize:]
	switch h.opcode {
	case opRead, opWrite:
		in := *view[ioIn](body)
		op := block.OpRead
		if h.opcode == opWrite {
			op = block.OpWrite
		}
		c.submitIO(h.unique, op, in.offset, uint64(in.size))
	case opFsync:
		c.submitIO(h.unique, block.OpFlush, 0, 0)
	case opFallocate:
		in := *view[fallocateIn](body)
		switch in.mode &^ unix.FALLOC_FL_KEEP_SIZE {
		case unix.FALLOC_FL_PUNCH_HOLE:
			c.submitIO(h.unique, block.OpDiscard, in.offset, in.length)
		case unix.FALLOC_FL_ZERO_RANGE:
			c.submitIO(h.unique, block.OpZero, in.offset, in.length)
		default:
			c.refuseRequest(h.unique, unix.EOPNOTSUPP)
		}
	case opForget, opBatchForget, opInterrupt: // want no answer
	default:
		c.answerRare(h, n)
	}
}

// submitIO hands an I/O to the backend.
func (c *conn) submitIO(unique uint64, op block.Op, off, n uint64) {
	s := c.srv
	size := uint64(c.size)
	if off%512 != 0 || n%512 != 0 || off > size || n > size-off {
		c.refuseRequest(unique, unix.EINVAL)
		return
	}
	if c.readOnly && op != block.OpRead && op != block.OpFlush {
		c.refuseRequest(unique, unix.EROFS)
		return
	}
	r := s.newRequest()
	r.conn, r.unique, r.Op, r.Off, r.Len = c, unique, op, int64(off), int64(n)
	if op == block.OpRead || op == block.OpWrite {
		if n == 0 || n > maxIO {
			s.free = append(s.free, r)
			c.refuseRequest(unique, unix.EINVAL)
			return
		}
		r.slot = s.takeMemory(int(n), op == block.OpWrite)
		r.Buf = r.slot.mem[:n]
		c.used += int64(classSize[r.slot.class])
	}
	c.inflight++
	c.be.Submit(&r.Request)
}

// answerRare is for rare requests: answerRare joins the request's parts and builds the reply behind them.
func (c *conn) answerRare(h inHeader, n int) {
	stage := c.srv.stage.mem
	const out = 2 * page // behind the longest name
	n = min(n, page)
	copy(stage[headSize:], stage[:max(n-headSize, 0)])
	copy(stage, c.srv.head)
	e, k := c.buildReply(h, stage[inSize:n], stage[out+outSize:])
	if e != 0 {
		k = 0
	}
	*view[outHeader](stage[out:]) = outHeader{uint32(outSize + k), e, h.unique}
	c.writeReply(uintptr(unsafe.Pointer(&stage[out])), uintptr(outSize+k))
}

// buildReply builds the reply to a request about the file, not its data.
func (c *conn) buildReply(h inHeader, in, out []byte) (e int32, n int) {
	switch h.opcode {
	case opLookup:
		if h.node != nodeRoot || len(in) == 0 || string(in[:len(in)-1]) != c.file {
			return -int32(unix.ENOENT), 0
		}
		return 0, put(out, entryOut{node: nodeFile, entryValid: forever, attrValid: forever, attr: c.nodeAttr(nodeFile)})
	case opGetattr:
		return 0, put(out, attrOut{valid: forever, attr: c.nodeAttr(h.node)})
	case opSetattr: // Resize tells the kernel in this way
		sa := *view[setattrIn](in)
		if sa.valid&setattrSize != 0 && (h.node != nodeFile || sa.size != uint64(c.size)) {
			return -int32(unix.EPERM), 0
		}
		return 0, put(out, attrOut{valid: forever, attr: c.nodeAttr(h.node)})
	case opOpen:
		return 0, put(out, openOut{flags: openDirectIO | openNoFlush | openParallelWrites})
	case opOpendir:
		return 0, put(out, openOut{})
	case opStatfs: // the loop driver takes the discard granularity from the block size
		return 0, put(out, statfsOut{blockSize: block.Size, fragSize: block.Size, nameLen: 255, files: 1})
	case opRelease, opReleasedir, opFlush, opDestroy:
		return 0, 0
	}
	return -int32(unix.ENOSYS), 0
}

func (c *conn) nodeAttr(node uint64) attr {
	a := attr{ino: node, mode: syscall.S_IFDIR | 0o700, nlink: 2, blockSize: block.Size}
	if node == nodeFile {
		a.mode, a.nlink = syscall.S_IFREG|0o600, 1
		a.size, a.blocks = uint64(c.size), uint64(c.size)/512
	}
	return a
}
