package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// input is the packed stream: read ahead on a goroutine of its own, and given to the decoder in contiguous pieces.
type input struct {
	ctx   context.Context
	name  string
	full  chan chunk
	empty chan []byte

	buf      []byte
	pos, end int   // what is not consumed yet is buf[pos:end]
	off      int64 // bytes consumed, for messages
	err      error // why nothing more comes: io.EOF, or of the source
}

type chunk struct {
	b   []byte
	err error
}

const (
	readSize  = 128 << 10
	readAhead = 3
	// The largest piece that next can give: an LZMA2 chunk, a zstd block.
	maxNext = 256 << 10
	// How far a decoder may step back with skip.
	maxBack = 8
)

func newInput(ctx context.Context, name string) *input {
	in := &input{ctx: ctx, name: name, full: make(chan chunk, readAhead), empty: make(chan []byte, readAhead),
		buf: make([]byte, maxBack+maxNext+2*readSize)}
	for range readAhead {
		in.empty <- make([]byte, readSize)
	}
	return in
}

// read is the goroutine that reads r.
func (in *input) read(r io.Reader) {
	idle := 0
	for {
		var b []byte
		select {
		case b = <-in.empty:
		case <-in.ctx.Done():
			return
		}
		n, err := r.Read(b[:readSize])
		if n == 0 && err == nil {
			if idle++; idle == 100 {
				err = io.ErrNoProgress
			}
		}
		if n > 0 {
			idle = 0
		}
		select {
		case in.full <- chunk{b[:n], err}:
		case <-in.ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// more brings more bytes into the buffer. It reports false when there are none, or an error.
func (in *input) more() bool {
	if in.err != nil {
		return false
	}
	if len(in.buf)-in.end < readSize {
		from := max(in.pos-maxBack, 0)
		copy(in.buf, in.buf[from:in.end])
		in.end -= from
		in.pos -= from
	}
	select {
	case c := <-in.full:
		in.end += copy(in.buf[in.end:], c.b)
		in.err = c.err
		in.empty <- c.b
		return len(c.b) > 0 || in.err == nil
	case <-in.ctx.Done():
		in.err = errClosed
		return false
	}
}

// need makes n bytes available at pos, or reports false.
func (in *input) need(n int) bool {
	for in.end-in.pos < n {
		if !in.more() {
			return false
		}
	}
	return true
}

// failed says why need reported false.
func (in *input) failed() error {
	if errors.Is(in.err, io.EOF) {
		return truncated(in.name)
	}
	return in.err
}

// peek gives the next n bytes without consuming them.
func (in *input) peek(n int) ([]byte, error) {
	if !in.need(n) {
		return nil, in.failed()
	}
	return in.buf[in.pos : in.pos+n], nil
}

func (in *input) next(n int) ([]byte, error) {
	b, err := in.peek(n)
	if err == nil {
		in.skip(n)
	}
	return b, err
}

func (in *input) skip(n int) {
	in.pos += n
	in.off += int64(n)
}

// fill reads exactly len(b) bytes.
func (in *input) fill(b []byte) error {
	for len(b) > 0 {
		if !in.need(1) {
			return in.failed()
		}
		n := copy(b, in.buf[in.pos:in.end])
		in.skip(n)
		b = b[n:]
	}
	return nil
}

// atEnd tells whether the source ends here.
func (in *input) atEnd() (bool, error) {
	if in.need(1) {
		return false, nil
	}
	if errors.Is(in.err, io.EOF) {
		return true, nil
	}
	return false, in.err
}

// trailing is the error for what follows the end of the archive.
func (in *input) trailing() error {
	return corrupt("%s: after %d bytes the archive is complete, but %w", in.name, in.off, ErrTrailing)
}

// damaged is the error for bytes that cannot be.
func (in *input) damaged(format string, args ...any) error {
	return corrupt("%s: near byte %d: %w", in.name, in.off, fmt.Errorf(format, args...))
}

// memory is a source that is in memory already.
type memory struct {
	name string
	b    []byte
}

func (m *memory) next(n int) ([]byte, error) {
	if len(m.b) < n {
		return nil, corrupt("%s: a block is longer than its header says", m.name)
	}
	b := m.b[:n]
	m.b = m.b[n:]
	return b, nil
}
