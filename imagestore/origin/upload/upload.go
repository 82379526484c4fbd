package upload

import (
	"context"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Upload is one expected upload. Read returns its bytes in order, over any number of requests.
type Upload struct {
	URL string

	srv      *Server
	token    string
	requests chan *request // from the handlers of requests to the reader

	closed  chan struct{}
	outcome error // set before closed is

	mu        sync.Mutex
	size      int64 // 0: unknown
	off       int64 // received bytes
	crc       uint32
	sending   *request // the request with the turn
	ended     bool
	continued bool  // an earlier process took the first bytes
	why       error // cause of the end, unless the sender ended the upload

	ctx     context.Context // of the import
	stop    func() bool     // detaches from ctx
	reading *request        // the request that Read reads; for the reader alone
}

// request is one request of the sender.
type request struct {
	body     io.Reader
	from, to int64 // bytes of the image; to is -1 if only the end shows it
	size     int64 // of the image
	explicit bool  // with Content-Range
	rc       *http.ResponseController

	replaced chan struct{} // closed once another request takes the turn
	left     chan struct{} // closed after the turn
	done     chan struct{} // closed after the last read of the body
	err      error         // cause of the end; set before done is closed
}

// expectsMore reports whether further requests are expected.
func (up *Upload) expectsMore() bool {
	up.mu.Lock()
	defer up.mu.Unlock()
	return !up.ended && up.off < up.size
}

// currentState returns the state of the upload.
func (up *Upload) currentState() State {
	up.mu.Lock()
	defer up.mu.Unlock()
	s := State{State: api.ImageStarting, Offset: up.off, CRC32C: up.crc, Size: up.size, Sending: up.sending != nil}
	if up.off > 0 {
		s.State = api.ImageInProgress
	}
	return s
}

func (up *Upload) outcomeText() string {
	if up.outcome == nil {
		return "this upload is complete already"
	}
	return up.outcome.Error()
}

// parseRequest finds the image, or a part of the image, in the request.
func (up *Upload) parseRequest(r *http.Request) (*request, error) {
	up.mu.Lock()
	size := up.size
	up.mu.Unlock()
	p := &request{to: -1, replaced: make(chan struct{}), left: make(chan struct{}), done: make(chan struct{})}
	agree := func(n int64, how string) error {
		if size != 0 && size != n {
			return api.Errorf(api.Invalid, "%s, but the image's size is to be %d bytes", how, size)
		}
		size = n
		return nil
	}
	if q := r.URL.Query().Get("size"); q != "" {
		n, err := strconv.ParseInt(q, 10, 64)
		if err != nil || n <= 0 {
			return nil, api.Errorf(api.Invalid, "size=%.40q is not a number of bytes", q)
		}
		if err := agree(n, "size="+q); err != nil {
			return nil, err
		}
	}
	form := false
	switch r.Method {
	case http.MethodPut:
	case http.MethodPost:
		kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		form = kind == "multipart/form-data"
	default:
		return nil, api.Errorf(api.Unsupported, "send the image with PUT, or with POST as a multipart form")
	}
	if c := r.Header.Get("Content-Range"); c != "" {
		from, to, total, ok := origin.ParseContentRange(c)
		if !ok || form {
			return nil, api.Errorf(api.Invalid, "Content-Range %.80q cannot be used: want bytes FIRST-LAST/SIZE", c)
		}
		if n := r.ContentLength; n >= 0 && n != to-from+1 {
			return nil, api.Errorf(api.Invalid, "Content-Range %.80q, but the request has %d bytes", c, n)
		}
		if total >= 0 {
			if err := agree(total, "Content-Range "+c); err != nil {
				return nil, err
			}
		}
		p.explicit, p.from, p.to = true, from, to+1
	} else if n := r.ContentLength; n >= 0 && !form {
		if err := agree(n, strconv.FormatInt(n, 10)+" bytes are announced"); err != nil {
			return nil, err
		}
		p.to = n
	}
	switch {
	case size == 0:
		return nil, api.Errorf(api.Invalid, "the size is missing: add ?size=<bytes> to the address")
	case p.to > size:
		return nil, api.Errorf(api.Invalid, "the range ends beyond the image's size (%d bytes)", size)
	}
	p.body, p.size = r.Body, size
	if !form {
		return p, nil
	}
	mr, err := r.MultipartReader()
	if err != nil {
		return nil, api.Errorf(api.Invalid, "the form cannot be read: %w", err)
	}
	for {
		f, err := mr.NextPart()
		if err != nil {
			return nil, api.Errorf(api.Invalid, "the form has no file: %.200s", err) // the error may repeat a header
		}
		if isFile(f) {
			p.body = f
			return p, nil
		}
	}
}

func isFile(p *multipart.Part) bool { return p.FileName() != "" || p.FormName() == "chunk" }

// takeTurn gives the turn to a request. A request with Content-Range replaces another request, whose connection may be
// dead.
func (up *Upload) takeTurn(ctx context.Context, p *request) error {
	for {
		up.mu.Lock()
		old := up.sending
		switch {
		case up.ended:
			up.mu.Unlock()
			return api.Errorf(api.Busy, "the upload has ended")
		case up.size != 0 && up.size != p.size:
			up.mu.Unlock()
			return api.Errorf(api.Busy, "the upload is in progress already, with another size")
		case p.from > up.off:
			defer up.mu.Unlock()
			return api.Errorf(api.Invalid, "%d bytes are here: continue with Content-Range: bytes %d-%d/%d", up.off, up.off,
				p.size-1, p.size)
		case old != nil && !p.explicit:
			up.mu.Unlock()
			return api.Errorf(api.Busy, "the upload is in progress already")
		case old == nil && !p.explicit && up.off > 0:
			defer up.mu.Unlock()
			return api.Errorf(api.Busy, "%d bytes of this upload came before: continue it with Content-Range: bytes %d-%d/%d "+
				"(curl: -C %d)", up.off, up.off, up.size-1, up.size, up.off)
		case old == nil:
			up.sending, up.size = p, p.size
			up.mu.Unlock()
			return nil
		}
		select {
		case <-old.replaced:
		default:
			close(old.replaced)
		}
		_ = old.rc.SetReadDeadline(time.Now())
		up.mu.Unlock()
		select {
		case <-old.left:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// leaveTurn ends the request's turn.
func (up *Upload) leaveTurn(p *request) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if up.sending == p {
		up.sending = nil
	}
	close(p.left)
}

// Accept waits for the sender. The end of ctx cuts the transfer.
func (up *Upload) Accept(ctx context.Context) (*origin.Stream, error) {
	up.ctx = ctx
	var late <-chan time.Time
	if up.continued {
		t := time.NewTimer(up.srv.resumeTimeout())
		defer t.Stop()
		late = t.C
	}
	from := up.currentState()
	if !up.continued || from.Offset < from.Size {
		select {
		case up.reading = <-up.requests:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-late:
			return nil, up.errUnattended()
		}
	}
	up.stop = context.AfterFunc(ctx, func() { up.failReads(ctx.Err()) })
	size := up.currentState().Size
	return &origin.Stream{ReadCloser: up, Size: size, Name: "upload", CRC: true,
		Mark: &origin.Mark{Off: from.Offset, Size: size, Validator: up.token, CRC: from.CRC32C}}, nil
}

// errUnattended is the error of an upload that no sender continues.
func (up *Upload) errUnattended() error {
	s := up.currentState()
	return api.Errorf(api.Unavailable, "the upload ended early, after %d of %d bytes, and no sender continued it "+
		"within %s",
		s.Offset, s.Size, up.srv.resumeTimeout())
}

// Finish reports the outcome to the sender, cuts a running transfer and drops the address.
func (up *Upload) Finish(outcome error) {
	up.srv.mu.Lock()
	delete(up.srv.expected, up.token)
	up.srv.mu.Unlock()
	up.outcome = outcome
	close(up.closed)
	up.failReads(nil)
}

// failReads makes reads of the transfer fail, now and later.
func (up *Upload) failReads(why error) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if !up.ended {
		up.ended, up.why = true, why
	}
	if up.sending != nil {
		_ = up.sending.rc.SetReadDeadline(time.Now())
	}
}

// extendDeadline gives the sender time for the next bytes, unless its turn is over.
func (up *Upload) extendDeadline(p *request) {
	up.mu.Lock()
	defer up.mu.Unlock()
	select {
	case <-p.replaced:
	default:
		if !up.ended {
			_ = p.rc.SetReadDeadline(time.Now().Add(up.srv.stallTimeout()))
		}
	}
}

// endRequest ends the reading of a request; err is the cause, nil after all bytes.
func (up *Upload) endRequest(err error) {
	p := up.reading
	up.reading = nil
	if p == nil {
		return
	}
	if err == nil {
		_ = p.rc.SetReadDeadline(time.Time{}) // the HTTP server needs the connection for the answer
	}
	p.err = err
	up.leaveTurn(p)
	close(p.done)
}

// Read returns the next bytes. After a cut, Read waits for a request that continues.
func (up *Upload) Read(b []byte) (int, error) {
	for len(b) > 0 {
		if up.ctx.Err() != nil {
			return 0, up.ctx.Err()
		}
		if up.reading == nil {
			if s := up.currentState(); s.Size > 0 && s.Offset == s.Size {
				return 0, io.EOF
			}
			if err := up.awaitRequest(); err != nil {
				return 0, err
			}
		}
		p := up.reading
		up.extendDeadline(p)
		n, err := p.body.Read(b)
		if again := min(up.off-p.from, int64(n)); again > 0 {
			p.from += again // received before
			copy(b, b[again:n])
			n -= int(again)
		}
		p.from += int64(n)
		up.mu.Lock()
		up.crc = origin.CRC32C(up.crc, b[:n])
		up.off += int64(n)
		off, size, over, why := up.off, up.size, up.ended, up.why
		up.mu.Unlock()
		var ne net.Error
		switch {
		case off > size:
			return 0, api.Errorf(api.Invalid, "the upload is larger than announced (%d bytes)", size)
		case err == nil:
		case over && why != nil:
			return n, why
		case over:
			return n, errEndedEarly(off, size)
		case off == size:
			up.endRequest(nil)
			return n, io.EOF
		case errors.Is(err, io.EOF) && p.explicit:
			up.endRequest(nil) // further requests follow
		case errors.Is(err, io.EOF):
			return n, errEndedEarly(off, size)
		case errors.As(err, &ne) && ne.Timeout():
			up.endRequest(api.Errorf(api.Unavailable, "the sender was silent for %s, or another one continues",
				up.srv.stallTimeout()))
		default:
			up.endRequest(api.Errorf(api.Unavailable, "the connection was cut after %d of %d bytes", off, size))
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, nil
}

func errEndedEarly(off, size int64) error {
	return api.Errorf(api.Unavailable, "the upload ended early, after %d of %d bytes", off, size)
}

// awaitRequest waits for a request that continues.
func (up *Upload) awaitRequest() error {
	t := time.NewTimer(up.srv.resumeTimeout())
	defer t.Stop()
	select {
	case up.reading = <-up.requests:
		return nil
	case <-up.ctx.Done():
		return up.ctx.Err()
	case <-t.C:
		return up.errUnattended()
	}
}

// Close ends the use of the request's body.
func (up *Upload) Close() error {
	if up.stop != nil {
		up.stop()
	}
	up.mu.Lock()
	up.ended = true // a sender now waits for the outcome
	up.mu.Unlock()
	up.endRequest(nil)
	return nil
}
