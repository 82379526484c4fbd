package s3

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
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

// Addressing says where a request names the bucket.
type Addressing int

// The ways to name the bucket.
const (
	Auto          Addressing = iota // VirtualHosted for the large public clouds, else Path
	Path                            // https://host/bucket/object
	VirtualHosted                   // https://bucket.host/object
)

func (a Addressing) lookup() minio.BucketLookupType {
	return map[Addressing]minio.BucketLookupType{
		Path: minio.BucketLookupPath, VirtualHosted: minio.BucketLookupDNS,
	}[a]
}

// Config says where a store is. The package never reads the environment.
type Config struct {
	Endpoint   string // URL of the server, such as https://minio.example:9000; empty: Amazon's
	Region     string // empty: the server tells the region
	Bucket     string
	Prefix     string // of all objects, without slashes at the ends; empty: the whole bucket
	Addressing Addressing

	AccessKey, SecretKey, SessionToken Secret

	// CA has certificates of further authorities as PEM.
	CA []byte
	// HTTPProxy and HTTPSProxy are URLs, which may have a password, and NoProxy lists hosts to reach directly, as in the
	// environment variables of these names.
	HTTPProxy, HTTPSProxy Secret
	NoProxy               string

	// AnswerTime is how long the server may take to answer a request. Default: a minute.
	AnswerTime time.Duration
}

// endpoint is the host of the server, and whether the store uses TLS.
func (c Config) endpoint() (host string, secure bool, err error) {
	if c.Endpoint == "" {
		return "s3.amazonaws.com", true, nil
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" ||
		u.Scheme != "http" && u.Scheme != "https" {
		return "", false, api.Errorf(api.Invalid, "S3 endpoint of bucket %s: not a URL like https://host:port without user "+
			"and path", c.Bucket)
	}
	return u.Host, u.Scheme == "https", nil
}

// redact takes the secrets out of a text of a server or a library.
func (c Config) redact(text string) string {
	secrets := []string{string(c.SecretKey), string(c.SessionToken)}
	for _, proxy := range []Secret{c.HTTPProxy, c.HTTPSProxy} {
		if u, err := url.Parse(string(proxy)); err != nil {
			secrets = append(secrets, string(proxy))
		} else if password, has := u.User.Password(); has {
			secrets = append(secrets, password)
		}
	}
	for _, s := range secrets {
		if s != "" {
			text = strings.ReplaceAll(text, s, Secret("").String())
		}
	}
	return text
}

func newTransport(c Config) (*http.Transport, error) {
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if len(c.CA) > 0 && !roots.AppendCertsFromPEM(c.CA) {
		return nil, api.Errorf(api.Invalid, "certificate of bucket %s: no PEM certificate found", c.Bucket)
	}
	proxies := httpproxy.Config{HTTPProxy: string(c.HTTPProxy), HTTPSProxy: string(c.HTTPSProxy), NoProxy: c.NoProxy}
	proxyFor := proxies.ProxyFunc()
	return &http.Transport{
		Proxy:                 func(r *http.Request) (*url.URL, error) { return proxyFor(r.URL) },
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		TLSClientConfig:       &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ResponseHeaderTimeout: c.AnswerTime,
		IdleConnTimeout:       time.Minute,
		MaxIdleConnsPerHost:   16,
		DisableCompression:    true, // else the transport unpacks objects
	}, nil
}
