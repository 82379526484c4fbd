package http

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Access is what a server asks of who fetches an image from it, and what is asked of the server.
type Access struct {
	// Username and Password are for basic authentication, Token for that by bearer; at most one of both.
	Username, Password, Token string
	// Header is sent with every request to the server that the user named.
	Header http.Header
	// CA holds certificates (PEM) that are trusted besides those of the system.
	CA []byte
	// Allow names the addresses outside the public internet that may be connected to; nil: none.
	Allow func(netip.Addr) bool
}

// ours are headers that this package sets, or that say how long a request is.
var ours = map[string]bool{"Range": true, "If-Range": true, "Accept-Encoding": true, "Host": true,
	"Content-Length": true, "Transfer-Encoding": true, "Connection": true, "Trailer": true, "Te": true, "Upgrade": true}

// Check refuses what cannot be sent. No message repeats a value.
func (a *Access) Check() error {
	switch {
	case a.Token != "" && (a.Username != "" || a.Password != ""):
		return api.Errorf(api.Invalid, "both a token and a password are given: the server takes one of them")
	case a.Username == "" && a.Password != "":
		return api.Errorf(api.Invalid, "a password without a username")
	case strings.Contains(a.Username, ":"):
		return api.Errorf(api.Invalid, "a username with a colon in it cannot be sent")
	case !httpguts.ValidHeaderFieldValue(a.Token):
		return api.Errorf(api.Invalid, "the token holds characters that a header cannot hold")
	}
	for name, values := range a.Header {
		if !httpguts.ValidHeaderFieldName(name) || ours[http.CanonicalHeaderKey(name)] {
			return api.Errorf(api.Invalid, "%.80q is no header that can be set", name)
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return api.Errorf(api.Invalid, "the value of header %.80q cannot be sent", name)
			}
		}
	}
	_, err := a.authorities()
	return err
}

// authorities are the system's and those of CA; nil: the system's alone.
func (a *Access) authorities() (*x509.CertPool, error) {
	if len(a.CA) == 0 {
		return nil, nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(a.CA) {
		return nil, api.Errorf(api.Invalid, "%s holds no certificate in PEM form", api.SecretCA)
	}
	return pool, nil
}

// apply puts the credentials on a request to the server that the user named.
func (a *Access) apply(req *http.Request) {
	for name, values := range a.Header {
		req.Header[http.CanonicalHeaderKey(name)] = values
	}
	switch {
	case a.Token != "":
		req.Header.Set("Authorization", "Bearer "+a.Token)
	case a.Username != "":
		req.Header.Set("Authorization",
			"Basic "+base64.StdEncoding.EncodeToString([]byte(a.Username+":"+a.Password)))
	}
}

// strip takes all that apply put on away.
func (a *Access) strip(h http.Header) {
	for name := range a.Header {
		h.Del(name)
	}
	h.Del("Authorization")
}

// transport makes connections of one download: to where Allow lets it, through the proxy of the environment.
func (a *Access) transport() (*http.Transport, error) {
	tr := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		// The bytes as they are: the checksum is over what the user knows, and lengths must count them.
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		TLSHandshakeTimeout:    10 * time.Second,
		IdleConnTimeout:        30 * time.Second,
		MaxIdleConnsPerHost:    maxConnections,
		ReadBufferSize:         64 << 10,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		// HTTP/1.1 alone: several ranges at once are to come over several connections.
		TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	}
	var err error
	if tr.TLSClientConfig.RootCAs, err = a.authorities(); err != nil {
		return nil, err
	}
	origin.GuardTransport(tr, a.Allow)
	return tr, nil
}

// client follows redirects. Credentials go to the server that the user named and to no other; nor does the address
// that was asked, which may hold some.
func (a *Access) client(tr *http.Transport) *http.Client {
	return &http.Client{Transport: tr, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return api.Errorf(api.Invalid, "the server redirects more than 10 times")
		}
		if err := checkScheme(req.URL); err != nil {
			return err
		}
		req.Header.Del("Referer")
		for _, v := range append(via[1:len(via):len(via)], req) {
			if !sameServer(v.URL, via[0].URL) {
				a.strip(req.Header)
			}
		}
		return nil
	}}
}

// sameServer reports whether both addresses are of one server, and reached as safely.
func sameServer(a, b *url.URL) bool {
	port := func(u *url.URL) string {
		if p := u.Port(); p != "" {
			return p
		}
		return map[string]string{"http": "80", "https": "443"}[strings.ToLower(u.Scheme)]
	}
	return strings.EqualFold(a.Scheme, b.Scheme) && strings.EqualFold(a.Hostname(), b.Hostname()) && port(a) == port(b)
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
