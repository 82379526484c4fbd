package archive

import (
	"bytes"
	"context"
	"errors"
	"hash"
	"io"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/semaphore"

	"drover.io/drover/api"
)

// Reader gives the plain bytes of an archive. It is the consumer's side: it takes the items of one ring after the
// other, verifies, and gives the bytes out. All but Point is for one goroutine.
type Reader struct {
	format Format
	u      *unpacker
	src    io.Reader
	unpack func(*unpacker) error
	begun  bool

	cur  *ring
	rest []byte // of the current piece
	sum  hash.Hash
	err  error // what Read returns from now on

	mu     sync.Mutex
	points []*place // in order
}

// unpacker is the decoder's side: one goroutine that takes the archive apart.
type unpacker struct {
	ctx   context.Context
	stop  context.CancelFunc
	in    *input
	lim   Limits
	total atomic.Int64
	mem   *semaphore.Weighted
	rings chan *ring // in the order of their bytes
	wg    sync.WaitGroup
	err   error // of the unpacker; valid once rings is closed

	every, last int64       // how often a point is made, and where the last one was
	from        *Point      // where it begins; nil: at the start
	before      io.ReaderAt // the plain bytes before that
}

// check is the end of a part of the plain bytes that has a checksum, or (want is nil) the start of one.
type check struct {
	sum  hash.Hash // nil: none
	want []byte
	name string
}

func newReader(src io.Reader, f Format, lim Limits, unpack func(*unpacker) error) *Reader {
	ctx, stop := context.WithCancel(context.Background())
	u := &unpacker{ctx: ctx, stop: stop, in: newInput(ctx, f.String()), lim: lim, mem: semaphore.NewWeighted(lim.Memory),
		rings: make(chan *ring, 4)}
	return &Reader{format: f, u: u, src: src, unpack: unpack}
}

func (r *Reader) begin() {
	r.begun = true
	u := r.u
	u.wg.Go(func() { u.in.read(r.src) })
	u.wg.Go(func() {
		defer close(u.rings)
		u.err = r.unpack(u)
	})
}

// fill gets the next piece into rest.
func (r *Reader) fill() error {
	if r.err != nil {
		return r.err
	}
	if !r.begun {
		r.begin()
	}
	for len(r.rest) == 0 {
		if r.err = r.step(); r.err != nil {
			return r.err
		}
	}
	return nil
}

func (r *Reader) step() error {
	if r.cur == nil {
		next, ok := <-r.u.rings
		if !ok {
			if r.u.err != nil {
				return r.u.err
			}
			return io.EOF
		}
		r.cur = next
	}
	it, ok := <-r.cur.out
	switch {
	case !ok:
		r.u.drop(r.cur)
		r.cur = nil
	case it.err != nil:
		return it.err
	case it.place != nil:
		r.passed(it.place)
	case it.check == nil:
		if r.sum != nil {
			_, _ = r.sum.Write(it.b)
		}
		r.rest = it.b
	case it.check.want == nil:
		r.sum = it.check.sum
	default:
		if r.sum != nil && !bytes.Equal(r.sum.Sum(nil), it.check.want) {
			return corrupt("%s: %w", it.check.name, ErrChecksum)
		}
		r.sum = nil
	}
	return nil
}

// Read gives the plain bytes. Those before an error may be wrong.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if err := r.fill(); err != nil {
		return 0, err
	}
	n := copy(p, r.rest)
	r.used(n)
	return n, nil
}

func (r *Reader) used(n int) {
	r.rest = r.rest[n:]
	r.cur.release(n)
}

// WriteTo gives the plain bytes without a copy.
func (r *Reader) WriteTo(w io.Writer) (int64, error) {
	total := int64(0)
	for {
		if err := r.fill(); errors.Is(err, io.EOF) {
			return total, nil
		} else if err != nil {
			return total, err
		}
		n, err := w.Write(r.rest)
		total += int64(n)
		short := n < len(r.rest)
		r.used(n)
		if err == nil && short {
			err = io.ErrShortWrite
		}
		if err != nil {
			return total, err
		}
	}
}

// Close ends the goroutines, waits for them and gives the memory back.
func (r *Reader) Close() error {
	r.u.stop()
	if r.begun {
		if r.cur != nil {
			r.discard(r.cur)
		}
		for next := range r.u.rings {
			r.discard(next)
		}
		r.u.wg.Wait()
	}
	r.cur, r.rest, r.begun = nil, nil, false
	r.err = errClosed
	return nil
}

func (r *Reader) discard(g *ring) {
	g.close()
	for range g.out {
	}
	r.u.drop(g)
}

// ring makes the window for the next bytes and shows it to the consumer. The decoder must close its out. What is in a
// window but not in memory can be fetched.
func (u *unpacker) ring(memory, window int) (*ring, error) {
	var f *far
	if window > memory {
		f = &far{dir: u.lim.Scratch, size: int64(window)}
	}
	return u.show(max(memory, minRing)+ringAlign, 32, f)
}

// whole makes a ring for so many bytes in all, and a decoder that does not wait for the consumer.
func (u *unpacker) whole(n int) (*ring, error) {
	return u.show(n+pieceSize+slack, n/pieceSize+8, nil)
}

func (u *unpacker) show(size, items int, f *far) (*ring, error) {
	need := int64(size)
	if err := u.mem.Acquire(u.ctx, need); err != nil {
		return nil, errClosed
	}
	g, err := newRing(size, items, u.count)
	if err != nil {
		u.mem.Release(need)
		return nil, err
	}
	g.cost, g.far = need, f
	select {
	case u.rings <- g:
		return g, nil
	case <-u.ctx.Done():
		u.drop(g)
		return nil, errClosed
	}
}

// drop gives the memory of a ring back.
func (u *unpacker) drop(g *ring) {
	g.free()
	u.mem.Release(g.cost)
}

// count limits the output.
func (u *unpacker) count(n int) error {
	if u.total.Add(int64(n)) > u.lim.Output {
		return api.Errorf(api.OutOfRange, "%s: %w: more than %d bytes", u.in.name, ErrTooLarge, u.lim.Output)
	}
	return nil
}

// window is the error for one that is too large.
func (u *unpacker) window(need, most uint64) error {
	return api.Errorf(api.Unsupported, "%s: it needs a window of %d MiB, more than the %d MiB that are allowed: "+
		"pack it with a smaller one (xz -9 and zstd --long=27 are fine)", u.in.name, (need+1<<20-1)>>20, most>>20)
}

// overhead is what a reader needs beside its windows.
const overhead = 8 << 20
