package http

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

func anywhere(netip.Addr) bool { return true }

// quick tries again at once, but gives a busy machine time.
var quick = Options{Access: Access{Allow: anywhere}, Start: 20 * time.Second, Stall: 20 * time.Second,
	Pause: time.Millisecond}

// impatient is for silent servers.
func impatient(o Options) Options {
	o.Start, o.Stall = 300*time.Millisecond, 300*time.Millisecond
	return o
}

func content(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(b)
	return b
}

// serve starts a server. answer answers the n-th request (from 0).
func serve(t *testing.T, answer func(n int, w http.ResponseWriter, r *http.Request)) (string, *atomic.Int32) {
	t.Helper()
	var count atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer(int(count.Add(1))-1, w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL, &count
}

// some serves content with a validator, as servers of files do, but cuts the connection after limit bytes.
func some(w http.ResponseWriter, r *http.Request, body []byte, limit int) {
	w.Header().Set("ETag", `"v1"`)
	http.ServeContent(&cutter{ResponseWriter: w, left: limit}, r, "", time.Time{}, bytes.NewReader(body))
}

type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	if c.left >= 0 && len(p) > c.left {
		_, _ = c.ResponseWriter.Write(p[:c.left])
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	if c.left >= 0 {
		c.left -= len(p)
	}
	return c.ResponseWriter.Write(p)
}

func fetch(t *testing.T, url string, o Options) ([]byte, int64, error) {
	t.Helper()
	s, err := Open(t.Context(), url, o)
	if err != nil {
		return nil, 0, err
	}
	defer s.Close()
	b, err := io.ReadAll(s)
	return b, s.Size, err
}

func TestDownloadResumesAfterCuts(t *testing.T) {
	body := content(3 << 20)
	url, count := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		limit := 700_000
		if n == 4 {
			limit = -1
		}
		some(w, r, body, limit)
	})
	var resumed int
	o := quick
	o.Resumed = func(int64, error) { resumed++ }
	got, size, err := fetch(t, url, o)
	if err != nil || !bytes.Equal(got, body) || size != int64(len(body)) {
		t.Fatalf("got %d of %d bytes, size %d: %v", len(got), len(body), size, err)
	}
	if count.Load() != 5 || resumed != 4 {
		t.Fatalf("%d requests, %d resumes; want 5 and 4", count.Load(), resumed)
	}
}

func TestDownloadResumesASilentServer(t *testing.T) {
	body := content(1 << 20)
	url, _ := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		if n == 0 {
			w.Header().Set("ETag", `"v1"`)
			w.Header().Set("Accept-Ranges", "bytes")
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			_, _ = w.Write(body[:1000])
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		some(w, r, body, -1)
	})
	o := quick
	o.Stall = 300 * time.Millisecond
	if got, _, err := fetch(t, url, o); err != nil || !bytes.Equal(got, body) {
		t.Fatalf("got %d bytes: %v", len(got), err)
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

func TestDownloadErrors(t *testing.T) {
	body := content(1 << 20)
	refused := "http://" + refusing(t)
	length := func(w http.ResponseWriter, n int) { w.Header().Set("Content-Length", fmt.Sprint(n)) }
	for _, c := range []struct {
		name   string
		url    string
		answer func(n int, w http.ResponseWriter, r *http.Request)
		kind   api.Kind
		text   string
	}{
		{name: "scheme", url: "ftp://host/x", kind: api.Invalid, text: `scheme "ftp"`},
		{name: "file scheme", url: "file:///etc/passwd", kind: api.Invalid, text: `scheme "file"`},
		{name: "refused", url: refused, kind: api.Unavailable, text: "connection refused"},
		{name: "no such host", url: "http://nowhere.invalid/x", kind: api.Unavailable, text: "nowhere.invalid"},
		{name: "404", answer: func(_ int, w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) },
			kind: api.NotFound, text: "404"},
		{name: "401", answer: func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
			kind: api.Denied, text: "401"},
		{name: "503", answer: func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) },
			kind: api.Unavailable, text: "503"},
		{name: "redirect to a file", answer: func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "file:///etc/shadow")
			w.WriteHeader(http.StatusFound)
		}, kind: api.Invalid, text: `scheme "file"`},
		{name: "redirects without end", answer: func(_ int, w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/again", http.StatusFound)
		}, kind: api.Invalid, text: "more than 10 times"},
		{name: "packed", answer: func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write(body)
		}, kind: api.Unsupported, text: "packed"},
		{name: "silent from the start", answer: func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			kind: api.Unavailable, text: "sent nothing within 300ms"},
		{name: "silent after the head", answer: func(_ int, w http.ResponseWriter, r *http.Request) {
			length(w, len(body))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, kind: api.Unavailable, text: "sent nothing within 300ms"},
		{name: "shorter than it says, cannot resume", answer: func(_ int, w http.ResponseWriter, _ *http.Request) {
			length(w, len(body))
			_, _ = w.Write(body[:5000])
		}, kind: api.Unavailable, text: "5000 of 1048576 bytes"},
		{name: "cut without a validator", answer: func(n int, w http.ResponseWriter, r *http.Request) {
			http.ServeContent(&cutter{w, 5000}, r, "", time.Time{}, bytes.NewReader(body))
		}, kind: api.Unavailable, text: "after 5000 of 1048576 bytes, and it cannot send the rest alone"},
		{name: "always cut at once", answer: func(n int, w http.ResponseWriter, r *http.Request) {
			some(w, r, body, map[bool]int{true: 5000}[n == 0])
		}, kind: api.Unavailable, text: "5 tries to get the rest failed"},
		{name: "changed meanwhile", answer: func(n int, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", fmt.Sprintf(`"v%d"`, n))
			limit := -1
			if n == 0 {
				limit = 5000
			}
			http.ServeContent(&cutter{w, limit}, r, "", time.Time{}, bytes.NewReader(body))
		}, kind: api.Unavailable, text: "changed on the server after 5000 bytes"},
		{name: "changed meanwhile, and sent all the same", answer: func(n int, w http.ResponseWriter, r *http.Request) {
			r.Header.Del("If-Range")
			w.Header().Set("ETag", fmt.Sprintf(`"v%d"`, n))
			limit := -1
			if n == 0 {
				limit = 5000
			}
			http.ServeContent(&cutter{w, limit}, r, "", time.Time{}, bytes.NewReader(body))
		}, kind: api.Unavailable, text: "changed on the server after 5000 bytes"},
		{name: "another range", answer: func(n int, w http.ResponseWriter, r *http.Request) {
			if n == 0 {
				some(w, r, body, 5000)
			}
			w.Header().Set("Content-Range", "bytes 0-9/10")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(body[:10])
		}, kind: api.Unavailable, text: "another range"},
	} {
		t.Run(c.name, func(t *testing.T) {
			url := c.url
			if url == "" {
				base, _ := serve(t, c.answer)
				url = strings.Replace(base, "http://", "http://user:secret@", 1) + "/x?token=secret"
			}
			o := quick
			if strings.HasPrefix(c.name, "silent") {
				o = impatient(o)
			}
			_, _, err := fetch(t, url, o)
			if err == nil || !api.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("got %v (kind %v), want %q of kind %v", err, api.KindOf(err), c.text, c.kind)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Fatalf("the message shows a secret: %v", err)
			}
		})
	}
}

func TestDownloadIsCancelled(t *testing.T) {
	url, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = w.Write([]byte("x"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	s, err := Open(ctx, url, Options{Access: Access{Allow: anywhere}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want that it was cancelled", err)
	}
}

func TestDownloadOfUnknownSize(t *testing.T) {
	body := content(100_000)
	url, _ := serve(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(body); i += 10_000 {
			_, _ = w.Write(body[i : i+10_000])
			_ = http.NewResponseController(w).Flush()
		}
	})
	got, size, err := fetch(t, url, quick)
	if err != nil || size != -1 || !bytes.Equal(got, body) {
		t.Fatalf("got %d bytes, size %d: %v", len(got), size, err)
	}
}
