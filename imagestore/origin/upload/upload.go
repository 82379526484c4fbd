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

// Upload is one expected upload. As a reader it is the bytes in order, over any number of requests.
type Upload struct {
	URL string

	srv   *Server
	token string
	parts chan *part // from the handlers of requests to the reader

	closed  chan struct{}
	outcome error // set before closed is

	mu    sync.Mutex
	size  int64 // 0: not known yet
	off   int64 // bytes that are there
	crc   uint32
	cur   *part // the request that sends, or waits for its turn
	ended bool
	again bool  // an earlier process took the first bytes
	why   error // of the end, where it is not the sender's

	ctx  context.Context // of the import
	stop func() bool     // lets go of it
	at   *part           // the request that is being read; of the reader alone
}

// part is one request.
type part struct {
	body     io.Reader
	from, to int64 // bytes of the image; to is -1 where its end says it
	size     int64 // of the image
	explicit bool  // it says where it continues
	rc       *http.ResponseController

	kicked chan struct{} // closed when another request takes its place
	gone   chan struct{} // closed when it has left
	done   chan struct{} // closed when its body is no longer read
	err    error         // why that was; set before done is closed
}

// going reports whether more requests are expected.
func (up *Upload) going() bool {
	up.mu.Lock()
	defer up.mu.Unlock()
	return !up.ended && up.off < up.size
}

// now is the state of the upload.
func (up *Upload) now() State {
	up.mu.Lock()
	defer up.mu.Unlock()
	s := State{State: api.ImageStarting, Offset: up.off, CRC32C: up.crc, Size: up.size, Sending: up.cur != nil}
	if up.off > 0 {
		s.State = api.ImageInProgress
	}
	return s
}

func (up *Upload) said() string {
	if up.outcome == nil {
		return "this upload is complete already"
	}
	return up.outcome.Error()
}

// read finds the image, or a part of it, in the request.
func (up *Upload) read(r *http.Request) (*part, error) {
	up.mu.Lock()
	size := up.size
	up.mu.Unlock()
	p := &part{to: -1, kicked: make(chan struct{}), gone: make(chan struct{}), done: make(chan struct{})}
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
			return nil, api.Errorf(api.Invalid, "no file in the form: %.200s", err) // it may repeat a header
		}
		if isFile(f) {
			p.body = f
			return p, nil
		}
	}
}

func isFile(p *multipart.Part) bool { return p.FileName() != "" || p.FormName() == "chunk" }

// enter makes the request the one that sends. One that says where it continues takes the place of another, whose
// connection may be dead.
func (up *Upload) enter(ctx context.Context, p *part) error {
	for {
		up.mu.Lock()
		old := up.cur
		switch {
		case up.ended:
			up.mu.Unlock()
			return api.Errorf(api.Busy, "this upload has ended")
		case up.size != 0 && up.size != p.size:
			up.mu.Unlock()
			return api.Errorf(api.Busy, "this upload is under way already, with another size")
		case p.from > up.off:
			defer up.mu.Unlock()
			return api.Errorf(api.Invalid, "%d bytes are here: continue with Content-Range: bytes %d-%d/%d", up.off, up.off,
				p.size-1, p.size)
		case old != nil && !p.explicit:
			up.mu.Unlock()
			return api.Errorf(api.Busy, "this upload is under way already")
		case old == nil && !p.explicit && up.off > 0:
			defer up.mu.Unlock()
			return api.Errorf(api.Busy, "%d bytes of this upload came before: continue it with Content-Range: bytes %d-%d/%d "+
				"(curl: -C %d)", up.off, up.off, up.size-1, up.size, up.off)
		case old == nil:
			up.cur, up.size = p, p.size
			up.mu.Unlock()
			return nil
		}
		select {
		case <-old.kicked:
		default:
			close(old.kicked)
		}
		_ = old.rc.SetReadDeadline(time.Now())
		up.mu.Unlock()
		select {
		case <-old.gone:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// leave ends the request's turn.
func (up *Upload) leave(p *part) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if up.cur == p {
		up.cur = nil
	}
	close(p.gone)
}

// Accept waits for the sender. When ctx ends, the transfer is cut.
func (up *Upload) Accept(ctx context.Context) (*origin.Stream, error) {
	up.ctx = ctx
	var late <-chan time.Time
	if up.again {
		t := time.NewTimer(up.srv.patience())
		defer t.Stop()
		late = t.C
	}
	from := up.now()
	if !up.again || from.Offset < from.Size {
		select {
		case up.at = <-up.parts:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-late:
			return nil, up.unattended()
		}
	}
	up.stop = context.AfterFunc(ctx, func() { up.cut(ctx.Err()) })
	size := up.now().Size
	return &origin.Stream{ReadCloser: up, Size: size, Name: "upload", CRC: true,
		Mark: &origin.Mark{Off: from.Offset, Size: size, Validator: up.token, CRC: from.CRC32C}}, nil
}

// unattended is the error of an upload that nobody continues.
func (up *Upload) unattended() error {
	s := up.now()
	return api.Errorf(api.Unavailable, "the upload ended early, after %d of %d bytes, and nobody continued it within %s",
		s.Offset, s.Size, up.srv.patience())
}

// Finish tells the sender the outcome and forgets the address. A transfer under way is cut.
func (up *Upload) Finish(outcome error) {
	up.srv.mu.Lock()
	delete(up.srv.waiting, up.token)
	up.srv.mu.Unlock()
	up.outcome = outcome
	close(up.closed)
	up.cut(nil)
}

// cut makes reads of the transfer fail now, and lets no other begin.
func (up *Upload) cut(why error) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if !up.ended {
		up.ended, up.why = true, why
	}
	if up.cur != nil {
		_ = up.cur.rc.SetReadDeadline(time.Now())
	}
}

// patient gives the sender time for the next bytes, unless its turn is over.
func (up *Upload) patient(p *part) {
	up.mu.Lock()
	defer up.mu.Unlock()
	select {
	case <-p.kicked:
	default:
		if !up.ended {
			_ = p.rc.SetReadDeadline(time.Now().Add(up.srv.stall()))
		}
	}
}

// let ends the reading of a request; err is why, nil where all of it was read.
func (up *Upload) let(err error) {
	p := up.at
	up.at = nil
	if p == nil {
		return
	}
	if err == nil {
		_ = p.rc.SetReadDeadline(time.Time{}) // the connection may be looked at until its answer is sent
	}
	p.err = err
	up.leave(p)
	close(p.done)
}

// Read gives the next bytes. A request that is cut is waited for to be continued.
func (up *Upload) Read(b []byte) (int, error) {
	for len(b) > 0 {
		if up.ctx.Err() != nil {
			return 0, up.ctx.Err()
		}
		if up.at == nil {
			if s := up.now(); s.Size > 0 && s.Offset == s.Size {
				return 0, io.EOF
			}
			if err := up.next(); err != nil {
				return 0, err
			}
		}
		p := up.at
		up.patient(p)
		n, err := p.body.Read(b)
		if again := min(up.off-p.from, int64(n)); again > 0 {
			p.from += again // came before
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
			return n, short(off, size)
		case off == size:
			up.let(nil)
			return n, io.EOF
		case errors.Is(err, io.EOF) && p.explicit:
			up.let(nil) // the end of this part, and others follow
		case errors.Is(err, io.EOF):
			return n, short(off, size)
		case errors.As(err, &ne) && ne.Timeout():
			up.let(api.Errorf(api.Unavailable, "the sender was silent for %s, or another one continues", up.srv.stall()))
		default:
			up.let(api.Errorf(api.Unavailable, "the connection was cut after %d of %d bytes", off, size))
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, nil
}

func short(off, size int64) error {
	return api.Errorf(api.Unavailable, "the upload ended early, after %d of %d bytes", off, size)
}

// next waits for a request that continues.
func (up *Upload) next() error {
	t := time.NewTimer(up.srv.patience())
	defer t.Stop()
	select {
	case up.at = <-up.parts:
		return nil
	case <-up.ctx.Done():
		return up.ctx.Err()
	case <-t.C:
		return up.unattended()
	}
}

// Close lets go of the request's body.
func (up *Upload) Close() error {
	if up.stop != nil {
		up.stop()
	}
	up.mu.Lock()
	up.ended = true // whoever sends now waits for the outcome
	up.mu.Unlock()
	up.let(nil)
	return nil
}
