package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// client speaks with the repository of one image.
type client struct {
	name string // for messages
	repo name.Repository
	opts Options
	http *http.Client    // authenticates
	base *http.Transport // below all of it
}

// connect asks the registry how it wants to be spoken to, and for a token where it wants one.
func connect(ctx context.Context, ref string, parsed name.Reference, opts Options) (*client, error) {
	c := &client{name: ref, repo: parsed.Context(), opts: opts}
	auth := authn.Anonymous
	if opts.Username != "" || opts.Password != "" {
		if opts.Username == "" || opts.Password == "" {
			return nil, api.Errorf(api.Invalid, "%s: credentials are a username and a password", ref)
		}
		auth = authn.FromConfig(authn.AuthConfig{Username: opts.Username, Password: opts.Password})
	}
	c.base = http.DefaultTransport.(*http.Transport).Clone()
	// The bytes as they are: digests and lengths count them.
	c.base.DisableCompression = true
	c.base.MaxResponseHeaderBytes = 64 << 10
	origin.GuardTransport(c.base, opts.Allow)
	if len(opts.CA) > 0 {
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(opts.CA) {
			return nil, api.Errorf(api.Invalid, "%s: the CA holds no certificate in PEM form", ref)
		}
		c.base.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	rt, err := transport.NewWithContext(ctx, c.repo.Registry, auth,
		transport.NewUserAgent(&patient{base: c.base, opts: opts}, "drover"),
		[]string{c.repo.Scope(transport.PullScope)})
	if err != nil {
		c.close()
		return nil, c.failed(ctx, err)
	}
	c.http = &http.Client{Transport: rt, CheckRedirect: func(_ *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return api.Errorf(api.Invalid, "the registry redirects more than 10 times")
		}
		return nil // where to is looked at by patient, as for every request
	}}
	return c, nil
}

func (c *client) close() { c.base.CloseIdleConnections() }

// get asks for something below the repository; the answer's status is any.
func (c *client) get(ctx context.Context, path string, header http.Header) (*http.Response, error) {
	u := url.URL{Scheme: c.repo.Scheme(), Host: c.repo.RegistryStr(),
		Path: "/v2/" + c.repo.RepositoryStr() + "/" + path}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, api.Errorf(api.Invalid, "%s: it makes no address", c.name)
	}
	req.Header = header
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.failed(ctx, err)
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		_ = resp.Body.Close()
		return nil, api.Errorf(api.Unsupported, "%s: the registry packed the answer (%s) though it was asked not to",
			c.name, clip(e))
	}
	return resp, nil
}

// failed turns an error of a request into a message for the user, without addresses that may hold a signature.
func (c *client) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var ae *api.Error
	var te *transport.Error
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	var plain *plainError
	var op *net.OpError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &cert):
		return api.Errorf(api.Unavailable, "%s: the registry's certificate is not trusted (%s): give its authority in the "+
			"image's Secret (%s)", c.name, clip(cert.Err.Error()), api.SecretCA)
	case errors.As(err, &te):
		return c.refused(te.StatusCode, "")
	case errors.As(err, &ae):
		return api.Errorf(ae.Kind, "%s: %w", c.name, ae)
	case errors.As(err, &dns) && dns.IsNotFound:
		return api.Errorf(api.Unavailable, "%s: host %q has no address", c.name, clip(dns.Name))
	case errors.As(err, &op):
		// The library asks some hosts over both https and http: that nobody is there counts more than a refused http.
		return api.Errorf(api.Unavailable, "%s cannot be reached: %s", c.name, clip(op.Error()))
	case errors.As(err, &plain):
		return api.Errorf(api.Denied, "%s: %w", c.name, plain)
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, &record):
		return api.Errorf(api.Denied, "%s: the registry does not speak TLS, and plain http is refused: everybody on the "+
			"way could change the image; the parameter plainHTTP allows it", c.name)
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	return api.Errorf(api.Unavailable, "%s cannot be reached: %s", c.name, clip(err.Error()))
}

// refused is the error of an answer that is not the wanted one. what is missing where it is missing.
func (c *client) refused(status int, what string) error {
	how := "HTTP " + strconv.Itoa(status) + " " + http.StatusText(status)
	switch status {
	case http.StatusNotFound, http.StatusGone:
		if what == "" {
			what = "it"
		}
		return api.Errorf(api.NotFound, "%s: the registry does not have %s (%s)", c.name, what, how)
	case http.StatusUnauthorized, http.StatusForbidden:
		if c.opts.Username == "" {
			return api.Errorf(api.Denied, "%s: the registry wants credentials, or there is no such repository (%s)", c.name,
				how)
		}
		return api.Errorf(api.Denied, "%s: the registry refuses these credentials (%s)", c.name, how)
	}
	return api.Errorf(api.Unavailable, "%s: the registry answered %s", c.name, how)
}

// patient carries every request there is: to the registry, its token service, and where they redirect to. It refuses
// plain http, waits where it is told to wait, and does not wait where nothing comes.
type patient struct {
	base http.RoundTripper
	opts Options
}

// RoundTrip is that of http.RoundTripper. Only requests without a body are sent again. Who is still busy then has not
// answered: it is an error, since only that tells the importer when to come again.
func (p *patient) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := p.check(req.URL); err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		resp, err := p.once(req)
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
			return nil, api.Errorf(api.Unavailable, "%s is %w", clip(req.URL.Host), busy)
		}
		if err := pause(req.Context(), wait); err != nil {
			return nil, err
		}
	}
}

// check refuses what is not to be asked at all.
func (p *patient) check(u *url.URL) error {
	switch {
	case u.Scheme == "https":
	case u.Scheme != "http":
		return api.Errorf(api.Invalid, "the registry leads to a %q address: only https and http are spoken", clip(u.Scheme))
	case !p.opts.PlainHTTP && !loopback(u.Host):
		return &plainError{host: clip(u.Host)}
	}
	return nil
}

// plainError says that something is to be had without TLS alone.
type plainError struct{ host string }

func (e *plainError) Error() string {
	return "plain http to " + e.host + " is refused: everybody on the way could change the image; the parameter " +
		"plainHTTP allows it"
}

// once sends a request, and gives the other side Start for its first byte.
func (p *patient) once(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	late := api.Errorf(api.Unavailable, "%s sent nothing within %s", clip(req.URL.Host), p.opts.Start)
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
	resp.Body = &watched{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, limit: p.opts.Start, late: late,
		next: p.opts.Stall, silent: api.Errorf(api.Unavailable, "%s was silent for %s", clip(req.URL.Host), p.opts.Stall)}
	return resp, nil
}

// watched is the body of an answer that ends when the other side is silent for too long. The clock runs only while
// the other side is waited for: a slow disk of ours is not its silence.
type watched struct {
	io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc

	limit, next  time.Duration // now, and after the first byte
	late, silent error         // what it is called then
}

func (w *watched) Read(p []byte) (int, error) {
	timer := time.AfterFunc(w.limit, func() { w.cancel(w.late) })
	n, err := w.ReadCloser.Read(p)
	timer.Stop()
	if n > 0 {
		w.limit, w.late = w.next, w.silent
	}
	if err != nil && !errors.Is(err, io.EOF) {
		var ae *api.Error
		if errors.As(context.Cause(w.ctx), &ae) {
			err = ae
		}
	}
	return n, err
}

func (w *watched) Close() error {
	w.cancel(nil)
	return w.ReadCloser.Close()
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
