package stack

import (
	"errors"
	"fmt"
	"log/slog"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/format"
)

// path is the data path of a Replica. All of it belongs to the loop's thread. Nothing is allocated per I/O once the
// pools have grown to the depth of the queue.
type path struct {
	blocks  int64
	fds     []int // of a value in the index, less fromHead
	idx     format.Index
	waiting map[int][]*block.Request // requests that wait until a page of the index is built

	fresh    bool // the head held nothing when it was opened: a page that is not built yet has nothing from it
	noZeros  bool // the same of the record of zeros
	inflight int
	idle     []func() // to call when nothing is in flight
	holding  int
	held     []*block.Request
	failed   error // a sync failed, or the replica is closed: nothing is written any more

	merge *Merge // under way: where blocks below its Done are

	now      *writes   // to the head
	slow     int       // discards and zeros under way
	cutting  int       // heads that were cut off and are not durable yet
	afterCut []*flight // flushes that wait for them

	zeros    []block.Span // all-zero writes over lower data, not given to the log yet
	syncing  int          // rounds of the log under way
	freeIO   *flight
	freePart *part

	mirror // what the other members may lack

	crcs crcCache // checksums that reads are compared with

	scattering scatterer

	hydrates bool     // some layer is not whole on the disk: what a read needs may have to be fetched first
	writing  int      // requests in flight that are no reads
	drained  []func() // to call when no write is in flight
}

// ahead is how many flights and parts there are from the start: memory is not asked for while I/O is under way, since
// the system may need that very I/O to find some.
const ahead = 128

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
	w    *writes // that it is one of
	fd   int
	src  int    // which of the replica's descriptors it is: 0 the head, then layers
	buf  []byte // what is still to come, at off
	off  int64
	all  []byte // of a read: the whole, at at
	at   int64
	good int          // bytes of all that were compared
	gaps []block.Span // of all, where the file has nothing that is to be read
	next *part
}

func (p *path) init(r *Replica, fresh bool) {
	p.blocks = r.meta.Size >> BlockBits
	p.idx = format.NewIndex(p.blocks, Unbuilt)
	p.waiting = make(map[int][]*block.Request)
	p.fresh = fresh
	p.noZeros = r.log.Records == 0
	p.now = &writes{value: FromHead}
	flights, parts := make([]flight, ahead), make([]part, ahead)
	for i := range ahead {
		f, q := &flights[i], &parts[i]
		f.r, f.next, p.freeIO = r, p.freeIO, f
		q.op.Ctx, q.next, p.freePart = q, p.freePart, q
	}
	p.fds = append(p.fds, int(r.head.Fd()))
	for _, l := range r.layers {
		p.fds = append(p.fds, int(l.Data.Fd()))
	}
}

// Submit implements block.Submitter. Offsets and lengths are multiples of 4 KiB, and buffers are page-aligned. Done may
// be called before Submit returns. The caller keeps discards and zeros apart from any other write to the same blocks;
// concurrent writes to one block leave one of the two. A write that finds no room has Err ENOSPC: the blocks that were
// written before it are new, the others old. A read of blocks that another source has ends with ErrNotFetched at once,
// and the replica fetches them: the caller asks again when OnFetched says so, or after a while.
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
	if (q.Off|q.Len)&(BlockSize-1) != 0 || q.Off < 0 || q.Len <= 0 || q.Len>>BlockBits > r.idx.Blocks ||
		q.Off>>BlockBits > r.idx.Blocks-q.Len>>BlockBits {
		return unix.EINVAL
	}
	if q.Op == block.OpRead || q.Op == block.OpWrite {
		if int64(len(q.Buf)) != q.Len || uintptr(unsafe.Pointer(unsafe.SliceData(q.Buf)))&uintptr(BlockSize-1) != 0 {
			return unix.EINVAL
		}
	}
	if len(q.Spans) > 0 && !spansFit(q) {
		return unix.EINVAL
	}
	return nil
}

// begin starts a request, or parks it until the index knows its blocks, when begin is called again.
func (r *Replica) begin(q *block.Request) {
	if q.Op != block.OpFlush && !r.ready(q) {
		return
	}
	if r.tracking && q.Op != block.OpFlush && q.Op != block.OpRead && !r.intended(q) {
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
	if q.Op != block.OpRead {
		r.writing--
	}
	if q.Op == block.OpDiscard || q.Op == block.OpZero {
		r.slow--
	}
	q.Done(q)
	r.rest()
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
	p.all, p.at, p.good, p.gaps = buf, off, 0, p.gaps[:0]
	f.left++
	return p
}

// free takes the part back, and reports whether it was the last of its flight.
func (p *part) free() bool {
	f := p.f
	p.f, p.buf, p.all, p.next = nil, nil, nil, f.r.freePart
	f.r.freePart = p
	f.left--
	return f.left == 0
}

func again(res int32) bool {
	return res == -int32(unix.EINTR) || res == -int32(unix.EAGAIN)
}

func (r *Replica) read(q *block.Request) {
	if r.hydrates && !r.fetched(q) {
		r.finish(q, ErrNotFetched)
		return
	}
	b, end := q.Off>>BlockBits, (q.Off+q.Len)>>BlockBits
	var f *flight
	for b < end {
		v, n := r.idx.Run(b, end)
		whole := n
		if v == FromHead {
			whole = r.stretch(b, n, end)
		}
		buf := q.Buf[b<<BlockBits-q.Off:][:whole<<BlockBits]
		if v < FromHead {
			clear(buf)
		} else {
			if f == nil {
				f = r.flight(q)
			}
			first := f.left == 0
			p := f.part(r.fds[v-FromHead], buf, b<<BlockBits, readDone)
			p.src = int(v - FromHead)
			if whole > n {
				r.gapsOf(p)
			}
			if first {
				f.left++ // it stays until all are started
			}
			r.start(p)
		}
		b += whole
	}
	if f == nil {
		r.finish(q, nil)
	} else if f.left--; f.left == 0 {
		f.end(f.err)
	}
}

// mostGap is how many blocks of nothing are read between two pieces of the head, to read both at once.
const mostGap = 16

// stretch is how much of the head is read at once from block b on, where n blocks are the head's: fragments are read
// together with the holes between them.
func (r *Replica) stretch(b, n, end int64) int64 {
	for at := b + n; at < end; {
		v, k := r.idx.Run(at, end)
		if v == FromHead {
			at += k
			n = at - b
			continue
		}
		if v > FromHead || k > mostGap {
			break
		}
		at += k
	}
	return n
}

// gapsOf notes what is to be zero of a read that was stretched, whatever the file has there.
func (r *Replica) gapsOf(p *part) {
	for b, end := p.at>>BlockBits, (p.at+int64(len(p.all)))>>BlockBits; b < end; {
		v, n := r.idx.Run(b, end)
		if v < FromHead {
			p.gaps = append(p.gaps, block.Span{Off: b<<BlockBits - p.at, Len: n << BlockBits})
		}
		b += n
	}
}

// start starts a read of a file.
func (r *Replica) start(p *part) {
	if p.src > 0 {
		l := r.layers[p.src-1]
		switch whole, hit := l.Refuses(p.off, int64(len(p.buf))); {
		case whole:
			r.ended(p, ErrDamaged)
			return
		case hit: // it may have been repaired
			r.doubt(p)
			return
		case l.CRCs != nil:
			r.crcsOfBlock(l, p.off>>BlockBits) // while the data is read
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
			f.r.compare(p)
			return
		}
	case res > 0:
		p.buf, p.off = p.buf[res:], p.off+int64(res)
		fallthrough
	case again(res):
		f.r.ring.Read(op, p.fd, p.buf, p.off)
		return
	case p.src > 0 && f.r.layers[p.src-1].CRCs != nil: // what cannot be read is damaged as well
		f.r.doubt(p)
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
	if len(q.Spans) > 0 {
		r.scatter(q)
		return
	}
	f := r.flight(q)
	p := f.part(r.fds[0], q.Buf, q.Off, writeDone)
	p.w = r.now
	p.w.left++
	b := p.off >> BlockBits
	p.op.Blocks = !r.headHas(b, b+int64(len(p.buf))>>BlockBits)
	r.ring.Write(&p.op, p.fd, p.buf, p.off)
}

// headHas reports whether all of the blocks are the head's own.
func (r *Replica) headHas(b, end int64) bool {
	v, n := r.idx.Run(b, end)
	return v == FromHead && n == end-b
}

// addSpan adds a range, to the last one where they touch.
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
	whole := int64(max(res, 0)) &^ (BlockSize - 1)
	if whole > 0 {
		r.written(p.w, p.buf[:whole], p.off)
		p.buf, p.off = p.buf[whole:], p.off+whole
	}
	switch {
	case len(p.buf) == 0:
		p.w.ended()
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
	off, end, fd, w := p.off, p.off+int64(len(p.buf)), p.fd, p.w
	p.free()
	r.work.put(func() {
		there := found(fd, off, end)
		r.ring.Post(func() {
			for _, s := range there {
				r.place(w, s.Off>>BlockBits, (s.Off+s.Len)>>BlockBits)
			}
			w.ended()
			f.end(errnoOf(err))
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

// ErrFailed is in the errors of a replica that takes no more writes: a sync failed, and what its disk has is not known.
// It is found out when the replica is opened anew.
var ErrFailed = api.Errorf(api.Unavailable, "the replica takes no more writes, since a sync of its disk failed")

// Failed is why the replica takes no more writes; nil: it does.
func (r *Replica) Failed() error {
	var failed error
	if err := r.onLoop(func() { failed = r.failed }); err != nil || failed == nil {
		return r.name(err)
	}
	if errors.Is(failed, errClosed) {
		return r.name(failed)
	}
	return r.name(fmt.Errorf("%w: %w", ErrFailed, failed))
}

// fail stops all writing: after a sync that failed nobody knows what the disk holds.
func (r *Replica) fail(err error) {
	if r.failed == nil {
		r.failed = err
		slog.Error("replica takes no more writes: a sync failed", "replica", r.dir, "error", err)
	}
}
