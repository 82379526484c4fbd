package importer

import (
	"bytes"
	"context"
	"errors"
	"hash"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
)

// pieceSize is the unit of the pump: one chunk of a layer, so that a sink sees whole chunks in one piece.
const pieceSize = block.ChunkSize

// pieces is how many pieces of memory one pump has.
const pieces = 8

// feed gives the bytes of a source in order: in buf, or in other memory of that size that it gives for buf; or the
// length of a hole that reads as zeros, and no bytes. io.EOF comes alone, at the end. Only the last piece is shorter
// than buf.
type feed interface {
	fill(buf []byte) (b []byte, hole int64, err error)
}

// streamFeed reads a stream whose first bytes were looked at already.
type streamFeed struct {
	head []byte
	r    io.Reader
}

func (s *streamFeed) fill(buf []byte) ([]byte, int64, error) {
	n := copy(buf, s.head)
	s.head = s.head[n:]
	m, err := io.ReadFull(s.r, buf[n:])
	if errors.Is(err, io.EOF) || err == io.ErrUnexpectedEOF {
		err = nil
		if n+m == 0 {
			err = io.EOF
		}
	}
	return buf[:n+m], 0, err
}

// fileFeed reads a file and finds its holes, so that they cost neither reads nor a search for zeros.
type fileFeed struct {
	f         *os.File
	off, size int64
	data, gap int64 // the extent of data that is known: [data, gap)
	blind     bool  // holes cannot be found here
}

func (s *fileFeed) fill(buf []byte) ([]byte, int64, error) {
	if s.off >= s.size {
		return nil, 0, io.EOF
	}
	if !s.blind && s.off >= s.gap {
		s.seek()
	}
	if !s.blind && s.off < s.data {
		// Up to a whole piece before the data: pieces stay aligned to chunks.
		if hole := s.data/pieceSize*pieceSize - s.off; hole > 0 {
			s.off += hole
			return buf[:0], hole, nil
		}
		if s.data >= s.size {
			hole := s.size - s.off
			s.off = s.size
			return buf[:0], hole, nil
		}
	}
	n, err := s.f.ReadAt(buf[:min(int64(len(buf)), s.size-s.off)], s.off)
	s.off += int64(n)
	if err == io.EOF && s.off < s.size {
		return nil, 0, io.ErrUnexpectedEOF
	}
	if n > 0 && err == io.EOF {
		err = nil
	}
	return buf[:n], 0, err
}

// seek finds the next data at or after off.
func (s *fileFeed) seek() {
	fd := int(s.f.Fd())
	data, err := unix.Seek(fd, s.off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		s.data, s.gap = s.size, s.size
		return
	case err != nil:
		s.blind = true
		return
	}
	gap, err := unix.Seek(fd, data, unix.SEEK_HOLE)
	if err != nil {
		gap = s.size
	}
	s.data, s.gap = min(data, s.size), min(gap, s.size)
}

// resting is a feed that wants the pump to rest now and then: due is asked after every piece, at the time that when
// tells, and when there is news; rest is called with all before off hashed and put. All but fill are called by one
// goroutine. A source that is silent does not keep the pump from resting.
type resting interface {
	news() <-chan struct{}
	when() time.Time
	due(off int64) bool
	rest(off int64) error
}

// piece is a run of the source on its way.
type piece struct {
	off  int64
	buf  []byte
	hole int64        // or a hole of this length
	uses atomic.Int32 // hash and put: who is last gives the memory back
}

// pump carries a source from its first byte to its last: reading, hashing and writing overlap, each piece is in memory
// once. put gets every piece of data (no hole), from up to writers goroutines, in any order but for writers == 1. tell
// hears of every piece once it is hashed (or written, where h is nil), from any goroutine. h and put may be nil. All
// goroutines have ended when pump returns. A blocked fill must be ended by the caller's context, which the caller
// cancels when stop is called.
func pump(ctx context.Context, f feed, h hash.Hash, put func(p []byte, off int64) error, writers int,
	tell func(n int64), stop func(error)) (int64, error) {
	free := make(chan []byte, pieces)
	for range pieces {
		free <- nil // made when first used
	}
	toHash, toPut := make(chan *piece, pieces), make(chan *piece, pieces)
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	failed := make(chan struct{})
	fail := func(err error) {
		once.Do(func() {
			first = err
			close(failed)
			stop(err)
		})
	}
	var way sync.WaitGroup // pieces on their way
	done := func(p *piece) {
		if p.uses.Add(-1) == 0 {
			free <- p.buf[:pieceSize]
			way.Done()
		}
	}
	if h != nil {
		wg.Go(func() {
			for p := range toHash {
				for left := p.hole; left > 0; left -= min(left, int64(len(zeros))) {
					if ctx.Err() != nil {
						break
					}
					h.Write(zeros[:min(left, int64(len(zeros)))])
				}
				h.Write(p.buf)
				if tell != nil {
					tell(int64(len(p.buf)) + p.hole)
				}
				done(p)
			}
		})
	}
	if put != nil {
		for range writers {
			wg.Go(func() {
				for p := range toPut {
					if len(p.buf) > 0 {
						select {
						case <-failed:
						default:
							if err := put(p.buf, p.off); err != nil {
								fail(err)
							}
						}
					}
					if h == nil && tell != nil {
						tell(int64(len(p.buf)) + p.hole)
					}
					done(p)
				}
			})
		}
	}
	filled := make(chan filling)
	wg.Go(func() {
		defer close(filled)
		for {
			var next filling
			select {
			case next.buf = <-free:
			case <-failed:
				return
			case <-ctx.Done():
				return
			}
			if next.buf == nil {
				next.buf = make([]byte, pieceSize)
			}
			next.buf, next.hole, next.err = f.fill(next.buf)
			select {
			case filled <- next:
			case <-failed:
				return
			case <-ctx.Done():
				return
			}
			if next.err != nil {
				return
			}
		}
	})
	breaks, _ := f.(resting)
	var news <-chan struct{}
	var clock <-chan time.Time
	var timer *time.Timer
	if breaks != nil {
		timer = time.NewTimer(time.Until(breaks.when()))
		defer timer.Stop()
		news, clock = breaks.news(), timer.C
	}
	var off int64
	for !isClosed(failed) {
		if breaks != nil && breaks.due(off) {
			way.Wait() // all that was filled is hashed and put, or will not be
			if isClosed(failed) || ctx.Err() != nil {
				break
			}
			if err := breaks.rest(off); err != nil {
				fail(err)
				break
			}
		}
		if timer != nil {
			timer.Reset(time.Until(breaks.when()))
		}
		var next filling
		select {
		case next = <-filled:
		case <-news:
			continue
		case <-clock:
			continue
		case <-failed:
		case <-ctx.Done():
			fail(ctx.Err())
		}
		if isClosed(failed) || errors.Is(next.err, io.EOF) {
			break
		}
		if next.err != nil {
			fail(next.err)
			break
		}
		if next.buf == nil {
			break // the reader saw the end of the context first
		}
		p := &piece{off: off, hole: next.hole, buf: next.buf}
		off += int64(len(p.buf)) + p.hole
		if h != nil {
			p.uses.Add(1)
		}
		if put != nil {
			p.uses.Add(1)
		}
		way.Add(1)
		if h != nil {
			toHash <- p
		}
		if put != nil {
			toPut <- p
		}
	}
	close(toHash)
	close(toPut)
	wg.Wait()
	if !isClosed(failed) && ctx.Err() != nil {
		return off, ctx.Err()
	}
	return off, first
}

// filling is what the reader of a pump gives.
type filling struct {
	buf  []byte
	hole int64
	err  error
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

var zeros = make([]byte, 1<<20)

// whole writes pieces of a layer: one that is nothing but zeros stays a hole, any other is written with the zeros in
// it. So the digest of a layer follows from the content alone, not from where the source had holes, and the writer of
// the layer digests each chunk while it is in memory. A last block that is not full is padded.
func whole(w io.WriterAt) func(p []byte, off int64) error {
	return func(p []byte, off int64) error {
		if isZero(p) {
			return nil
		}
		if tail := len(p) % block.Size; tail != 0 {
			// The rest of a piece's memory belongs to this piece.
			n := len(p)
			p = p[:n+block.Size-tail]
			clear(p[n:])
		}
		_, err := w.WriteAt(p, off)
		return err
	}
}

func isZero(p []byte) bool {
	for len(p) > 0 {
		n := min(len(p), block.Size)
		if !bytes.Equal(p[:n], zeros[:n]) {
			return false
		}
		p = p[n:]
	}
	return true
}

// wholeSource gives a source in whole chunks: one that holds any data is data from its start to its end. Next is for
// one goroutine.
type wholeSource struct {
	block.Source
	last block.Extent // of the source: a long one is asked for once
}

func (s *wholeSource) Next(off int64) (block.Extent, error) {
	size := s.Size()
	data := off // the first byte of data at or after off
	for data < size {
		e := s.last
		if data < e.Off || data >= e.End() {
			var err error
			if e, err = s.Source.Next(data); err != nil {
				return e, err
			}
			s.last = e
		}
		if e.Kind == block.Data {
			break
		}
		data = e.End()
	}
	chunk := data / pieceSize * pieceSize
	switch {
	case data >= size:
		return block.Extent{Off: off, Len: size - off, Kind: block.Hole}, nil
	case chunk > off:
		return block.Extent{Off: off, Len: chunk - off, Kind: block.Hole}, nil
	}
	return block.Extent{Off: off, Len: min(chunk+pieceSize, size) - off, Kind: block.Data}, nil
}

// wholeSink is whole as a block.Sink. An explicit zero is a hole here: nothing is below an image that it would hide.
type wholeSink struct {
	block.Sink
	put func([]byte, int64) error
}

func (s wholeSink) WriteAt(p []byte, off int64) (int, error) {
	n := len(p)
	if tail := n % block.Size; tail != 0 {
		// whole pads in place: not in memory of the caller.
		p = append(make([]byte, 0, n+block.Size-tail), p...)
	}
	if err := s.put(p, off); err != nil {
		return 0, err
	}
	return n, nil
}

func (s wholeSink) ZeroAt(int64, int64) error { return nil }
