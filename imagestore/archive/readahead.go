package archive

import (
	"context"
	"errors"
	"io"
	"sync"
)

// errClosed is the error of a reader that is closed.
var errClosed = errors.New("the reader is closed")

const (
	chunkSize   = 128 << 10
	chunksAhead = 3
)

// readahead reads a source on its own goroutine, a few chunks ahead of the decoder.
type readahead struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	full   chan chunk
	empty  chan []byte
	cur    chunk  // the current chunk
	buf    []byte // memory of cur

	mu   sync.Mutex
	read int64 // bytes that the decoder took
	err  error // that the decoder got
}

type chunk struct {
	b   []byte
	err error
}

func newReadahead(r io.Reader) *readahead {
	ctx, cancel := context.WithCancel(context.Background())
	a := &readahead{ctx: ctx, cancel: cancel, full: make(chan chunk, chunksAhead), empty: make(chan []byte, chunksAhead)}
	for range chunksAhead {
		a.empty <- make([]byte, chunkSize)
	}
	a.wg.Go(func() { a.readSource(r) })
	return a
}

// readSource is the goroutine that reads the source.
func (a *readahead) readSource(r io.Reader) {
	for {
		select {
		case b := <-a.empty:
			c := readChunk(r, b)
			select {
			case a.full <- c:
			case <-a.ctx.Done():
				return
			}
			if c.err != nil {
				return
			}
		case <-a.ctx.Done():
			return
		}
	}
}

// readChunk reads some bytes, or an error.
func readChunk(r io.Reader, b []byte) chunk {
	for range 100 {
		if n, err := r.Read(b); n > 0 || err != nil {
			return chunk{b[:n], err}
		}
	}
	return chunk{err: io.ErrNoProgress}
}

// Read is for one goroutine, that of the decoder.
func (a *readahead) Read(p []byte) (int, error) {
	for len(a.cur.b) == 0 && a.cur.err == nil {
		if a.buf != nil {
			a.empty <- a.buf
			a.buf = nil
		}
		select {
		case a.cur = <-a.full:
			a.buf = a.cur.b[:cap(a.cur.b)]
		case <-a.ctx.Done():
			a.cur.err = errClosed
		}
	}
	n := copy(p, a.cur.b)
	a.cur.b = a.cur.b[n:]
	a.mu.Lock()
	defer a.mu.Unlock()
	a.read += int64(n)
	if n == 0 && len(p) > 0 {
		a.err = a.cur.err
		return 0, a.err
	}
	return n, nil
}

// decoderState returns how many bytes the decoder took, and the error that it got.
func (a *readahead) decoderState() (int64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.read, a.err
}

// stop ends the goroutine and makes Read fail; wait waits for the goroutine.
func (a *readahead) stop() { a.cancel() }
func (a *readahead) wait() { a.wg.Wait() }
