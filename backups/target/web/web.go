// Package web has what the stores behind HTTP share: the network settings of a target, secrets that no text shows,
// operations with their deadlines and errors, the check of an answer with the range of an object, and limits around the
// libraries.
//
// The package never reads the environment. It starts no goroutines; the HTTP transport keeps goroutines for
// connections, which end with the request, or with CloseIdleConnections for idle connections.
package web

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpproxy"

	"drover.io/drover/api"
)

// Secret is a string that no format and no log shows.
type Secret string

func (Secret) String() string { return "(secret)" }

// GoString implements fmt.GoStringer.
func (Secret) GoString() string { return "(secret)" }

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte("(secret)"), nil }

// Network says how a store reaches its server.
type Network struct {
	// CA has certificates of further authorities as PEM.
	CA []byte
	// HTTPProxy and HTTPSProxy are URLs, which may have a password, and NoProxy lists hosts to reach directly, as in the
	// environment variables of these names.
	HTTPProxy, HTTPSProxy Secret
	NoProxy               string

	// AnswerTime is how long the server may take to answer a request. Default: a minute.
	AnswerTime time.Duration
}

// answerTime is the default of Network.AnswerTime.
const answerTime = time.Minute

// WithDefaults returns n with the default of each field that has none.
func (n Network) WithDefaults() Network {
	if n.AnswerTime == 0 {
		n.AnswerTime = answerTime
	}
	return n
}

// Transport makes the transport of the store with a name.
func (n Network) Transport(store string) (*http.Transport, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if len(n.CA) > 0 && !roots.AppendCertsFromPEM(n.CA) {
		return nil, api.Errorf(api.Invalid, "certificate of %s: no PEM certificate found", store)
	}
	proxies := httpproxy.Config{HTTPProxy: string(n.HTTPProxy), HTTPSProxy: string(n.HTTPSProxy), NoProxy: n.NoProxy}
	proxyFor := proxies.ProxyFunc()
	return &http.Transport{
		Proxy:                 func(r *http.Request) (*url.URL, error) { return proxyFor(r.URL) },
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		TLSClientConfig:       &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ResponseHeaderTimeout: n.AnswerTime,
		IdleConnTimeout:       time.Minute,
		MaxIdleConnsPerHost:   16,
		DisableCompression:    true, // else the transport unpacks objects
	}, nil
}

// Redact takes secrets, and the passwords of proxies, out of a text of a server or a library.
func (n Network) Redact(text string, secrets ...Secret) string {
	for _, proxy := range []Secret{n.HTTPProxy, n.HTTPSProxy} {
		if u, err := url.Parse(string(proxy)); err != nil {
			secrets = append(secrets, proxy)
		} else if password, has := u.User.Password(); has {
			secrets = append(secrets, Secret(password))
		}
	}
	for _, s := range secrets {
		if s != "" {
			text = strings.ReplaceAll(text, string(s), s.String())
		}
	}
	return text
}

// maxPage bounds the memory for a page of a list, and for an answer with an error.
const maxPage = 64 << 20

// RoundTripper is a transport for libraries. A request ends after the transport has released its body: the HTTP
// transport may read a body after an early answer or an error, libraries rewind the same body for the next try, and
// after Put the memory belongs to the caller. The answer to a request that reads no object is bounded.
type RoundTripper struct{ Next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t RoundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	answer, err := t.sendWhole(req)
	if err == nil && (req.Method != http.MethodGet || req.URL.RawQuery != "" || answer.StatusCode >= 300) {
		answer.Body = readCloser{&limitedReader{answer.Body, maxPage}, answer.Body.Close}
	}
	return answer, err
}

// sendWhole sends a request. The answer's body ends after the request's body is released.
func (t RoundTripper) sendWhole(req *http.Request) (*http.Response, error) {
	if req.Body == nil {
		return t.Next.RoundTrip(req)
	}
	released := make(chan struct{})
	sent := req.Body
	req = req.WithContext(req.Context()) // a copy: a transport must not change its request
	req.Body = readCloser{sent, sync.OnceValue(func() error { defer close(released); return sent.Close() })}
	answer, err := t.Next.RoundTrip(req)
	if err != nil {
		<-released
		return nil, err
	}
	got := answer.Body
	answer.Body = readCloser{got, func() error { defer func() { <-released }(); return got.Close() }}
	return answer, nil
}

type readCloser struct {
	io.Reader
	closeBody func() error
}

func (r readCloser) Close() error { return r.closeBody() }

// limitedReader reads at most left bytes of a longer body, then fails.
type limitedReader struct {
	body io.Reader
	left int
}

var errTooLong = errors.New("the answer of the server is too long")

func (r *limitedReader) Read(p []byte) (int, error) {
	if r.left <= 0 {
		return 0, errTooLong
	}
	n, err := r.body.Read(p[:min(len(p), r.left)])
	r.left -= n
	return n, err
}
