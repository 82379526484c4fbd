package http

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// server is the other side of a download. Several goroutines may send requests once startDownload has returned.
type server struct {
	ctx  context.Context
	url  *url.URL
	name string // for messages
	opts Options
	http *http.Client

	size      int64  // -1: unknown
	validator string // strong ETag or date

	mu      sync.Mutex
	at      *url.URL // the address, or the target of its redirects
	foreign bool     // reached through another server: no credentials
}

var (
	errStart = errors.New("no answer in time")
	errStall = errors.New("silent for too long")
)

// answer is a server's agreement to send bytes.
type answer struct {
	body      *body
	partial   bool  // the requested range; else everything
	total     int64 // size of the content; -1: unknown
	ranges    bool  // the server serves ranges
	validator string
}

// withContext returns the same server for requests under another context.
func (s *server) withContext(ctx context.Context) *server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &server{ctx: ctx, url: s.url, name: s.name, opts: s.opts, http: s.http, size: s.size, validator: s.validator,
		at: s.at, foreign: s.foreign}
}

// getRange requests n bytes from off on (n < 0: all). A busy server is asked up to again times more, at the time that
// the server wants.
func (s *server) getRange(off, n int64, again int) (*answer, error) {
	for try := 0; ; try++ {
		a, err := s.requestRange(off, n)
		var busy *origin.BusyError
		if !errors.As(err, &busy) || try >= again {
			return a, err
		}
		wait, short := busy.Pause(s.opts.Pause << try)
		if !short {
			return nil, err
		}
		if err := origin.Pause(s.ctx, wait); err != nil {
			return nil, err
		}
	}
}

// requestRange sends a request to the last known target. The target of a redirect may expire before the address, as
// signed addresses do; then requestRange asks the address again.
func (s *server) requestRange(off, n int64) (*answer, error) {
	s.mu.Lock()
	at, alien := s.at, s.foreign
	s.mu.Unlock()
	a, err := s.sendRequest(at, alien, off, n)
	if at != s.url && (api.Is(err, api.Denied) || api.Is(err, api.NotFound)) {
		a, err = s.sendRequest(s.url, false, off, n)
	}
	return a, err
}

func (s *server) sendRequest(at *url.URL, alien bool, off, n int64) (*answer, error) {
	ctx, cancel := context.WithCancelCause(s.ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		cancel(nil)
		return nil, api.Errorf(api.Invalid, "%s: the url cannot be used", s.name)
	}
	req.Header.Set("User-Agent", "drover")
	req.Header.Set("Accept-Encoding", "identity")
	if !alien {
		s.opts.addCredentials(req)
	}
	if n >= 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
		if s.validator != "" {
			req.Header.Set("If-Range", s.validator)
		}
	}
	timer := time.AfterFunc(s.opts.Start, func() { cancel(errStart) })
	resp, err := s.http.Do(req)
	timer.Stop()
	if err != nil {
		cause := context.Cause(ctx)
		cancel(nil)
		return nil, s.explainFailure(err, cause)
	}
	a, err := s.checkAnswer(resp, off, n)
	if err != nil {
		cancel(nil)
		_ = resp.Body.Close()
		return nil, err
	}
	a.body = &body{r: resp.Body, ctx: ctx, cancel: cancel, limit: s.opts.Start, late: errStart, next: s.opts.Stall}
	for r := resp.Request; r != nil; {
		alien = alien || !sameServer(r.URL, s.url)
		if r.Response == nil {
			break
		}
		r = r.Response.Request
	}
	s.mu.Lock()
	s.at, s.foreign = resp.Request.URL, alien
	s.mu.Unlock()
	return a, nil
}

// checkAnswer checks the head of an answer.
func (s *server) checkAnswer(resp *http.Response, off, n int64) (*answer, error) {
	if busy := origin.Busy(resp); busy != nil {
		return nil, api.Errorf(api.Unavailable, "%s: the server is %w", s.name, busy)
	}
	a := &answer{total: resp.ContentLength, validator: validatorOf(resp.Header),
		ranges: strings.EqualFold(resp.Header.Get("Accept-Ranges"), "bytes")}
	switch code := resp.StatusCode; {
	case code == http.StatusPartialContent && n >= 0:
		from, to, total, ok := origin.ParseContentRange(resp.Header.Get("Content-Range"))
		if !ok || from != off || to >= off+n || s.validator != "" && (total >= 0 && total != s.size || to != off+n-1) ||
			resp.ContentLength >= 0 && resp.ContentLength != to-from+1 ||
			s.validator == "" && total >= 0 && to != min(n, total)-1 {
			err := api.Errorf(api.Unavailable, "%s: the server answered a request for a part with another range (%.80q)",
				s.name, resp.Header.Get("Content-Range"))
			if s.validator == "" {
				err = errors.Join(origin.ErrRange, err) // the first request: the whole content may work
			}
			return nil, err
		}
		if s.validator != "" && a.validator != "" && a.validator != s.validator {
			return nil, s.errChanged(off)
		}
		a.partial, a.total = true, total
	case code == http.StatusOK:
	case code == http.StatusRequestedRangeNotSatisfiable && n >= 0:
		return nil, api.Errorf(api.Unavailable, "%s: the server has %w from %d on (HTTP %s)", s.name, origin.ErrRange, off,
			resp.Status)
	case code == http.StatusNotFound, code == http.StatusGone:
		return nil, api.Errorf(api.NotFound, "%s: the server does not have it (HTTP %s)", s.name, resp.Status)
	case code == http.StatusUnauthorized, code == http.StatusForbidden, code == http.StatusProxyAuthRequired:
		return nil, api.Errorf(api.Denied, "%s: the server refuses it (HTTP %s): are credentials missing, or wrong?", s.name,
			resp.Status)
	default:
		return nil, api.Errorf(api.Unavailable, "%s: the server answered HTTP %s", s.name, resp.Status)
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return nil, api.Errorf(api.Unsupported, "%s: the server packed the answer (%.40q) though it was asked not to",
			s.name, e)
	}
	return a, nil
}

// errChanged is the error for other content on the server.
func (s *server) errChanged(off int64) error {
	return api.Errorf(api.Unavailable, "%s %w on the server after %d bytes, or it cannot send the rest alone", s.name,
		origin.ErrChanged, off)
}

// explainFailure turns a failed request into a message for the user.
func (s *server) explainFailure(err, cause error) error {
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	if errors.Is(cause, errStart) {
		return api.Errorf(api.Unavailable, "%s: the server sent nothing within %s", s.name, s.opts.Start)
	}
	// *url.Error repeats the address, and so secrets.
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	var ae *api.Error
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	switch {
	case errors.As(err, &cert):
		return api.Errorf(api.Unavailable, "%s: the server's certificate is not trusted (%w): give its authority in the "+
			"image's Secret (%s)", s.name, cert.Err, api.SecretCA)
	case errors.As(err, &ae):
		return api.Errorf(ae.Kind, "%s: %w", s.name, ae)
	case errors.As(err, &dns) && dns.IsNotFound:
		return api.Errorf(api.Unavailable, "%s: host %q has no address", s.name, s.url.Hostname())
	}
	return api.Errorf(api.Unavailable, "%s cannot be reached: %w", s.name, err)
}

// validatorOf returns a strong ETag, or else a date, or "".
func validatorOf(h http.Header) string {
	if tag := h.Get("ETag"); tag != "" && !strings.HasPrefix(tag, "W/") {
		return tag
	}
	return h.Get("Last-Modified")
}

// body is the body of an answer that ends after a silence of the server. The clock runs only during a read, so that a
// slow disk of this node does not count as silence.
type body struct {
	r      io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc

	limit time.Duration // of the current silence
	late  error         // the error after limit
	next  time.Duration // limit after the first byte
}

func (b *body) Read(p []byte) (int, error) {
	timer := time.AfterFunc(b.limit, func() { b.cancel(b.late) })
	n, err := b.r.Read(p)
	timer.Stop()
	if n > 0 {
		b.limit, b.late = b.next, errStall
	}
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := context.Cause(b.ctx); errors.Is(cause, errStart) || errors.Is(cause, errStall) {
			err = cause
		}
	}
	return n, err
}

func (b *body) Close() {
	b.cancel(nil)
	_ = b.r.Close()
}
