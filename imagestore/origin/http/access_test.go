package http

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
)

// wants serves body to requests accepted by right.
func wants(t *testing.T, body []byte, right func(r *http.Request) bool) string {
	t.Helper()
	url, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if !right(r) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		some(w, r, body, -1)
	})
	return url
}

func TestDownloadWithCredentials(t *testing.T) {
	body := content(300_000)
	basic := func(r *http.Request) bool {
		u, p, ok := r.BasicAuth()
		return ok && u == "me" && p == "pass:word é"
	}
	bearer := func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer tok-1" }
	header := func(r *http.Request) bool { return r.Header.Get("X-Api-Key") == "key-1" }
	for _, c := range []struct {
		name   string
		right  func(*http.Request) bool
		access Access
		ok     bool
	}{
		{"basic", basic, Access{Username: "me", Password: "pass:word é"}, true},
		{"wrong password", basic, Access{Username: "me", Password: "secret"}, false},
		{"bearer", bearer, Access{Token: "tok-1"}, true},
		{"wrong token", bearer, Access{Token: "secret"}, false},
		{"header", header, Access{Header: http.Header{"x-api-key": {"key-1"}}}, true},
		{"none", bearer, Access{}, false},
	} {
		o := quick
		o.RangeSize = 64 << 10 // every range needs credentials
		o.Access = c.access
		o.Allow = anywhere
		got, _, err := fetch(t, wants(t, body, c.right), o)
		if c.ok && (err != nil || !bytes.Equal(got, body)) {
			t.Errorf("%s: %d bytes: %v", c.name, len(got), err)
		}
		if !c.ok && (!api.Is(err, api.Denied) || !strings.Contains(err.Error(), "credentials") ||
			strings.Contains(err.Error(), "secret")) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestAccessThatCannotBeSent(t *testing.T) {
	for _, c := range []struct {
		access Access
		text   string
	}{
		{Access{Token: "secret", Username: "me"}, "both a token and a password"},
		{Access{Password: "secret"}, "no username"},
		{Access{Username: "a:b", Password: "secret"}, "colon"},
		{Access{Token: "secret\r\nX: y"}, "token holds characters"},
		{Access{Header: http.Header{"Range": {"secret"}}}, `"Range" is no header`},
		{Access{Header: http.Header{"X\r\nY": {"secret"}}}, "no header"},
		{Access{Header: http.Header{"X": {"secret\nY: z"}}}, `header "X" cannot be sent`},
		{Access{CA: []byte("secret")}, "no certificate in PEM form"},
	} {
		_, err := Open(t.Context(), "http://127.0.0.1:1/", Options{Access: c.access})
		if !api.Is(err, api.Invalid) || !strings.Contains(err.Error(), c.text) || strings.Contains(err.Error(), "secret") {
			t.Errorf("got %v, want %q", err, c.text)
		}
	}
}

// TestCredentialsAreNotSentOn: credentials stay with the server named by the user, and do not come back with a redirect
// from another server.
func TestCredentialsAreNotSentOn(t *testing.T) {
	body := content(300_000)
	var leaked, asked atomic.Int32
	has := func(r *http.Request) bool {
		return r.Header.Get("Authorization") != "" || r.Header.Get("X-Api-Key") != "" || r.Header.Get("Referer") != ""
	}
	var home string
	other, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if has(r) {
			leaked.Add(1)
		}
		asked.Add(1)
		if r.URL.Path == "/back" {
			http.Redirect(w, r, home+"/returned", http.StatusFound)
			return
		}
		some(w, r, body, -1)
	})
	home, _ = serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/returned":
			if has(r) {
				leaked.Add(1)
			}
			some(w, r, body, -1)
		case !has(r):
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == "/inside":
			http.Redirect(w, r, "/here", http.StatusFound)
		case r.URL.Path == "/here":
			some(w, r, body, -1)
		default:
			http.Redirect(w, r, other+r.URL.Path, http.StatusFound)
		}
	})
	o := quick
	o.RangeSize = 64 << 10
	o.Token, o.Header = "tok", http.Header{"X-Api-Key": {"k"}}
	for _, path := range []string{"/away?sig=secret", "/back", "/inside"} {
		if got, _, err := fetch(t, home+path, o); err != nil || !bytes.Equal(got, body) {
			t.Errorf("%s: %d bytes: %v", path, len(got), err)
		}
	}
	if leaked.Load() != 0 || asked.Load() == 0 {
		t.Errorf("%d of %d requests to the other server had credentials or the address with them", leaked.Load(), asked.Load())
	}
}

// TestDownloadThroughSignedAddresses: a redirect's target may expire. The download then asks the first address again.
func TestDownloadThroughSignedAddresses(t *testing.T) {
	body := content(1 << 20)
	var signs atomic.Int32
	store, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("sig") != fmt.Sprint(signs.Load()) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		if signs.Load() == 1 && !strings.HasPrefix(r.Header.Get("Range"), "bytes=0-") {
			signs.Add(1) // this request still works, all later requests need a new signature
		}
		some(w, r, body, -1)
	})
	front, asked := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if signs.Load() == 0 {
			signs.Store(1)
		}
		http.Redirect(w, r, store+"/x?sig="+fmt.Sprint(signs.Load()), http.StatusFound)
	})
	o := quick
	o.RangeSize, o.Connections = 100_000, 2
	if got, _, err := fetch(t, front, o); err != nil || !bytes.Equal(got, body) {
		t.Fatalf("%d bytes: %v", len(got), err)
	}
	if n := asked.Load(); n < 2 || n > 4 {
		t.Errorf("the address was asked %d times", n)
	}
}

func TestDownloadWithOwnAuthority(t *testing.T) {
	body := content(100_000)
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { some(w, r, body, -1) }))
	t.Cleanup(s.Close)
	o := quick
	if _, _, err := fetch(t, s.URL, o); !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "ca.crt") {
		t.Errorf("got %v, want that the certificate is not trusted, and what to do", err)
	}
	o.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if got, _, err := fetch(t, s.URL, o); err != nil || !bytes.Equal(got, body) {
		t.Errorf("%d bytes: %v", len(got), err)
	}
}

// TestDownloadStaysOutside: internal addresses are refused unless allowed: literal addresses, addresses of names, and
// targets of redirects.
func TestDownloadStaysOutside(t *testing.T) {
	body := content(1 << 20)
	var hits atomic.Int32
	ln, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	inside := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		some(w, r, body, -1)
	}))
	_ = inside.Listener.Close()
	inside.Listener = ln
	inside.Start()
	t.Cleanup(inside.Close)
	outside, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, inside.URL+"/image", http.StatusFound)
	})
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	for _, c := range []struct {
		name, url string
		allow     func(netip.Addr) bool
		ok        bool
	}{
		{"a literal address", inside.URL, nil, false},
		{"an allowed one", inside.URL, anywhere, true},
		{"a name", "http://localhost:" + port, nil, false},
		{"the metadata service", "http://169.254.169.254/latest", nil, false},
		// Both servers are on this machine: .1 plays the public address, .2 the internal address.
		{"a redirect", outside, loopbackOnly, false},
		{"a redirect where all is allowed", outside, anywhere, true},
	} {
		o := quick
		o.Allow = c.allow
		before := hits.Load()
		got, _, err := fetch(t, c.url, o)
		if c.ok {
			if err != nil || !bytes.Equal(got, body) {
				t.Errorf("%s: %d bytes: %v", c.name, len(got), err)
			}
			continue
		}
		if !api.Is(err, api.Denied) || !strings.Contains(err.Error(), "allow-private-image-sources") || hits.Load() != before {
			t.Errorf("%s: %v after %d requests", c.name, err, hits.Load()-before)
		}
	}
}

func TestDownloadOfABusyServer(t *testing.T) {
	body := content(300_000)
	for _, c := range []struct {
		name  string
		busy  int // answers
		after func() string
		ok    bool
		text  string
	}{
		{"seconds", 2, func() string { return "1" }, true, ""},
		{"a date", 1, func() string { return time.Now().Add(time.Second).UTC().Format(http.TimeFormat) }, true, ""},
		{"nothing", 3, func() string { return "" }, true, ""},
		{"nonsense", 2, func() string { return "soon" }, true, ""},
		{"too long", 1, func() string { return "86400" }, false, "come again in 24h0m0s"},
		{"for ever", 99, func() string { return "0" }, false, "is busy (HTTP"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, count := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
				if n < c.busy {
					if s := c.after(); s != "" {
						w.Header().Set("Retry-After", s)
					}
					w.WriteHeader([]int{http.StatusServiceUnavailable, http.StatusTooManyRequests}[n%2])
					return
				}
				some(w, r, body, -1)
			})
			began := time.Now()
			got, _, err := fetch(t, url, quick)
			if c.ok && (err != nil || !bytes.Equal(got, body) || int(count.Load()) != c.busy+1) {
				t.Fatalf("%d bytes after %d requests: %v", len(got), count.Load(), err)
			}
			if !c.ok && (!api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), c.text)) {
				t.Fatal(err)
			}
			if c.name == "seconds" && time.Since(began) < 1900*time.Millisecond {
				t.Errorf("asked again within %s", time.Since(began))
			}
		})
	}
}

func TestBodiesAreNotRead(t *testing.T) {
	// An answer without end to a request for a part: only the part is read.
	url, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"x"`)
		w.Header().Set("Content-Range", "bytes 0-9/10")
		w.WriteHeader(http.StatusPartialContent)
		for {
			if _, err := io.WriteString(w, strings.Repeat("0123456789", 1000)); err != nil {
				return
			}
		}
	})
	got, size, err := fetch(t, url, quick)
	if err != nil || string(got) != "0123456789" || size != 10 {
		t.Fatalf("%d bytes of %d: %v", len(got), size, err)
	}
}

func loopbackOnly(a netip.Addr) bool { return a == netip.MustParseAddr("127.0.0.1") }
