package http

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Options tune a download; the zero value has the defaults of the product.
type Options struct {
	Access
	// Start is how long the server may take until its first byte; 30 s.
	Start time.Duration
	// Stall is how long the server may be silent in the middle; 60 s. Then the connection counts as cut.
	Stall time.Duration
	// Resumes is how many cuts in a row, without a byte between them, are followed by a request for the rest, and how
	// often a busy server is asked again; 5.
	Resumes int
	// Pause before a resume; doubles with each cut in a row. 500 ms.
	Pause time.Duration
	// Connections is how many ranges of RangeSize bytes arrive at once; 4 of 8 MiB, which is the memory as well.
	Connections int
	RangeSize   int64
	// From is where an earlier download of the same address stopped. The zero value is the start.
	From origin.Mark
	// Resumed is called before every resume. May be nil.
	Resumed func(off int64, cause error)
}

const maxConnections = 4

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Start, 30*time.Second)
	def(&o.Stall, 60*time.Second)
	def(&o.Pause, 500*time.Millisecond)
	if o.Resumes == 0 {
		o.Resumes = 5
	}
	if o.Connections == 0 {
		o.Connections = maxConnections
	}
	if o.RangeSize == 0 {
		o.RangeSize = 8 << 20
	}
	return o
}

// Open opens an http or https address and returns once the server agreed to send the content. A server with ranges and
// a validator (ETag or date) sends several ranges at once, and missing bytes are requested again after a cut. Any other
// server sends all bytes over one connection, and Read fails after a cut. Stream.Mark lets a later download continue.
func Open(ctx context.Context, address string, opts Options) (*origin.Stream, error) {
	u, err := url.Parse(address)
	if err != nil {
		// The error of Parse repeats the address, and so a password.
		return nil, api.Errorf(api.Invalid, "the url cannot be read: is it complete, and are special characters escaped?")
	}
	name := redactURL(u)
	if err := errors.Join(checkScheme(u), opts.Check()); err != nil {
		return nil, api.Errorf(api.Invalid, "%s: %w", name, err)
	}
	tr, err := opts.newTransport()
	if err != nil {
		return nil, api.Errorf(api.KindOf(err), "%s: %w", name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	d := &download{server: server{ctx: ctx, url: u, at: u, name: name, opts: opts.withDefaults(),
		http: opts.newClient(tr)},
		cancel: cancel, idle: tr.CloseIdleConnections}
	if err := d.startDownload(); err != nil {
		_ = d.Close()
		return nil, err
	}
	s := &origin.Stream{ReadCloser: d, Size: d.size, Name: name}
	if d.validator != "" && d.size >= 0 {
		s.Mark = &origin.Mark{Off: d.opts.From.Off, Size: d.size, Validator: d.validator}
		s.Ahead = d.readAhead
	}
	return s, nil
}

// download is the bytes of one address, in order. The goroutine that reads owns the download; the window has its own
// goroutines.
type download struct {
	server
	cancel context.CancelFunc
	idle   func()

	single *rangeReader // one connection at a time, or
	window *rangeWindow // several ranges at once
	err    error        // final
}

// startDownload requests the first bytes and chooses how to request the rest.
func (d *download) startDownload() error {
	if d.opts.From.Off > 0 {
		d.size, d.validator = d.opts.From.Size, d.opts.From.Validator
		return d.divideRanges(nil, d.opts.From.Off)
	}
	a, err := d.firstAnswer()
	if err != nil {
		return err
	}
	d.size, d.validator = a.total, a.validator
	if !a.partial {
		d.single = &rangeReader{s: &d.server, end: a.total, body: a.body,
			noRanges: !a.ranges || a.validator == "" || a.total < 0}
		return nil
	}
	return d.divideRanges(a, 0)
}

// firstAnswer returns the answer to the first request: a range with the facts for requests of other ranges, or the
// whole content.
func (d *download) firstAnswer() (*answer, error) {
	a, err := d.getRange(0, d.opts.RangeSize, d.opts.Resumes)
	if err == nil && a.partial && (a.validator == "" || a.total < 0) {
		a.body.Close() // other ranges could belong to other content
		a, err = d.getRange(0, -1, d.opts.Resumes)
	} else if errors.Is(err, origin.ErrRange) {
		a, err = d.getRange(0, -1, d.opts.Resumes) // empty, or without ranges
	}
	return a, err
}

// divideRanges requests the bytes from off on, in ranges if useful; a is the answer with the first range, or nil.
func (d *download) divideRanges(a *answer, off int64) error {
	if d.size-off <= d.opts.RangeSize || d.opts.Connections < 2 {
		d.single = &rangeReader{s: &d.server, off: off, end: d.size}
		if off == d.size && a == nil {
			return nil // complete already
		}
		if a != nil && d.size <= d.opts.RangeSize {
			d.single.body = a.body
			return nil
		} else if a != nil {
			a.body.Close()
		}
		return d.single.openRange(d.opts.Resumes)
	}
	w, err := newRangeWindow(&d.server, a, off)
	if errors.Is(err, origin.ErrChanged) && off == 0 {
		// The ranges have different validators, as with several servers behind one name: one connection for all bytes.
		if a, err = d.getRange(0, -1, d.opts.Resumes); err != nil {
			return err
		}
		d.size, d.validator = a.total, ""
		d.single = &rangeReader{s: &d.server, end: a.total, noRanges: true, body: a.body}
		return nil
	}
	d.window = w
	return err
}

// Read returns the next bytes, over a new connection after a cut.
func (d *download) Read(p []byte) (int, error) {
	if d.err != nil || len(p) == 0 {
		return 0, d.err
	}
	var n int
	if d.window != nil {
		n, d.err = d.window.Read(p)
	} else {
		n, d.err = d.single.Read(p)
	}
	return n, d.err
}

// readAhead reads all of p by a request of its own.
func (d *download) readAhead(p []byte, off int64) error {
	a, err := d.getRange(off, int64(len(p)), 0)
	if err != nil {
		return err
	}
	defer a.body.Close()
	if !a.partial {
		return d.errChanged(off)
	}
	_, err = io.ReadFull(a.body, p)
	return err
}

// Close ends the transfer.
func (d *download) Close() error {
	d.cancel()
	if d.window != nil {
		d.window.close()
	}
	if d.single != nil {
		d.single.endRequest()
	}
	d.idle()
	if d.err == nil {
		d.err = api.Errorf(api.Unavailable, "%s: closed", d.name)
	}
	return nil
}

// rangeReader reads a range of a server over any number of connections. The goroutine that reads owns the rangeReader.
type rangeReader struct {
	s        *server
	off      int64 // next byte
	end      int64 // -1: unknown
	noRanges bool  // the server cannot send the rest alone

	body *body
	cuts int // in a row
}

// openRange requests the rest of the range; busy is how often a busy server is asked again.
func (x *rangeReader) openRange(busy int) error {
	a, err := x.s.getRange(x.off, x.end-x.off, busy)
	if err != nil {
		return err
	}
	if !a.partial && (x.off > 0 || a.total != x.s.size || a.validator != x.s.validator) {
		a.body.Close()
		return x.s.errChanged(x.off)
	}
	x.body = a.body
	return nil
}

// Read returns the next bytes, and io.EOF after the last byte of the range.
func (x *rangeReader) Read(p []byte) (int, error) {
	for {
		if x.end >= 0 {
			if x.off == x.end {
				x.endRequest()
				return 0, io.EOF
			}
			p = p[:min(int64(len(p)), x.end-x.off)]
		}
		n, err := x.body.Read(p)
		x.off += int64(n)
		if n > 0 {
			x.cuts = 0
			return n, nil // the next Read returns the error again
		}
		switch {
		case errors.Is(err, io.EOF) && x.end < 0:
			x.endRequest()
			x.end = x.off
		case err != nil:
			if err := x.resumeRange(err); err != nil {
				return 0, err
			}
		}
	}
}

// resumeRange requests the rest after a cut, or returns why the rest cannot be had.
func (x *rangeReader) resumeRange(err error) error {
	x.endRequest()
	s := x.s
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	if errors.Is(err, errStart) {
		return s.explainFailure(err, errStart)
	}
	what := "the connection was cut"
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		what = "the server ended the transfer early"
	}
	if errors.Is(err, errStall) {
		what = fmt.Sprintf("the server was silent for %s", s.opts.Stall)
	}
	broken := func(why string) error {
		of := ""
		if s.size >= 0 {
			of = fmt.Sprintf(" of %d", s.size)
		}
		return api.Errorf(api.Unavailable, "%s: %s after %d%s bytes%s", s.name, what, x.off, of, why)
	}
	if x.noRanges {
		return broken(", and it cannot send the rest alone")
	}
	for ; x.cuts < s.opts.Resumes; x.cuts++ {
		if s.opts.Resumed != nil {
			s.opts.Resumed(x.off, err)
		}
		if err := origin.Pause(s.ctx, s.opts.Pause<<x.cuts); err != nil {
			return err
		}
		oerr := x.openRange(s.opts.Resumes)
		if oerr == nil {
			x.cuts++
			return nil
		}
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		if !isTemporary(oerr) || origin.Wait(oerr) > 0 {
			return oerr // the server asked for a pause
		}
		err = oerr
	}
	return broken(fmt.Sprintf("; %d tries to get the rest failed, the last: %v", s.opts.Resumes, err))
}

// endRequest ends the current request.
func (x *rangeReader) endRequest() {
	if x.body != nil {
		x.body.Close()
		x.body = nil
	}
}
