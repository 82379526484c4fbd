package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"drover.io/drover/api"
)

// DownloadOptions tune a download; the zero value is what the product uses.
type DownloadOptions struct {
	// Start is how long the server may take until its first byte; 30 s.
	Start time.Duration
	// Stall is how long the server may be silent in the middle; 60 s. Then the connection counts as cut.
	Stall time.Duration
	// Resumes is how many cuts in a row, without a byte between them, are healed by asking for the rest; 5.
	Resumes int
	// Pause before a resume; doubles with each cut in a row. 500 ms.
	Pause time.Duration
	// Client carries the requests; nil: one that knows the proxy of the environment and unpacks nothing.
	Client *http.Client
	// Resumed is told of every resume, for the log. May be nil.
	Resumed func(off int64, cause error)

	inner func(netip.Addr) bool // for tests; nil: inner
}

// fence keeps a download that began at a public address away from what only this node can reach: services on it and in
// its network, the cloud's metadata. A server outside may redirect there, or its name may lead there the second time.
// An address inside that the user gave is the user's choice.
type fence struct {
	inner func(netip.Addr) bool

	mu     sync.Mutex
	began  bool
	inside bool // it began inside
}

// pass is asked before every connection.
func (f *fence) pass(_, address string, _ syscall.RawConn) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return api.Errorf(api.Invalid, "address %q cannot be read", address)
	}
	inner := f.inner(at.Addr().Unmap())
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.began {
		f.began, f.inside = true, inner
	}
	if inner && !f.inside {
		return api.Errorf(api.Denied, "it leads from a public address to %s, which is one inside: not followed", at.Addr())
	}
	return nil
}

// inner reports whether an address is not one of the public internet.
func inner(a netip.Addr) bool {
	return !a.IsGlobalUnicast() || a.IsPrivate() || shared.Contains(a)
}

var shared = netip.MustParsePrefix("100.64.0.0/10") // of carriers and of clusters

func (o DownloadOptions) withDefaults() DownloadOptions {
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
	if o.Client == nil {
		tr := http.DefaultTransport.(*http.Transport).Clone()
		// The bytes as they are: the checksum is over what the user knows, and lengths must count them.
		tr.DisableCompression = true
		// One image, one connection: nothing stays open afterwards.
		tr.DisableKeepAlives = true
		tr.MaxResponseHeaderBytes = 64 << 10
		f := &fence{inner: o.inner}
		if f.inner == nil {
			f.inner = inner
		}
		tr.DialContext = (&net.Dialer{Timeout: 30 * time.Second, Control: f.pass}).DialContext
		o.Client = &http.Client{Transport: tr}
	}
	client := *o.Client
	client.CheckRedirect = func(req *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return api.Errorf(api.Invalid, "the server redirects more than 10 times")
		}
		return checkScheme(req.URL)
	}
	o.Client = &client
	return o
}

func checkScheme(u *url.URL) error {
	if s := strings.ToLower(u.Scheme); s != "http" && s != "https" {
		return api.Errorf(api.Invalid, "scheme %q is not supported: use http or https", u.Scheme)
	}
	if u.Host == "" {
		return api.Errorf(api.Invalid, "no host in the address")
	}
	return nil
}

// Download opens an http or https address. It returns once the server agreed to send it, or an error that says why not. A connection that is cut later is continued where it stopped, if the server serves ranges and names the
// content by an ETag or a date; otherwise Read fails and says how far it came.
func Download(ctx context.Context, address string, opts DownloadOptions) (*Stream, error) {
	u, err := url.Parse(address)
	if err != nil {
		// The error of Parse repeats the address, and with it a password.
		return nil, api.Errorf(api.Invalid, "the url cannot be read: is it complete, and are special characters escaped?")
	}
	name := redact(u)
	if err := checkScheme(u); err != nil {
		return nil, api.Errorf(api.KindOf(err), "%s: %w", name, err)
	}
	d := &download{ctx: ctx, url: u, name: name, opts: opts.withDefaults(), size: -1}
	if err := d.open(0); err != nil {
		return nil, err
	}
	return &Stream{ReadCloser: d, Size: d.size, Name: name}, nil
}

// redact is the address without what may be secret: password and query.
func redact(u *url.URL) string {
	c := *u
	c.User = nil
	if c.RawQuery != "" {
		c.RawQuery = "..."
	}
	c.Fragment = ""
	return c.String()
}

// download is the body of one address over any number of connections. Owner: the goroutine that reads.
type download struct {
	ctx  context.Context
	url  *url.URL
	name string
	opts DownloadOptions

	size      int64  // -1: not known
	off       int64  // next byte
	validator string // strong ETag or date that names the content
	ranges    bool   // the server said that it serves ranges

	body   io.ReadCloser
	cancel context.CancelCauseFunc // ends the current request
	req    context.Context         // the current request's
	cuts   int                     // in a row
	err    error                   // final
}

var errStart = errors.New("no answer in time")
var errStall = errors.New("silent for too long")

// open sends a request for everything from off on.
func (d *download) open(off int64) error {
	ctx, cancel := context.WithCancelCause(d.ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.url.String(), nil)
	if err != nil {
		cancel(nil)
		return api.Errorf(api.Invalid, "%s: the url cannot be used", d.name)
	}
	req.Header.Set("User-Agent", "drover")
	req.Header.Set("Accept-Encoding", "identity")
	if off > 0 {
		req.Header.Set("Range", "bytes="+strconv.FormatInt(off, 10)+"-")
		req.Header.Set("If-Range", d.validator)
	}
	timer := time.AfterFunc(d.opts.Start, func() { cancel(errStart) })
	drop := func(resp *http.Response) {
		timer.Stop()
		cancel(nil)
		if resp != nil {
			_ = resp.Body.Close()
		}
	}
	resp, err := d.opts.Client.Do(req)
	if err != nil {
		cause := context.Cause(ctx)
		drop(nil)
		return d.unreachable(err, cause)
	}
	if err := d.accept(resp, off); err != nil {
		drop(resp)
		return err
	}
	timer.Stop()
	d.body, d.req, d.cancel = resp.Body, ctx, cancel
	return nil
}

// unreachable turns a failed request into a message for the user.
func (d *download) unreachable(err, cause error) error {
	if d.ctx.Err() != nil {
		return d.ctx.Err()
	}
	if errors.Is(cause, errStart) {
		return api.Errorf(api.Unavailable, "%s: the server sent nothing within %s", d.name, d.opts.Start)
	}
	// *url.Error repeats the address, and with it secrets.
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	var ae *api.Error
	var dns *net.DNSError
	switch {
	case errors.As(err, &ae):
		return api.Errorf(ae.Kind, "%s: %w", d.name, err)
	case errors.As(err, &dns) && dns.IsNotFound:
		return api.Errorf(api.Unavailable, "%s: host %q has no address", d.name, d.url.Hostname())
	}
	return api.Errorf(api.Unavailable, "%s cannot be reached: %w", d.name, err)
}

// accept looks at the head of an answer.
func (d *download) accept(resp *http.Response, off int64) error {
	switch {
	case off > 0 && resp.StatusCode == http.StatusPartialContent:
		from, total, ok := parseContentRange(resp.Header.Get("Content-Range"))
		if !ok || from != off || d.size >= 0 && total >= 0 && total != d.size {
			return api.Errorf(api.Unavailable, "%s: the server answered a request for the rest with another range (%q)",
				d.name, resp.Header.Get("Content-Range"))
		}
		if v := validator(resp.Header); v != "" && v != d.validator {
			return api.Errorf(api.Unavailable, "%s changed on the server after %d bytes", d.name, off)
		}
		return nil
	case off > 0 && resp.StatusCode == http.StatusOK:
		return api.Errorf(api.Unavailable, "%s changed on the server after %d bytes, or it cannot send the rest alone",
			d.name, off)
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode == http.StatusNotFound, resp.StatusCode == http.StatusGone:
		return api.Errorf(api.NotFound, "%s: the server does not have it (HTTP %s)", d.name, resp.Status)
	case resp.StatusCode == http.StatusUnauthorized, resp.StatusCode == http.StatusForbidden:
		return api.Errorf(api.Denied, "%s: the server refuses it (HTTP %s)", d.name, resp.Status)
	default:
		return api.Errorf(api.Unavailable, "%s: the server answered HTTP %s", d.name, resp.Status)
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return api.Errorf(api.Unsupported, "%s: the server packed the answer (%s) though it was asked not to", d.name, e)
	}
	d.size = resp.ContentLength
	d.ranges = strings.EqualFold(resp.Header.Get("Accept-Ranges"), "bytes")
	d.validator = validator(resp.Header)
	return nil
}

// validator is a strong ETag, or else a date, or nothing.
func validator(h http.Header) string {
	if tag := h.Get("ETag"); tag != "" && !strings.HasPrefix(tag, "W/") {
		return tag
	}
	return h.Get("Last-Modified")
}

// parseContentRange reads "bytes 5-9/10"; total is -1 for "*".
func parseContentRange(s string) (from, total int64, ok bool) {
	rest, found := strings.CutPrefix(s, "bytes ")
	span, all, slash := strings.Cut(rest, "/")
	first, _, dash := strings.Cut(span, "-")
	if !found || !slash || !dash {
		return 0, 0, false
	}
	from, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		return 0, 0, false
	}
	if all == "*" {
		return from, -1, true
	}
	total, err = strconv.ParseInt(all, 10, 64)
	return from, total, err == nil
}

// Read gives the next bytes, over a new connection where the old one was cut.
func (d *download) Read(p []byte) (int, error) {
	for d.err == nil {
		limit, silent := d.opts.Stall, errStall
		if d.off == 0 {
			limit, silent = d.opts.Start, errStart
		}
		// The clock runs only while the server is waited for: a slow disk of ours is not its silence.
		cancel := d.cancel
		timer := time.AfterFunc(limit, func() { cancel(silent) })
		n, err := d.body.Read(p)
		timer.Stop()
		d.off += int64(n)
		if n > 0 {
			d.cuts = 0
			return n, nil // an error that came with bytes comes again with the next Read
		}
		switch {
		case err == nil:
			return 0, nil
		case errors.Is(err, io.EOF) && (d.size < 0 || d.off == d.size):
			d.drop()
			d.err = io.EOF
		default:
			d.err = d.resume(err)
		}
	}
	return 0, d.err
}

// resume opens the rest after a cut, or says why that is not possible.
func (d *download) resume(err error) error {
	cause := context.Cause(d.req)
	d.drop()
	if d.ctx.Err() != nil {
		return d.ctx.Err()
	}
	if errors.Is(cause, errStart) {
		return d.unreachable(err, cause)
	}
	what := "the connection was cut"
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		what = "the server ended the transfer early"
	}
	if errors.Is(cause, errStall) {
		what = fmt.Sprintf("the server was silent for %s", d.opts.Stall)
	}
	broken := func(why string) error {
		of := ""
		if d.size >= 0 {
			of = fmt.Sprintf(" of %d", d.size)
		}
		return api.Errorf(api.Unavailable, "%s: %s after %d%s bytes%s", d.name, what, d.off, of, why)
	}
	if !d.ranges || d.validator == "" || d.size < 0 {
		return broken(", and it cannot send the rest alone")
	}
	for ; d.cuts < d.opts.Resumes; d.cuts++ {
		if d.opts.Resumed != nil {
			d.opts.Resumed(d.off, err)
		}
		if err := pause(d.ctx, d.opts.Pause<<d.cuts); err != nil {
			return err
		}
		oerr := d.open(d.off)
		if oerr == nil {
			d.cuts++
			return nil
		}
		if d.ctx.Err() != nil {
			return d.ctx.Err()
		}
		if !api.Is(oerr, api.Unavailable) {
			return oerr
		}
		err = oerr
	}
	return broken(fmt.Sprintf("; %d tries to get the rest failed, the last: %v", d.opts.Resumes, err))
}

// pause waits, unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// drop ends the current request.
func (d *download) drop() {
	if d.body == nil {
		return
	}
	d.cancel(nil)
	_ = d.body.Close()
	d.body = nil
}

// Close ends the transfer.
func (d *download) Close() error {
	d.drop()
	if d.err == nil {
		d.err = api.Errorf(api.Unavailable, "%s: closed", d.name)
	}
	return nil
}
