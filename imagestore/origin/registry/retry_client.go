package registry

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// maxRedirects bounds the redirects of one request.
const maxRedirects = 10

// retryTransport carries every request: to the registry, to its token service, and to the targets of redirects. It
// refuses plain http, bounds redirects and silence, and waits for a busy server as long as the server asks.
type retryTransport struct {
	base http.RoundTripper
	opts Options
}

// RoundTrip implements http.RoundTripper. It repeats requests without a body only. A server that stays busy is an
// error, which carries the pause that the server asked for to the importer.
func (p *retryTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := p.checkRequest(req); err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		resp, err := p.sendTimed(req)
		if err != nil {
			return nil, err
		}
		busy := origin.Busy(resp)
		if busy == nil {
			return resp, nil
		}
		_ = resp.Body.Close()
		wait, short := busy.Pause(p.opts.Pause << try)
		if !short || try >= p.opts.Resumes || req.Body != nil {
			return nil, api.Errorf(api.Unavailable, "%s is %w", clipText(req.URL.Host), busy)
		}
		if err := origin.Pause(req.Context(), wait); err != nil {
			return nil, err
		}
	}
}

// checkRequest refuses forbidden addresses and endless redirects.
func (p *retryTransport) checkRequest(req *http.Request) error {
	hops := 0
	for via := req.Response; via != nil && via.Request != nil; via = via.Request.Response {
		if hops++; hops >= maxRedirects {
			return api.Errorf(api.Invalid, "the registry redirects more than %d times", maxRedirects)
		}
	}
	return p.checkURL(req.URL)
}

func (p *retryTransport) checkURL(u *url.URL) error {
	switch {
	case u.Scheme == "https":
	case u.Scheme != "http":
		return api.Errorf(api.Invalid, "the registry leads to a %q address: only https and http are spoken",
			clipText(u.Scheme))
	case !p.opts.PlainHTTP && !isLoopback(u.Host):
		return &plainError{host: clipText(u.Host)}
	}
	return nil
}

// plainError refuses an address without TLS.
type plainError struct{ host string }

func (e *plainError) Error() string {
	return "plain http to " + e.host + " is refused: other machines could change the image; the parameter plainHTTP " +
		"allows it"
}

// sendTimed sends a request; the other side has Start until its first byte.
func (p *retryTransport) sendTimed(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	late := api.Errorf(api.Unavailable, "%s sent nothing within %s", clipText(req.URL.Host), p.opts.Start)
	timer := time.AfterFunc(p.opts.Start, func() { cancel(late) })
	defer timer.Stop()
	resp, err := p.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		if errors.Is(context.Cause(ctx), late) {
			err = late
		}
		cancel(nil)
		return nil, err
	}
	resp.Body = &timedBody{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, limit: p.opts.Start, late: late,
		next: p.opts.Stall, silent: api.Errorf(api.Unavailable, "%s was silent for %s", clipText(req.URL.Host), p.opts.Stall)}
	return resp, nil
}

// timedBody is the body of an answer that ends after a silence of the other side. The clock runs only during a read, so
// that a slow disk of this node does not count as silence.
type timedBody struct {
	io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc

	limit, next  time.Duration // now, and after the first byte
	late, silent error         // the errors for both
}

func (b *timedBody) Read(p []byte) (int, error) {
	timer := time.AfterFunc(b.limit, func() { b.cancel(b.late) })
	n, err := b.ReadCloser.Read(p)
	timer.Stop()
	if n > 0 {
		b.limit, b.late = b.next, b.silent
	}
	if err != nil && !errors.Is(err, io.EOF) {
		var ae *api.Error
		if errors.As(context.Cause(b.ctx), &ae) {
			err = ae
		}
	}
	return n, err
}

func (b *timedBody) Close() error {
	b.cancel(nil)
	return b.ReadCloser.Close()
}
