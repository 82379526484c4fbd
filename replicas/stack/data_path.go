package stack

import (
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/format"
)

// path is the data path of a Replica. All fields belong to the loop's thread. I/O allocates nothing once the pools have
// grown to the depth of the queue.
type path struct {
	blocks  int64
	fds     []int // of a value in the index, less fromHead
	idx     format.Index
	waiting map[int][]*block.Request // requests that wait for a page of the index

	fresh    bool // the head was empty at the open: an unbuilt page has no block of the head
	noZeros  bool // the zero log was empty at the open
	inflight int
	idle     []func() // to call when nothing is in progress
	holding  int
	held     []*block.Request
	failed   error // a sync failed, or the replica is closed: no more writes

	merge *Merge // in progress: blocks below Done have moved

	now      *writes    // to the head
	slow     int        // discards and zeros in progress
	cutting  int        // former heads that are not durable yet
	afterCut []*request // flushes that wait for former heads

	zeros       []block.Span // all-zero writes over lower data, not in the log yet
	syncing     int          // syncs of the log in progress
	freeRequest *request
	freePart    *part

	crcs crcCache // checksums that reads are compared with

	scattering scatterer

	hydrates bool     // some layer is hydrated: a read may need a fetch
	writing  int      // requests in progress other than reads
	drained  []func() // to call when no write is in progress
}

// ahead is how many requests and parts exist from the start: the data path allocates no memory during I/O, because the
// kernel may need that very I/O to free memory.
const ahead = 128

// request is a block request in progress.
type request struct {
	r    *Replica
	q    *block.Request
	left int
	err  error
	next *request
}

// part is one operation of a request on one file.
type part struct {
	op   uring.Op
	f    *request
	w    *writes // the writes to the same head
	fd   int
	src  int    // index of the file: 0 the head, then layers
	buf  []byte // the rest, at off
	off  int64
	all  []byte // of a read: the whole, at at
	at   int64
	good int          // bytes of all that are compared
	gaps []block.Span // ranges of all that are zeros, whatever the file holds
	next *part
}

func (p *path) init(r *Replica, fresh bool) {
	p.blocks = r.meta.Size >> blockBits
	p.idx = format.NewIndex(p.blocks, unbuilt)
	p.waiting = make(map[int][]*block.Request)
	p.fresh = fresh
	p.noZeros = r.log.Records == 0
	p.now = &writes{value: fromHead}
	requests, parts := make([]request, ahead), make([]part, ahead)
	for i := range ahead {
		f, q := &requests[i], &parts[i]
		f.r, f.next, p.freeRequest = r, p.freeRequest, f
		q.op.Ctx, q.next, p.freePart = q, p.freePart, q
	}
	p.fds = append(p.fds, int(r.head.Fd()))
	for _, l := range r.layers {
		p.fds = append(p.fds, int(l.Data.Fd()))
	}
}

// Submit implements block.Submitter. Offsets and lengths are multiples of 4 KiB, and buffers are page-aligned. Submit
// may call Done before it returns. The caller keeps discards and zeros apart from other writes to the same blocks;
// concurrent writes to one block leave one of the two contents. A write without room has Err ENOSPC: some blocks are
// new, the others old. A read of blocks that the disk lacks ends with ErrNotFetched at once, and the replica fetches
// the blocks: the caller reads again after OnFetched, or after a while.
func (r *Replica) Submit(q *block.Request) {
	if r.holding > 0 {
		r.held = append(r.held, q)
		return
	}
	r.inflight++
	if q.Op != block.OpRead {
		r.writing++
	}
	if q.Op == block.OpDiscard || q.Op == block.OpZero {
		r.slow++
	}
	q.Err = nil
	if err := r.validateRequest(q); err != nil {
		r.finishRequest(q, err)
		return
	}
	r.beginRequest(q)
}

func (r *Replica) validateRequest(q *block.Request) error {
	if r.failed != nil && (q.Op != block.OpRead || errors.Is(r.failed, errClosed)) {
		return unix.EIO
	}
	if q.Op == block.OpFlush {
		return nil
	}
	if (q.Off|q.Len)&(blockSize-1) != 0 || q.Off < 0 || q.Len <= 0 || q.Len>>blockBits > r.idx.Blocks ||
		q.Off>>blockBits > r.idx.Blocks-q.Len>>blockBits {
		return unix.EINVAL
	}
	if q.Op == block.OpRead || q.Op == block.OpWrite {
		if int64(len(q.Buf)) != q.Len || !block.Aligned(q.Buf, q.Off) {
			return unix.EINVAL
		}
	}
	if len(q.Spans) > 0 && !spansFit(q) {
		return unix.EINVAL
	}
	return nil
}

// beginRequest starts a request, or parks it until the index knows its blocks and beginRequest is called again.
func (r *Replica) beginRequest(q *block.Request) {
	if q.Op != block.OpFlush && !r.hasPages(q) {
		return
	}
	if r.tracking && q.Op != block.OpFlush && q.Op != block.OpRead && !r.hasIntents(q) {
		return
	}
	switch q.Op {
	case block.OpRead:
		r.startRead(q)
	case block.OpWrite:
		r.startWrite(q)
	case block.OpFlush:
		r.flushWrites(r.newRequest(q))
	case block.OpDiscard, block.OpZero:
		r.zeroRange(q)
	default:
		r.finishRequest(q, unix.EOPNOTSUPP)
	}
}

func (r *Replica) finishRequest(q *block.Request, err error) {
	q.Err = err
	r.inflight--
	if q.Op != block.OpRead {
		r.writing--
	}
	if q.Op == block.OpDiscard || q.Op == block.OpZero {
		r.slow--
	}
	q.Done(q)
	r.notifyIdle()
}

// resumeRequest begins a request that waited for the intents, or ends the request with their error.
func (r *Replica) resumeRequest(q *block.Request, err error) {
	if err != nil {
		r.finishRequest(q, errnoOf(err))
		return
	}
	r.beginRequest(q)
}

func (r *Replica) newRequest(q *block.Request) *request {
	f := r.freeRequest
	if f == nil {
		f = &request{r: r}
	} else {
		r.freeRequest = f.next
	}
	f.q, f.left, f.err, f.next = q, 0, nil, nil
	return f
}

// endRequest finishes the block request and recycles f.
func (f *request) endRequest(err error) {
	r, q := f.r, f.q
	f.q, f.next = nil, r.freeRequest
	r.freeRequest = f
	r.finishRequest(q, err)
}

func (f *request) newPart(fd int, buf []byte, off int64, done func(*uring.Op, int32)) *part {
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
	p.all, p.at, p.good, p.gaps = buf, off, 0, p.gaps[:0]
	f.left++
	return p
}

// free recycles the part, and reports whether the request has no other parts.
func (p *part) free() bool {
	f := p.f
	p.f, p.buf, p.all, p.next = nil, nil, nil, f.r.freePart
	f.r.freePart = p
	f.left--
	return f.left == 0
}

func mustRetry(res int32) bool {
	return res == -int32(unix.EINTR) || res == -int32(unix.EAGAIN)
}

func (r *Replica) startRead(q *block.Request) {
	if r.hydrates && !r.hasFetched(q) {
		r.finishRequest(q, ErrNotFetched)
		return
	}
	b, end := q.Off>>blockBits, (q.Off+q.Len)>>blockBits
	var f *request
	for b < end {
		v, n := r.idx.Run(b, end)
		whole := n
		if v == fromHead {
			whole = r.blocksInRead(b, n, end)
		}
		buf := q.Buf[b<<blockBits-q.Off:][:whole<<blockBits]
		if v < fromHead {
			clear(buf)
		} else {
			if f == nil {
				f = r.newRequest(q)
			}
			first := f.left == 0
			p := f.newPart(r.fds[v-fromHead], buf, b<<blockBits, readDone)
			p.src = int(v - fromHead)
			if whole > n {
				r.gapsOf(p)
			}
			if first {
				f.left++ // the request stays until all parts are started
			}
			r.readPart(p)
		}
		b += whole
	}
	if f == nil {
		r.finishRequest(q, nil)
	} else if f.left--; f.left == 0 {
		f.endRequest(f.err)
	}
}

// mostGap is how many blocks between two extents of the head a read may include, to read both at once.
const mostGap = 16

// blocksInRead returns how many blocks from b on one read of the head covers, where the first n blocks belong to the
// head: a read covers fragments together with the holes between them.
func (r *Replica) blocksInRead(b, n, end int64) int64 {
	for at := b + n; at < end; {
		v, k := r.idx.Run(at, end)
		if v == fromHead {
			at += k
			n = at - b
			continue
		}
		if v > fromHead || k > mostGap {
			break
		}
		at += k
	}
	return n
}

// gapsOf notes the ranges of a stretched read that are zeros, whatever the file holds.
func (r *Replica) gapsOf(p *part) {
	for b, end := p.at>>blockBits, (p.at+int64(len(p.all)))>>blockBits; b < end; {
		v, n := r.idx.Run(b, end)
		if v < fromHead {
			p.gaps = append(p.gaps, block.Span{Off: b<<blockBits - p.at, Len: n << blockBits})
		}
		b += n
	}
}

// readPart starts a read of a file.
func (r *Replica) readPart(p *part) {
	if p.src > 0 {
		l := r.layers[p.src-1]
		switch whole, hit := l.Refuses(p.off, int64(len(p.buf))); {
		case whole:
			r.endReadPart(p, ErrDamaged)
			return
		case hit: // perhaps repaired meanwhile
			r.judgeRead(p)
			return
		case l.CRCs != nil:
			r.crcsOfBlock(l, p.off>>blockBits) // while the data is read
		}
	}
	r.ring.Read(&p.op, p.fd, p.buf, p.off)
}

func readDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	switch {
	case int(res) == len(p.buf):
		for _, g := range p.gaps {
			clear(p.all[g.Off:][:g.Len])
		}
		if p.src > 0 && f.r.layers[p.src-1].CRCs != nil {
			f.r.compareChecksums(p)
			return
		}
	case res > 0:
		p.buf, p.off = p.buf[res:], p.off+int64(res)
		fallthrough
	case mustRetry(res):
		f.r.ring.Read(op, p.fd, p.buf, p.off)
		return
	case p.src > 0 && f.r.layers[p.src-1].CRCs != nil: // what cannot be read is damaged as well
		f.r.judgeRead(p)
		return
	case res == 0:
		f.err = unix.EIO // the file is shorter than its map says
	default:
		f.err = unix.Errno(-res)
	}
	if p.free() {
		f.endRequest(f.err)
	}
}

func (r *Replica) startWrite(q *block.Request) {
	if len(q.Spans) > 0 {
		r.scatterWrite(q)
		return
	}
	f := r.newRequest(q)
	p := f.newPart(r.fds[0], q.Buf, q.Off, writeDone)
	p.w = r.now
	p.w.left++
	b := p.off >> blockBits
	p.op.Blocks = !r.headHas(b, b+int64(len(p.buf))>>blockBits)
	r.ring.Write(&p.op, p.fd, p.buf, p.off)
}

// headHas reports whether all of the blocks belong to the head.
func (r *Replica) headHas(b, end int64) bool {
	v, n := r.idx.Run(b, end)
	return v == fromHead && n == end-b
}

// addSpan appends a range, or extends the last range.
func addSpan(s []block.Span, off, n int64) []block.Span {
	if k := len(s) - 1; k >= 0 && s[k].Off+s[k].Len == off {
		s[k].Len += n
		return s
	}
	return append(s, block.Span{Off: off, Len: n})
}

func writeDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	r := f.r
	whole := int64(max(res, 0)) &^ (blockSize - 1)
	if whole > 0 {
		r.indexWrite(p.w, p.buf[:whole], p.off)
		p.buf, p.off = p.buf[whole:], p.off+whole
	}
	switch {
	case len(p.buf) == 0:
		p.w.writeEnded()
		p.free()
		f.acknowledge()
	case whole > 0 || mustRetry(res):
		r.ring.Write(op, p.fd, p.buf, p.off)
	case res >= 0:
		r.endTornWrite(f, p, unix.EIO)
	default:
		r.endTornWrite(f, p, unix.Errno(-res))
	}
}

// endTornWrite ends a failed write. The kernel does not report how much reached the file: endTornWrite asks the file
// system for the data of the range, so that reads return the same content now and after the next recovery.
func (r *Replica) endTornWrite(f *request, p *part, err error) {
	off, end, fd, w := p.off, p.off+int64(len(p.buf)), p.fd, p.w
	p.free()
	r.work.put(func() {
		there := findData(fd, off, end)
		r.ring.Post(func() {
			for _, s := range there {
				r.indexBlocks(w, s.Off>>blockBits, (s.Off+s.Len)>>blockBits)
			}
			w.writeEnded()
			f.endRequest(errnoOf(err))
		})
	})
}

// errnoOf returns the errno that a request ends with. An exhausted quota counts as a full disk.
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

// ErrFailed marks the errors of a replica that takes no more writes: a sync failed, and the content of the disk is
// unknown until the replica is opened again.
var ErrFailed = api.Errorf(api.Unavailable, "the replica takes no more writes, since a sync of its disk failed")

// Failed returns why the replica takes no more writes; nil: the replica takes writes.
func (r *Replica) Failed() error {
	var failed error
	if err := r.onLoop(func() { failed = r.failed }); err != nil || failed == nil {
		return r.nameError(err)
	}
	if errors.Is(failed, errClosed) {
		return r.nameError(failed)
	}
	return r.nameError(fmt.Errorf("%w: %w", ErrFailed, failed))
}

// writeFailure is why the replica takes no more writes. Loop thread.
func (r *Replica) writeFailure() error { return r.failed }

// failWrites stops all writes: after a failed sync the content of the disk is unknown.
func (r *Replica) failWrites(err error) {
	if r.failed == nil {
		r.failed = err
		slog.Error("replica takes no more writes: a sync failed", "replica", r.dir, "error", err)
	}
}
