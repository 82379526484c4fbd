package registry

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/origin"
)

func isBlob(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/")
}

// cutter passes the first bytes of a body and breaks the connection.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	if len(p) > c.left {
		_, _ = c.ResponseWriter.Write(p[:c.left])
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	c.left -= len(p)
	return c.ResponseWriter.Write(p)
}

// flipper changes the byte at a place of a body.
type flipper struct {
	http.ResponseWriter
	at int
}

func (f *flipper) Write(p []byte) (int, error) {
	q := bytes.Clone(p)
	if f.at >= 0 && f.at < len(q) {
		q[f.at] ^= 1
	}
	f.at -= len(q)
	return f.ResponseWriter.Write(q)
}

func TestCutsAreResumed(t *testing.T) {
	body := noise(3 << 20)
	for _, how := range []string{"none", "gzip", "zstd"} {
		for _, ranges := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, ranges %v", how, ranges), func(t *testing.T) {
				w := plainWorld(t)
				layer := w.blob("r", types.OCILayer, pack(t, how, disked(t, body)))
				w.manifest("r", "1", types.OCIManifestSchema1, image(types.OCIManifestSchema1, layer))
				var n atomic.Int32
				w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
					if isBlob(r) {
						if !ranges {
							r.Header.Del("Range")
						}
						if i := int(n.Add(1)); i < 5 {
							left := 700_000
							if !ranges {
								left *= i
							}
							rw = &cutter{rw, left}
						}
					}
					next.ServeHTTP(rw, r)
				}
				var resumed []int64
				o := quick
				o.Resumed = func(off int64, _ error) { resumed = append(resumed, off) }
				same(t, w.ref("r:1"), o, body)
				all, ranged := w.blobs()
				if all != 5 || ranged != 4 || len(resumed) != 4 {
					t.Errorf("%d requests, %d of them for a range, %d resumes; want 5, 4, 4", all, ranged, len(resumed))
				}
				for i, off := range resumed {
					if off != int64(i+1)*700_000 {
						t.Errorf("resume %d at %d", i, off)
					}
				}
			})
		}
	}
}

func TestFaultyRegistries(t *testing.T) {
	suite.Slow(t)
	body := noise(1 << 20)
	packed := pack(t, "gzip", disked(t, body))
	flush := func(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }
	type door = func(n int, w http.ResponseWriter, r *http.Request, next http.Handler)
	first := func(d door) door {
		return func(n int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			if n == 1 {
				d(n, w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		}
	}
	hang := func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) { <-r.Context().Done() }
	some := func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
		w.Header().Set("Content-Length", strconv.Itoa(len(packed)))
		_, _ = w.Write(packed[:500_000])
		flush(w)
		<-r.Context().Done()
	}
	status := func(code int, after string) door {
		return func(_ int, w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			if after != "" {
				w.Header().Set("Retry-After", after)
			}
			w.WriteHeader(code)
		}
	}
	flip := func(at int) door {
		return func(_ int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			next.ServeHTTP(&flipper{w, at}, r)
		}
	}
	past := time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)
	for name, c := range map[string]struct {
		at   string // which requests the door is for
		door door
		kind api.Kind
		text string // kind 0: the fetch succeeds
	}{
		"silent before the first answer": {"/v2/", hang, api.Unavailable, "sent nothing within 1s"},
		"silent before the manifest":     {"/manifests/", hang, api.Unavailable, "sent nothing within 1s"},
		"silent before the layer":        {"/blobs/", hang, api.Unavailable, "sent nothing within 1s"},
		"silent once in the layer":       {"/blobs/", first(some), 0, ""},
		"silent in the layer, always": {"/blobs/", func(n int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			if n == 1 {
				some(n, w, r, next)
			}
			hang(n, w, r, next)
		}, api.Unavailable, fmt.Sprintf("500000 of %d bytes came", len(packed))},
		"ends early, always": {"/blobs/", func(n int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			if n == 1 {
				w.Header().Set("Transfer-Encoding", "chunked")
				_, _ = w.Write(packed[:1000])
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 1000-%d/%d", len(packed)-1, len(packed)))
			w.WriteHeader(http.StatusPartialContent)
			flush(w)
		}, api.Unavailable, "5 tries to get the rest failed: the registry ended the transfer early"},
		"busy for a moment":   {"/blobs/", first(status(429, "0")), 0, ""},
		"busy, no hint":       {"/manifests/", first(status(503, "")), 0, ""},
		"busy at the door":    {"/v2/", first(status(503, "0")), 0, ""},
		"busy until a date":   {"/blobs/", first(status(503, past)), 0, ""},
		"busy for hours":      {"/manifests/", status(429, "7200"), api.Unavailable, "busy (HTTP 429 Too Many Requests)"},
		"busy for ever":       {"/blobs/", status(503, "0"), api.Unavailable, "busy (HTTP 503"},
		"broken":              {"/manifests/", status(500, ""), api.Unavailable, "answered HTTP 500"},
		"refuses":             {"/blobs/", status(403, ""), api.Denied, "wants credentials"},
		"a byte of the disk":  {"/blobs/", flip(700_000), api.Corrupt, ""},
		"a byte of the start": {"/blobs/", flip(1), api.Corrupt, ""},
		"a byte of the last":  {"/blobs/", flip(len(packed) - 2), api.Corrupt, ""},
		"a byte of the manifest": {"/manifests/", func(_ int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			next.ServeHTTP(&flipper{w, 20}, r)
		}, api.Corrupt, "does not match requested digest"},
		"a packed manifest": {"/manifests/", func(_ int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			w.Header().Set("Content-Encoding", "gzip")
			next.ServeHTTP(w, r)
		}, api.Unsupported, "packed the answer (gzip)"},
		"endless redirects of a manifest": {"/manifests/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, r.URL.Path+"?signature=x", http.StatusTemporaryRedirect)
		}, api.Invalid, "more than 10 times"},
		"redirect of a manifest to plain http": {"/manifests/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, "http://198.51.100.1/manifest?signature=x", http.StatusTemporaryRedirect)
		}, api.Denied, "plain http to 198.51.100.1 is refused"},
		"redirect of a manifest to cloud metadata": {"/manifests/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, "https://169.254.169.254/latest?signature=x", http.StatusTemporaryRedirect)
		}, api.Unavailable, "private/link-local"},
		"another range": {"/blobs/", func(n int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			if n == 1 {
				next.ServeHTTP(&cutter{w, 5000}, r)
			}
			if r.Header.Get("Range") == "" { // the second request asks for all
				next.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Range", "bytes 0-9/10")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(packed[:10])
		}, 0, ""},
		"no ranges, and it says so": {"/blobs/", func(n int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			if n == 1 {
				next.ServeHTTP(&cutter{w, 5000}, r)
			}
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			next.ServeHTTP(w, r)
		}, 0, ""},
		"packed": {"/blobs/", func(_ int, w http.ResponseWriter, r *http.Request, next http.Handler) {
			w.Header().Set("Content-Encoding", "br")
			next.ServeHTTP(w, r)
		}, api.Unsupported, "packed the answer (br)"},
		"endless redirects": {"/blobs/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, r.URL.Path+"?signature=x", http.StatusTemporaryRedirect)
		}, api.Invalid, "more than 10 times"},
		"redirect to a file": {"/blobs/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			w.Header().Set("Location", "file:///etc/passwd")
			w.WriteHeader(http.StatusFound)
		}, api.Invalid, `a "file" address`},
		"redirect to cloud metadata": {"/blobs/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, "https://169.254.169.254/latest?signature=x", http.StatusTemporaryRedirect)
		}, api.Denied, "169.254.169.254 is a link-local address"},
		"redirect to plain http": {"/blobs/", func(_ int, w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, "http://198.51.100.1/blob?signature=x", http.StatusTemporaryRedirect)
		}, api.Denied, "plain http to 198.51.100.1 is refused"},
		"token service inside": {"/v2/", func(_ int, w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="https://127.0.0.2:1/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		}, api.Unavailable, "private or link-local"},
		"token service inside, by name": {"/v2/", func(_ int, w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="https://127.0.0.2.nip.invalid/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		}, api.Unavailable, "has no address"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := quick
			if strings.HasPrefix(name, "silent") {
				o.Start, o.Stall = time.Second, time.Second
			}
			if strings.HasPrefix(name, "silent") && strings.Contains(name, "in the layer") { // earlier requests are answered
				o.Start, o.Stall, o.Resumes = 10*time.Second, 10*time.Second, 1
			}
			w := plainWorld(t)
			d := w.manifest("f", "1", types.OCIManifestSchema1,
				image(types.OCIManifestSchema1, w.blob("f", types.OCILayer, packed)))
			var n atomic.Int32
			w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				if c.at == "/v2/" && r.URL.Path == c.at || c.at != "/v2/" && strings.Contains(r.URL.Path, c.at) {
					c.door(int(n.Add(1)), rw, r, next)
					return
				}
				next.ServeHTTP(rw, r)
			}
			ref := w.ref("f@" + d["digest"].(string))
			if c.kind == 0 {
				same(t, ref, o, body)
				return
			}
			_, _, err := fetch(t, ref, o)
			fails(t, err, c.kind, c.text)
		})
	}
}

// TestBusyTokenService: a fetch waits for the token service as for the registry, and the requested delay reaches the
// importer.
func TestBusyTokenService(t *testing.T) {
	body := noise(100_000)
	for name, c := range map[string]struct {
		busy  int32 // answers
		after string
		wait  time.Duration // 0: the fetch succeeds
		text  string
	}{
		"for a moment": {2, "0", 0, ""},
		"for hours":    {99, "7200", 2 * time.Hour, "busy (HTTP 429 Too Many Requests), and asks to come again in 2h0m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := plainWorld(t)
			d := w.manifest("f", "1", types.OCIManifestSchema1,
				image(types.OCIManifestSchema1, w.blob("f", types.OCILayer, pack(t, "gzip", disked(t, body)))))
			var asked atomic.Int32
			w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				switch {
				case r.URL.Path == "/token" && asked.Add(1) <= c.busy:
					rw.Header().Set("Retry-After", c.after)
					rw.WriteHeader(http.StatusTooManyRequests)
				case r.URL.Path == "/token":
					_, _ = rw.Write([]byte(`{"token":"t"}`))
				case r.Header.Get("Authorization") != "Bearer t":
					rw.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="x"`, r.Host))
					rw.WriteHeader(http.StatusUnauthorized)
				default:
					next.ServeHTTP(rw, r)
				}
			}
			ref := w.ref("f@" + d["digest"].(string))
			if c.wait == 0 {
				same(t, ref, quick, body)
				if n := asked.Load(); n <= c.busy {
					t.Errorf("the token service was asked %d times", n)
				}
				return
			}
			_, _, err := fetch(t, ref, quick)
			fails(t, err, api.Unavailable, c.text)
			if wait := origin.Wait(err); wait != c.wait {
				t.Errorf("the importer waits %s, want %s: %v", wait, c.wait, err)
			}
		})
	}
}

// refusing is an address without a listener: a socket has the port, so that no other process can listen there
// meanwhile.
func refusing(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", at.(*unix.SockaddrInet4).Port)
}

func TestNobodyThere(t *testing.T) {
	_, _, err := fetch(t, Scheme+refusing(t)+"/a", quick)
	fails(t, err, api.Unavailable, "connection refused")
	_, _, err = fetch(t, "docker://nowhere.invalid/a", quick)
	fails(t, err, api.Unavailable, `host "nowhere.invalid" has no address`)
}

func TestAddressesInside(t *testing.T) {
	w := plainWorld(t)
	w.image("a", "1", disked(t, []byte("x")))
	o := quick
	o.Allow = nil
	_, _, err := fetch(t, w.ref("a:1"), o)
	fails(t, err, api.Denied, "127.0.0.1 is a loopback address")
	_, port, _ := net.SplitHostPort(w.host)
	_, _, err = fetch(t, Scheme+"localhost:"+port+"/a:1", o)
	fails(t, err, api.Denied, "a loopback address")
	_, _, err = fetch(t, Scheme+"10.255.255.1:5000/a:1", o)
	fails(t, err, api.Denied, "10.255.255.1")
	if all, _ := w.blobs(); all != 0 || len(w.log) != 0 {
		t.Errorf("the registry was asked: %v", w.log)
	}
}

// own is an address of this machine outside of loopback.
func own(t *testing.T) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			return n.IP.String()
		}
	}
	t.Skip("this machine has no address but loopback ones")
	return ""
}

func TestPlainHTTP(t *testing.T) {
	at := own(t)
	l, err := net.Listen("tcp", at+":0")
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(s *httptest.Server) {
		_ = s.Listener.Close()
		s.Listener = l
		s.Start()
	})
	w.image("a", "1", disked(t, []byte("x")))
	o := quick
	o.Allow = func(netip.Addr) bool { return true }
	_, _, err = fetch(t, w.ref("a:1"), o)
	fails(t, err, api.Denied, "plain http")
	if len(w.log) != 0 {
		t.Errorf("the registry was asked: %v", w.log)
	}
	o.PlainHTTP = true
	same(t, w.ref("a:1"), o, []byte("x"))
}

// TestNoTLSThere: the server answers a TLS handshake with bytes which do not even look like HTTP.
func TestNoTLSThere(t *testing.T) {
	ln, err := net.Listen("tcp", own(t)+":0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 4<<10))
			_, _ = c.Write([]byte("<!DOCTYPE HTML>"))
			_ = c.Close()
		}
	}()
	defer func() {
		_ = ln.Close()
		<-ended
	}()
	o := quick
	o.Allow = func(netip.Addr) bool { return true }
	_, _, err = fetch(t, "docker://"+ln.Addr().String()+"/a:1", o)
	fails(t, err, api.Denied, "does not speak TLS, and Drover refuses plain http")
}

func TestTLS(t *testing.T) {
	var ca []byte
	w := newWorld(t, func(s *httptest.Server) {
		s.StartTLS()
		ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	})
	body := noise(1 << 20)
	w.image("a", "1", disked(t, body))
	_, _, err := fetch(t, w.ref("a:1"), quick)
	fails(t, err, api.Unavailable, "give its authority in the image's Secret (ca.crt)")
	o := quick
	o.CA = []byte("nonsense")
	_, _, err = fetch(t, w.ref("a:1"), o)
	fails(t, err, api.Invalid, "no certificate in PEM form")
	o.CA = ca
	same(t, w.ref("a:1"), o, body)

	// A registry with TLS cannot redirect a layer to plain http either.
	w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
		if isBlob(r) {
			http.Redirect(rw, r, "http://10.0.0.1/x?signature=x", http.StatusFound)
			return
		}
		next.ServeHTTP(rw, r)
	}
	_, _, err = fetch(t, w.ref("a:1"), o)
	fails(t, err, api.Denied, "plain http to 10.0.0.1")
}

// TestNothingStaysBehind: a closed stream leaves no connection and no goroutine, read to the end or not.
func TestNothingStaysBehind(t *testing.T) {
	w := plainWorld(t)
	w.image("a", "1", disked(t, noise(4<<20)))
	before := runtime.NumGoroutine()
	for i := range 20 {
		s, err := Open(t.Context(), w.ref("a:1"), quick)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			if _, err := io.Copy(io.Discard, s); err != nil {
				t.Fatal(err)
			}
		}
		_ = s.Close()
		_, _, err = fetch(t, w.ref("a:none"), quick)
		fails(t, err, api.NotFound, "none")
	}
	// The other sides of closed connections take a moment to notice.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(2 * time.Minute)
	for runtime.NumGoroutine() > before {
		select {
		case <-tick.C:
		case <-deadline:
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines instead of %d:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
	}
}

// TestOtherBytesThanThoseAskedFor: wrong bytes which make a valid archive are refused: only the digest tells.
func TestOtherBytesThanThoseAskedFor(t *testing.T) {
	body := noise(1 << 20)
	upper := append(disked(t, body), make([]byte, 8<<10)...) // filled up, as tar does
	lower := tarOf(t, file{name: "etc/x", body: noise(10_000)})
	for name, c := range map[string]struct {
		layer []byte // the changed layer
		at    int
		cut   bool // changed only after a resume
	}{
		"in the disk":        {upper, 700_000, false},
		"in the disk's last": {upper, 1024 + len(body) - 1, false},
		"behind the archive": {upper, len(upper) - 1, false},
		"in the layer below": {lower, 5_000, false},
		"after a resume":     {upper, 700_000 - 300_000, true},
		"in the first byte":  {upper, 1024, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := plainWorld(t)
			var layers []object
			for _, l := range [][]byte{lower, upper} {
				layers = append(layers, w.blob("o", types.OCIUncompressedLayer, l))
			}
			w.manifest("o", "1", types.OCIManifestSchema1, image(types.OCIManifestSchema1, layers...))
			same(t, w.ref("o:1"), quick, body)
			w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				switch {
				case !strings.HasSuffix(r.URL.Path, digest(c.layer)):
				case c.cut && r.Header.Get("Range") == "":
					rw = &cutter{rw, 300_000}
				default:
					rw = &flipper{rw, c.at}
				}
				next.ServeHTTP(rw, r)
			}
			_, size, err := fetch(t, w.ref("o:1"), quick)
			fails(t, err, api.Corrupt, "the registry sent other bytes than those of layer "+digest(c.layer))
			if size != int64(len(body)) {
				t.Errorf("it failed before it was read")
			}
		})
	}
}
