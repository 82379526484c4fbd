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

// Options tune a download; the zero value is what the product uses.
type Options struct {
	Access
	// Start is how long the server may take until its first byte; 30 s.
	Start time.Duration
	// Stall is how long the server may be silent in the middle; 60 s. Then the connection counts as cut.
	Stall time.Duration
	// Resumes is how many cuts in a row, without a byte between them, are healed by asking for the rest, and how often a
	// busy server is asked again; 5.
	Resumes int
	// Pause before a resume; doubles with each cut in a row. 500 ms.
	Pause time.Duration
	// Connections is how many ranges come at once, each of Piece bytes; 4 of 8 MiB. That is also the memory.
	Connections int
	Piece       int64
	// From is where an earlier download of the same address stopped. The zero value is the beginning.
	From origin.Mark
	// Resumed is told of every resume, for the log. May be nil.
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
	if o.Piece == 0 {
		o.Piece = 8 << 20
	}
	return o
}

// Open opens an http or https address. It returns once the server agreed to send it, or an error that says why not.
// A server that serves ranges and names the content by an ETag or a date is asked for several of them at a time, and
// what a cut left missing is asked for again; any other sends all of it over one connection, and Read fails when that
// is cut and says how far it came. Stream.Mark tells where a later download could go on.
func Open(ctx context.Context, address string, opts Options) (*origin.Stream, error) {
	u, err := url.Parse(address)
	if err != nil {
		// The error of Parse repeats the address, and with it a password.
		return nil, api.Errorf(api.Invalid, "the url cannot be read: is it complete, and are special characters escaped?")
	}
	name := redact(u)
	if err := errors.Join(checkScheme(u), opts.Check()); err != nil {
		return nil, api.Errorf(api.Invalid, "%s: %w", name, err)
	}
	tr, err := opts.transport()
	if err != nil {
		return nil, api.Errorf(api.KindOf(err), "%s: %w", name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	d := &download{server: server{ctx: ctx, url: u, at: u, name: name, opts: opts.withDefaults(), http: opts.client(tr)},
		cancel: cancel, idle: tr.CloseIdleConnections}
	if err := d.begin(); err != nil {
		_ = d.Close()
		return nil, err
	}
	s := &origin.Stream{ReadCloser: d, Size: d.size, Name: name}
	if d.validator != "" && d.size >= 0 {
		s.Mark = &origin.Mark{Off: d.opts.From.Off, Size: d.size, Validator: d.validator}
		s.Ahead = d.ahead
	}
	return s, nil
}

// download is the bytes of one address, in order. Owner: the goroutine that reads; window has goroutines of its own.
type download struct {
	server
	cancel context.CancelFunc
	idle   func()

	one  *section     // all of it over one connection at a time, or
	many *rangeWindow // several ranges at once
	err  error        // final
}

// begin asks for the first bytes, and finds out how the rest is to be had.
func (d *download) begin() error {
	if d.opts.From.Off > 0 {
		d.size, d.validator = d.opts.From.Size, d.opts.From.Validator
		return d.divide(nil, d.opts.From.Off)
	}
	a, err := d.first()
	if err != nil {
		return err
	}
	d.size, d.validator = a.total, a.validator
	if !a.part {
		d.one = &section{s: &d.server, end: a.total, fixed: !a.ranges || a.validator == "" || a.total < 0, body: a.body}
		return nil
	}
	return d.divide(a, 0)
}

// first is the answer to the first request: a range with all that is needed to ask for others, or everything.
func (d *download) first() (*answer, error) {
	a, err := d.get(0, d.opts.Piece, d.opts.Resumes)
	if err == nil && a.part && (a.validator == "" || a.total < 0) {
		a.body.Close() // other ranges might be of other bytes
		a, err = d.get(0, -1, d.opts.Resumes)
	} else if errors.Is(err, origin.ErrRange) {
		a, err = d.get(0, -1, d.opts.Resumes) // nothing is in it, or it knows no ranges
	}
	return a, err
}

// divide asks for the bytes from off on in pieces; a is the answer with the first one, or nil.
func (d *download) divide(a *answer, off int64) error {
	if d.size-off <= d.opts.Piece || d.opts.Connections < 2 {
		d.one = &section{s: &d.server, off: off, end: d.size}
		if off == d.size && a == nil {
			return nil // all was there already
		}
		if a != nil && d.size <= d.opts.Piece {
			d.one.body = a.body
			return nil
		} else if a != nil {
			a.body.Close()
		}
		return d.one.open(d.opts.Resumes)
	}
	w, err := newRangeWindow(&d.server, a, off)
	if errors.Is(err, origin.ErrChanged) && off == 0 {
		// Its parts do not fit together, as with several servers behind one name: then all of it at once.
		if a, err = d.get(0, -1, d.opts.Resumes); err != nil {
			return err
		}
		d.size, d.validator = a.total, ""
		d.one = &section{s: &d.server, end: a.total, fixed: true, body: a.body}
		return nil
	}
	d.many = w
	return err
}

// Read gives the next bytes, over a new connection where the old one was cut.
func (d *download) Read(p []byte) (int, error) {
	if d.err != nil || len(p) == 0 {
		return 0, d.err
	}
	var n int
	if d.many != nil {
		n, d.err = d.many.Read(p)
	} else {
		n, d.err = d.one.Read(p)
	}
	return n, d.err
}

// ahead reads all of p from a part that has not come yet, by a request of its own.
func (d *download) ahead(p []byte, off int64) error {
	a, err := d.get(off, int64(len(p)), 0)
	if err != nil {
		return err
	}
	defer a.body.Close()
	if !a.part {
		return d.changed(off)
	}
	_, err = io.ReadFull(a.body, p)
	return err
}

// Close ends the transfer.
func (d *download) Close() error {
	d.cancel()
	if d.many != nil {
		d.many.close()
	}
	if d.one != nil {
		d.one.drop()
	}
	d.idle()
	if d.err == nil {
		d.err = api.Errorf(api.Unavailable, "%s: closed", d.name)
	}
	return nil
}

// section is a run of bytes of a server over any number of connections. Owner: the goroutine that reads.
type section struct {
	s     *server
	off   int64 // next byte
	end   int64 // -1: where the server ends
	fixed bool  // the rest alone is not to be had

	body *body
	cuts int // in a row
}

// open asks for the rest of the section; busy is how often a busy server is asked again.
func (x *section) open(busy int) error {
	a, err := x.s.get(x.off, x.end-x.off, busy)
	if err != nil {
		return err
	}
	if !a.part && (x.off > 0 || a.total != x.s.size || a.validator != x.s.validator) {
		a.body.Close()
		return x.s.changed(x.off)
	}
	x.body = a.body
	return nil
}

// Read gives the next bytes; io.EOF after the last one of the section.
func (x *section) Read(p []byte) (int, error) {
	for {
		if x.end >= 0 {
			if x.off == x.end {
				x.drop()
				return 0, io.EOF
			}
			p = p[:min(int64(len(p)), x.end-x.off)]
		}
		n, err := x.body.Read(p)
		x.off += int64(n)
		if n > 0 {
			x.cuts = 0
			return n, nil // an error that came with bytes comes again with the next Read
		}
		switch {
		case errors.Is(err, io.EOF) && x.end < 0:
			x.drop()
			x.end = x.off
		case err != nil:
			if err := x.resume(err); err != nil {
				return 0, err
			}
		}
	}
}

// resume opens the rest after a cut, or says why that is not possible.
func (x *section) resume(err error) error {
	x.drop()
	s := x.s
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	if errors.Is(err, errStart) {
		return s.unreachable(err, errStart)
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
	if x.fixed {
		return broken(", and it cannot send the rest alone")
	}
	for ; x.cuts < s.opts.Resumes; x.cuts++ {
		if s.opts.Resumed != nil {
			s.opts.Resumed(x.off, err)
		}
		if err := origin.Pause(s.ctx, s.opts.Pause<<x.cuts); err != nil {
			return err
		}
		oerr := x.open(s.opts.Resumes)
		if oerr == nil {
			x.cuts++
			return nil
		}
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		if !passing(oerr) || origin.Wait(oerr) > 0 {
			return oerr // a server that says when to come again is not asked before
		}
		err = oerr
	}
	return broken(fmt.Sprintf("; %d tries to get the rest failed, the last: %v", s.opts.Resumes, err))
}

// drop ends the current request.
func (x *section) drop() {
	if x.body != nil {
		x.body.Close()
		x.body = nil
	}
}
