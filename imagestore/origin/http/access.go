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

// Access holds the credentials for a server and the demands on its connection.
type Access struct {
	// Username and Password are for basic authentication, Token for a bearer token; at most one kind.
	Username, Password, Token string
	// Header is sent with every request to the named server.
	Header http.Header
	// CA holds certificates (PEM) of further trusted authorities.
	CA []byte
	// Allow accepts addresses outside the public internet; nil: none.
	Allow func(netip.Addr) bool
}

// reservedHeaders are headers that this package sets, or that describe the length of a request.
var reservedHeaders = map[string]bool{"Range": true, "If-Range": true, "Accept-Encoding": true, "Host": true,
	"Content-Length": true, "Transfer-Encoding": true, "Connection": true, "Trailer": true, "Te": true, "Upgrade": true}

// Check refuses credentials that cannot be sent. Messages repeat no value.
func (a *Access) Check() error {
	switch {
	case a.Token != "" && (a.Username != "" || a.Password != ""):
		return api.Errorf(api.Invalid, "both a token and a password are given: the server takes one of them")
	case a.Username == "" && a.Password != "":
		return api.Errorf(api.Invalid, "the credentials have a password and no username")
	case strings.Contains(a.Username, ":"):
		return api.Errorf(api.Invalid, "the username of the credentials has a colon, and cannot be sent")
	case !httpguts.ValidHeaderFieldValue(a.Token):
		return api.Errorf(api.Invalid, "the token holds characters that a header cannot hold")
	}
	for name, values := range a.Header {
		if !httpguts.ValidHeaderFieldName(name) || reservedHeaders[http.CanonicalHeaderKey(name)] {
			return api.Errorf(api.Invalid, "%.80q is no header that can be set", name)
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return api.Errorf(api.Invalid, "the value of header %.80q cannot be sent", name)
			}
		}
	}
	_, err := a.caPool()
	return err
}

// caPool returns the authorities of the system and of CA; nil: of the system alone.
func (a *Access) caPool() (*x509.CertPool, error) {
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

// addCredentials puts the credentials on a request to the named server.
func (a *Access) addCredentials(req *http.Request) {
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

// removeCredentials removes everything that addCredentials set.
func (a *Access) removeCredentials(h http.Header) {
	for name := range a.Header {
		h.Del(name)
	}
	h.Del("Authorization")
}

// newTransport makes the connections of one download, guarded by Allow, through the proxy of the environment.
func (a *Access) newTransport() (*http.Transport, error) {
	tr := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		// The checksum and all lengths count the bytes of the content.
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		TLSHandshakeTimeout:    10 * time.Second,
		IdleConnTimeout:        30 * time.Second,
		MaxIdleConnsPerHost:    maxConnections,
		ReadBufferSize:         64 << 10,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		// HTTP/1.1 alone, so that several ranges use several connections.
		TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	}
	var err error
	if tr.TLSClientConfig.RootCAs, err = a.caPool(); err != nil {
		return nil, err
	}
	origin.GuardTransport(tr, a.Allow)
	return tr, nil
}

// newClient follows redirects. Credentials go to the named server alone, and so does the requested address, which may
// hold credentials.
func (a *Access) newClient(tr *http.Transport) *http.Client {
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
				a.removeCredentials(req.Header)
			}
		}
		return nil
	}}
}

// sameServer reports whether two addresses belong to one server over the same scheme.
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
		return api.Errorf(api.Invalid, "the address names no host")
	}
	return nil
}

// redactURL returns the address without password and query.
func redactURL(u *url.URL) string {
	c := *u
	c.User = nil
	if c.RawQuery != "" {
		c.RawQuery = "..."
	}
	c.Fragment = ""
	return c.String()
}
