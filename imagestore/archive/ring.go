package archive

import (
	"errors"
	"hash"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// errClosed ends the goroutines of a reader that is closed.
var errClosed = errors.New("the reader is closed")

// ring is the memory between one decoder and the consumer. It is the decoder's window too: what was decoded stays in
// place until it is overwritten, so no byte is copied on its way to the consumer.
//
// The decoder writes at pos, always forward and in one piece: it may write up to slack bytes beyond size; wrap then
// moves what is there to the front.
type ring struct {
	b    []byte // size + slack
	size int    // a multiple of ringAlign
	pos  int    // where the decoder writes next: below size
	sent int    // up to here it is committed: at most pos

	// The decoder's bytes since it started, to limit them, and since the last reset, to know what may be referred to.
	total int64
	have  int64

	mu     sync.Mutex
	cond   sync.Cond
	unread int // committed and not yet released
	closed bool

	near int  // distances up to this are in b
	far  *far // the others; nil: there are none

	out   chan item
	cost  int64             // what it takes of the reader's memory
	limit func(n int) error // asked before n more bytes are given out
	mark  func() error      // asked between chunks of LZMA2, where a place may be told; or nil
}

const (
	ringAlign = 64 << 10
	// Enough for a block of zstd and the overshoot of its copies.
	slack = 128<<10 + 512
	// A piece that is committed at once is small enough to be still in a cache when the consumer looks at it.
	pieceSize = 256 << 10
	// Below this the consumer would wait for the decoder and the decoder for it.
	minRing = 4 << 20
)

// item is what the decoder tells the consumer: bytes, or that a checked part ends here, or a place, or the end.
type item struct {
	b     []byte
	check *check
	place *place
	err   error
}

// newRing makes a ring of at least so many bytes. limit is asked before bytes are given out.
func newRing(size, items int, limit func(int) error) (*ring, error) {
	size = (size + ringAlign - 1) &^ (ringAlign - 1)
	b, err := allocate(size + slack)
	if err != nil {
		return nil, err
	}
	r := &ring{b: b, size: size, near: size - ringAlign, out: make(chan item, items), limit: limit}
	r.cond.L = &r.mu
	return r, nil
}

// allocate gives memory outside of Go's heap: it costs nothing until it is written to, is given back at once, and does
// not make the collector wait for as much garbage again.
func allocate(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, api.Errorf(api.Other, "no %d bytes of memory: %w", n, err)
	}
	return b, nil
}

func release(b []byte) { _ = unix.Munmap(b) }

// free gives the memory back. Nobody may hold a piece of it any more.
func (r *ring) free() {
	release(r.b)
	r.b = nil
	if r.far != nil {
		r.far.close()
	}
}

// reserve waits until a piece can be written without touching what the consumer has not seen.
func (r *ring) reserve() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.unread+pieceSize+slack > r.size && !r.closed {
		r.cond.Wait()
	}
	if r.closed {
		return errClosed
	}
	return nil
}

// commit hands everything up to pos to the consumer.
func (r *ring) commit() error {
	n := r.pos - r.sent
	if n > 0 {
		if err := r.limit(n); err != nil {
			return err
		}
		// The part beyond the end is a piece of its own, at the front.
		if err := r.send(r.sent, min(r.pos, r.size)); err != nil {
			return err
		}
		r.sent = r.pos
	}
	if r.pos >= r.size {
		if r.far != nil && r.far.f == nil {
			// From now on b does not hold everything.
			if err := r.far.open(); err != nil {
				return err
			}
			if err := r.far.write(r.b[:r.size], 0); err != nil {
				return err
			}
		}
		over := r.pos - r.size
		copy(r.b[:over], r.b[r.size:r.pos])
		r.pos, r.sent = over, over
		if over > 0 {
			return r.send(0, over)
		}
	}
	return nil
}

// commitPiece commits once there is enough for a piece.
func (r *ring) commitPiece() error {
	if r.pos-r.sent < pieceSize && r.pos < r.size {
		return nil
	}
	return r.commit()
}

func (r *ring) send(from, to int) error {
	if r.far != nil && r.far.f != nil {
		if err := r.far.write(r.b[from:to], r.total); err != nil {
			return err
		}
	}
	r.total += int64(to - from)
	r.have += int64(to - from)
	r.mu.Lock()
	r.unread += to - from
	r.mu.Unlock()
	r.out <- item{b: r.b[from:to:to]}
	return nil
}

// fetch appends length bytes that start distance before pos, and are not in b any more.
func (r *ring) fetch(distance, length int) error {
	err := r.far.read(r.b[r.pos:r.pos+length], r.total+int64(r.pos-r.sent-distance))
	r.pos += length
	return err
}

// begin says that what follows has this checksum; nil is none.
func (r *ring) begin(sum hash.Hash) { r.out <- item{check: &check{sum: sum}} }

// end says what the checksum of what came since begin must be.
func (r *ring) end(want []byte, name string) { r.out <- item{check: &check{want: want, name: name}} }

// release says that the consumer is done with n bytes.
func (r *ring) release(n int) {
	r.mu.Lock()
	r.unread -= n
	r.mu.Unlock()
	r.cond.Signal()
}

// close makes the decoder fail soon. The consumer then drains out until the decoder has closed it.
func (r *ring) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cond.Broadcast()
}

// before is the place of the byte before pos.
func (r *ring) before(pos int) int {
	if pos <= 0 {
		pos += r.size
	}
	return pos - 1
}

// repeat appends length bytes that start distance before pos.
func (r *ring) repeat(distance, length int) {
	to := r.b[r.pos : r.pos+length]
	r.pos += length
	from := r.pos - length - distance
	if from < 0 {
		// What is beyond the end is at the front.
		from += r.size
		n := copy(to, r.b[from:r.size])
		to, from = to[n:], 0
		if len(to) == 0 {
			return
		}
	}
	// It may overlap what it makes: double what is there until it is long enough.
	at := r.pos - len(to)
	for done := 0; done < len(to); {
		done += copy(to[done:], r.b[from:at+done])
	}
}
