package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// client talks to the repository of one image. The library authenticates, renews tokens and fetches manifests; below
// the library, retryTransport and manifestGuard hold the limits of this package for every request.
type client struct {
	name string // for messages
	repo name.Repository
	opts Options
	http *http.Client    // authenticates
	base *http.Transport // the connections
}

// connectRegistry asks the registry for its kind of authentication, and for a token if the registry wants a token.
func connectRegistry(ctx context.Context, ref string, parsed name.Reference, opts Options) (*client, error) {
	c := &client{name: ref, repo: parsed.Context(), opts: opts}
	auth := authn.Anonymous
	if opts.Username != "" || opts.Password != "" {
		if opts.Username == "" || opts.Password == "" {
			return nil, api.Errorf(api.Invalid, "%s: credentials are a username and a password", ref)
		}
		auth = authn.FromConfig(authn.AuthConfig{Username: opts.Username, Password: opts.Password})
	}
	c.base = http.DefaultTransport.(*http.Transport).Clone()
	c.base.DisableCompression = true // digests and lengths count the bytes of the content
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
	guarded := &manifestGuard{base: &retryTransport{base: c.base, opts: opts}}
	rt, err := transport.NewWithContext(ctx, c.repo.Registry, auth, transport.NewUserAgent(guarded, "drover"),
		[]string{c.repo.Scope(transport.PullScope)})
	if err != nil {
		c.close()
		return nil, c.explainFailure(ctx, err)
	}
	// retryTransport bounds redirects, for the library's client as well, which follows them without end.
	c.http = &http.Client{Transport: rt, CheckRedirect: func(*http.Request, []*http.Request) error { return nil }}
	return c, nil
}

func (c *client) close() { c.base.CloseIdleConnections() }

// getBlob requests a blob of the repository; the answer can have any status.
func (c *client) getBlob(ctx context.Context, digest string, header http.Header) (*http.Response, error) {
	u := url.URL{Scheme: c.repo.Scheme(), Host: c.repo.RegistryStr(),
		Path: "/v2/" + c.repo.RepositoryStr() + "/blobs/" + digest}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, api.Errorf(api.Invalid, "%s: no address of layer %s", c.name, clipText(digest))
	}
	req.Header = header
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explainFailure(ctx, err)
	}
	if err := checkEncoding(resp); err != nil {
		_ = resp.Body.Close()
		return nil, api.Errorf(api.KindOf(err), "%s: %w", c.name, err)
	}
	return resp, nil
}

// explainFailure turns an error of a request into a message for the user, without addresses that may hold a signature.
func (c *client) explainFailure(ctx context.Context, err error) error {
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
			"image's Secret (%s)", c.name, clipText(cert.Err.Error()), api.SecretCA)
	case errors.As(err, &te):
		return c.statusError(te.StatusCode, "")
	case errors.As(err, &ae):
		return api.Errorf(ae.Kind, "%s: %w", c.name, ae)
	case errors.As(err, &dns) && dns.IsNotFound:
		return api.Errorf(api.Unavailable, "%s: host %q has no address", c.name, clipText(dns.Name))
	case errors.As(err, &op):
		// The library asks some hosts over both https and http: a refused connection counts more than refused http.
		return api.Errorf(api.Unavailable, "%s cannot be reached: %s", c.name, clipText(op.Error()))
	case errors.As(err, &plain):
		return api.Errorf(api.Denied, "%s: %w", c.name, plain)
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, &record):
		return api.Errorf(api.Denied, "%s: the registry does not speak TLS, and Drover refuses plain http, which lets "+
			"other machines change the image; the parameter plainHTTP allows it", c.name)
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	return api.Errorf(api.Unavailable, "%s cannot be reached: %s", c.name, clipText(err.Error()))
}

// statusError is the error for the status of an answer; what names the missing object.
func (c *client) statusError(status int, what string) error {
	how := "HTTP " + strconv.Itoa(status) + " " + http.StatusText(status)
	switch status {
	case http.StatusNotFound, http.StatusGone:
		if what == "" {
			what = "it"
		}
		return api.Errorf(api.NotFound, "%s: the registry does not have %s (%s)", c.name, what, how)
	case http.StatusUnauthorized, http.StatusForbidden:
		if c.opts.Username == "" {
			return api.Errorf(api.Denied, "%s: the registry wants credentials, or has no such repository (%s)", c.name,
				how)
		}
		return api.Errorf(api.Denied, "%s: the registry refuses these credentials (%s)", c.name, how)
	}
	return api.Errorf(api.Unavailable, "%s: the registry answered %s", c.name, how)
}
