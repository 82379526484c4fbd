package stack

import (
	"errors"
	"log/slog"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/uring"
)

// path is the data path of a Replica. All of it belongs to the loop's thread. Nothing is allocated per I/O once the
// pools have grown to the depth of the queue.
type path struct {
	blocks  int64
	fds     []int // of a value in the index, less fromHead
	idx     index
	waiting map[int][]*block.Request // requests that wait until a page of the index is built

	fresh    bool // the head held nothing when it was opened: a page that is not built yet has nothing from it
	noZeros  bool // the same of the record of zeros
	inflight int
	idle     []func() // to call when nothing is in flight
	holding  int
	held     []*block.Request
	failed   error // a sync failed, or the replica is closed: nothing is written any more

	merge *Merge // under way: where blocks below its Done are

	cutting  int       // heads that were cut off and are not durable yet
	afterCut []*flight // flushes that wait for them

	zeros    []span // all-zero writes over lower data, not given to the log yet
	syncing  int    // rounds of the log under way
	freeIO   *flight
	freePart *part

	stranded *part // reads of a borrowed layer that failed
	closing  bool
}

// flight is a request under way.
type flight struct {
	r    *Replica
	q    *block.Request
	left int
	err  error
	next *flight
}

// part is one operation of a flight on one file.
type part struct {
	op   uring.Op
	f    *flight
	fd   int
	src  int // which of the replica's descriptors it is: 0 the head, then layers
	buf  []byte
	off  int64
	next *part
}

func (p *path) init(r *Replica, fresh bool) {
	p.blocks = r.meta.Size >> blockBits
	p.idx = newIndex(p.blocks, unbuilt)
	p.waiting = make(map[int][]*block.Request)
	p.fresh = fresh
	p.noZeros = r.log.n == 0
	p.fds = append(p.fds, int(r.head.Fd()))
	for _, l := range r.layers {
		p.fds = append(p.fds, int(l.data.Fd()))
	}
}

// Submit implements block.Submitter. Offsets and lengths are multiples of 4 KiB, and buffers are page-aligned. Done may
// be called before Submit returns. The caller keeps discards and zeros apart from any other write to the same blocks;
// concurrent writes to one block leave one of the two. A write that finds no room has Err ENOSPC: the blocks that were
// written before it are new, the others old.
func (r *Replica) Submit(q *block.Request) {
	if r.holding > 0 {
		r.held = append(r.held, q)
		return
	}
	r.inflight++
	q.Err = nil
	if err := r.check(q); err != nil {
		r.finish(q, err)
		return
	}
	r.begin(q)
}

func (r *Replica) check(q *block.Request) error {
	if r.failed != nil && (q.Op != block.OpRead || errors.Is(r.failed, errClosed)) {
		return unix.EIO
	}
	if q.Op == block.OpFlush {
		return nil
	}
	if (q.Off|q.Len)&(blockSize-1) != 0 || q.Off < 0 || q.Len <= 0 || q.Len>>blockBits > r.idx.blocks ||
		q.Off>>blockBits > r.idx.blocks-q.Len>>blockBits {
		return unix.EINVAL
	}
	if q.Op == block.OpRead || q.Op == block.OpWrite {
		if int64(len(q.Buf)) != q.Len || uintptr(unsafe.Pointer(unsafe.SliceData(q.Buf)))&uintptr(blockSize-1) != 0 {
			return unix.EINVAL
		}
	}
	return nil
}

// begin starts a request, or parks it until the index knows its blocks, when begin is called again.
func (r *Replica) begin(q *block.Request) {
	if q.Op != block.OpFlush && !r.ready(q) {
		return
	}
	switch q.Op {
	case block.OpRead:
		r.read(q)
	case block.OpWrite:
		r.write(q)
	case block.OpFlush:
		r.flush(r.flight(q))
	case block.OpDiscard, block.OpZero:
		r.zero(q)
	default:
		r.finish(q, unix.EOPNOTSUPP)
	}
}

func (r *Replica) finish(q *block.Request, err error) {
	q.Err = err
	r.inflight--
	q.Done(q)
	if r.inflight == 0 && len(r.idle) > 0 {
		idle := r.idle
		r.idle = nil
		for _, fn := range idle {
			fn()
		}
	}
}

func (r *Replica) flight(q *block.Request) *flight {
	f := r.freeIO
	if f == nil {
		f = &flight{r: r}
	} else {
		r.freeIO = f.next
	}
	f.q, f.left, f.err, f.next = q, 0, nil, nil
	return f
}

// end finishes a flight's request and takes the flight back.
func (f *flight) end(err error) {
	r, q := f.r, f.q
	f.q, f.next = nil, r.freeIO
	r.freeIO = f
	r.finish(q, err)
}

func (f *flight) part(fd int, buf []byte, off int64, done func(*uring.Op, int32)) *part {
	r := f.r
	p := r.freePart
	if p == nil {
		p = &part{}
		p.op.Ctx = p
	} else {
		r.freePart = p.next
	}
	p.op.Done = done
	p.f, p.fd, p.src, p.buf, p.off, p.next = f, fd, 0, buf, off, nil
	f.left++
	return p
}

// free takes the part back, and reports whether it was the last of its flight.
func (p *part) free() bool {
	f := p.f
	p.f, p.buf, p.next = nil, nil, f.r.freePart
	f.r.freePart = p
	f.left--
	return f.left == 0
}

func again(res int32) bool {
	return res == -int32(unix.EINTR) || res == -int32(unix.EAGAIN)
}

func (r *Replica) read(q *block.Request) {
	b, end := q.Off>>blockBits, (q.Off+q.Len)>>blockBits
	var f *flight
	for b < end {
		v, n := r.idx.run(b, end)
		buf := q.Buf[b<<blockBits-q.Off:][:n<<blockBits]
		if v < fromHead {
			clear(buf)
		} else {
			if f == nil {
				f = r.flight(q)
			}
			p := f.part(r.fds[v-fromHead], buf, b<<blockBits, readDone)
			p.src = int(v - fromHead)
			r.ring.Read(&p.op, p.fd, p.buf, p.off)
		}
		b += n
	}
	if f == nil {
		r.finish(q, nil)
	}
}

func readDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	switch {
	case int(res) == len(p.buf):
	case res > 0:
		p.buf, p.off = p.buf[res:], p.off+int64(res)
		fallthrough
	case again(res):
		f.r.ring.Read(op, p.fd, p.buf, p.off)
		return
	case f.r.strand(p):
		return
	case res == 0:
		f.err = unix.EIO // the file is shorter than its map says
	default:
		f.err = unix.Errno(-res)
	}
	if p.free() {
		f.end(f.err)
	}
}

func (r *Replica) write(q *block.Request) {
	f := r.flight(q)
	p := f.part(r.fds[0], q.Buf, q.Off, writeDone)
	r.ring.Write(&p.op, p.fd, p.buf, p.off)
}

// written takes note of blocks that are in the head now. Until then readers see what was there before. All-zero blocks
// that hide lower data are remembered: should the file system not keep them as data, the record still says what they
// are. It becomes durable with the next flush.
func (r *Replica) written(buf []byte, off int64) {
	b, end := off>>blockBits, (off+int64(len(buf)))>>blockBits
	for i := b; i < end && len(r.layers) > 0; {
		v, n := r.idx.run(i, end)
		if v >= fromLayer {
			for j := i; j < i+n; j++ {
				if isZero(buf[(j-b)<<blockBits:][:blockSize]) {
					r.zeros = addSpan(r.zeros, j<<blockBits, blockSize)
				}
			}
		}
		i += n
	}
	r.idx.set(b, end, fromHead)
}

// addSpan adds a range, to the last one where they touch.
func addSpan(s []span, off, n int64) []span {
	if k := len(s) - 1; k >= 0 && s[k].off+s[k].n == off {
		s[k].n += n
		return s
	}
	return append(s, span{off, n})
}

func isZero(b []byte) bool {
	w := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
	for len(w) >= 8 {
		if w[0]|w[1]|w[2]|w[3]|w[4]|w[5]|w[6]|w[7] != 0 {
			return false
		}
		w = w[8:]
	}
	for _, x := range w {
		if x != 0 {
			return false
		}
	}
	return true
}

func writeDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	r := f.r
	whole := int64(max(res, 0)) &^ (blockSize - 1)
	if whole > 0 {
		r.written(p.buf[:whole], p.off)
		p.buf, p.off = p.buf[whole:], p.off+whole
	}
	switch {
	case len(p.buf) == 0:
		p.free()
		f.acknowledge()
	case whole > 0 || again(res):
		r.ring.Write(op, p.fd, p.buf, p.off)
	case res >= 0:
		r.torn(f, p, unix.EIO)
	default:
		r.torn(f, p, unix.Errno(-res))
	}
}

// torn ends a write that failed. The kernel does not say how much of it reached the file: the file is asked, so that
// what is read now is what will be read after the next recovery.
func (r *Replica) torn(f *flight, p *part, err error) {
	off, end, fd := p.off, p.off+int64(len(p.buf)), p.fd
	p.free()
	r.work.put(func() {
		var found []span
		for off < end {
			from, to, serr := file.NextData(fd, off, end)
			if serr != nil || from >= end {
				break
			}
			found = append(found, span{from, to - from})
			off = to
		}
		r.ring.Post(func() {
			for _, s := range found {
				r.idx.set(s.off>>blockBits, (s.off+s.n)>>blockBits, fromHead)
			}
			f.end(errnoOf(err))
		})
	})
}

// acknowledge ends a write, a zero or a discard, which are durable first where that was asked for.
func (f *flight) acknowledge() {
	if f.q.FUA {
		f.r.flush(f)
		return
	}
	f.end(nil)
}

// flush makes everything acknowledged durable: the record of zeros, then the head.
func (r *Replica) flush(f *flight) {
	if r.cutting > 0 {
		r.afterCut = append(r.afterCut, f)
		return
	}
	if len(r.zeros) == 0 && r.syncing == 0 {
		r.syncHead(f)
		return
	}
	spans := r.takeZeros()
	r.record(spans, func(err error) {
		if err != nil {
			r.zeros = append(spans, r.zeros...)
			if !errors.Is(err, unix.ENOSPC) {
				f.end(err)
				return
			}
			r.unrecorded(f, slices.Clone(r.zeros))
			return
		}
		r.syncHead(f)
	})
}

// unrecorded goes on with a flush although there is no room for the record of all-zero writes, if the head surely keeps
// them as data: then the record is not needed. It is tried again with the next flush.
func (r *Replica) unrecorded(f *flight, spans []span) {
	fd := r.fds[0]
	r.work.put(func() {
		kept := true
		for _, s := range spans {
			from, to, err := file.NextData(fd, s.off, s.off+s.n)
			kept = kept && err == nil && from == s.off && to == s.off+s.n
		}
		r.ring.Post(func() {
			if !kept {
				f.end(unix.ENOSPC)
				return
			}
			r.syncHead(f)
		})
	})
}

func (r *Replica) takeZeros() []span {
	spans := r.zeros
	r.zeros = nil
	return spans
}

// record appends to the log and syncs it, in the worker, and calls then on the loop's thread.
func (r *Replica) record(spans []span, then func(error)) {
	r.syncing++
	r.work.put(func() {
		err := r.log.add(spans)
		lost := false
		if err == nil {
			err = r.log.sync()
			lost = err != nil
		}
		r.ring.Post(func() {
			r.syncing--
			if lost {
				r.fail(err)
			}
			then(errnoOf(err))
		})
	})
}

// errnoOf is what a request ends with. A quota that is used up is no room, like a full disk.
func errnoOf(err error) error {
	if err == nil {
		return nil
	}
	var e unix.Errno
	switch {
	case !errors.As(err, &e):
		return unix.EIO
	case e == unix.EDQUOT:
		return unix.ENOSPC
	}
	return e
}

// fail stops all writing: after a sync that failed nobody knows what the disk holds.
func (r *Replica) fail(err error) {
	if r.failed == nil {
		r.failed = err
		slog.Error("replica takes no more writes: a sync failed", "replica", r.dir, "error", err)
	}
}

func (r *Replica) syncHead(f *flight) {
	p := f.part(r.fds[0], nil, 0, syncDone)
	r.ring.Fdatasync(&p.op, p.fd)
}

func syncDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	if again(res) {
		f.r.ring.Fdatasync(op, p.fd)
		return
	}
	p.free()
	if res < 0 {
		f.r.fail(unix.Errno(-res))
		f.end(unix.EIO)
		return
	}
	f.end(nil)
}
