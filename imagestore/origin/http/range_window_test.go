package http

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/origin"
)

// pieces is quick with small, and so many, pieces.
func pieces(connections int) Options {
	o := quick
	o.RangeSize, o.Connections = 100_000, connections
	return o
}

// crowd counts how many requests run at once.
type crowd struct {
	mu        sync.Mutex
	now, most int
}

func (c *crowd) in() func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now++
	c.most = max(c.most, c.now)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.now--
	}
}

func TestRangesComeAtOnce(t *testing.T) {
	body := content(5_000_123)
	var c crowd
	var all sync.WaitGroup // no answer before four requests have arrived
	all.Add(4)
	url, count := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		defer c.in()()
		if n > 0 && n < 4 {
			all.Done()
		}
		if n == 0 {
			some(w, r, body, -1)
			all.Done()
			return
		}
		if n < 4 {
			all.Wait()
		}
		some(w, r, body, -1)
	})
	o := pieces(4)
	got, size, err := fetch(t, url, o)
	if err != nil || !bytes.Equal(got, body) || size != int64(len(body)) {
		t.Fatalf("%d of %d bytes: %v", len(got), len(body), err)
	}
	if count.Load() != 51 || c.most < 3 || c.most > 4 {
		t.Errorf("%d requests, %d at once; want 51, at most 4", count.Load(), c.most)
	}
}

// TestRangesAreInOrder: the bytes are the server's, for all sizes of reads and with cut connections.
func TestRangesAreInOrder(t *testing.T) {
	for _, size := range []int{99_999, 100_000, 100_001, 200_000, 399_999, 400_000, 1_234_567} {
		for _, connections := range []int{1, 2, 4} {
			body := content(size)
			url, _ := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
				limit := -1
				if n%2 == 1 {
					limit = 30_000 // every second request is cut
				}
				some(w, r, body, limit)
			})
			s, err := Open(t.Context(), url, pieces(connections))
			if err != nil {
				t.Fatal(err)
			}
			var got []byte
			buf := make([]byte, 70_001)
			for step := 1; err == nil; step = step*3%70_001 + 1 {
				var n int
				n, err = s.Read(buf[:step])
				got = append(got, buf[:n]...)
			}
			if !errors.Is(err, io.EOF) || !bytes.Equal(got, body) {
				t.Errorf("%d bytes over %d connections: got %d: %v", size, connections, len(got), err)
			}
			_ = s.Close()
		}
	}
}

func TestDownloadFromAMark(t *testing.T) {
	body := content(1_234_567)
	etag := atomic.Pointer[string]{}
	etag.Store(new(`"v1"`))
	url, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", *etag.Load())
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
	})
	s, err := Open(t.Context(), url, pieces(4))
	if err != nil || s.Mark == nil || s.Mark.Validator != `"v1"` || s.Mark.Size != int64(len(body)) {
		t.Fatalf("%v: %+v", err, s)
	}
	mark := *s.Mark
	_ = s.Close()
	for _, off := range []int64{1, 100_000, 1_200_000, int64(len(body)) - 1, int64(len(body))} {
		for _, connections := range []int{1, 4} {
			o := pieces(connections)
			o.From = mark
			o.From.Off = off
			got, size, err := fetch(t, url, o)
			if err != nil || !bytes.Equal(got, body[off:]) || size != int64(len(body)) {
				t.Errorf("from %d: %d bytes, size %d: %v", off, len(got), size, err)
			}
		}
	}
	etag.Store(new(`"v2"`))
	o := pieces(4)
	o.From = mark
	o.From.Off = 100_000
	if _, _, err := fetch(t, url, o); !origin.Changed(err) {
		t.Errorf("got %v, want that it changed", err)
	}
}

// TestServerOfFewConnections: a server which asks for fewer connections gets fewer, and the download completes.
func TestServerOfFewConnections(t *testing.T) {
	body := content(2_000_000)
	for _, limit := range []int{1, 2} {
		var c crowd
		url, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
			out := c.in()
			defer out()
			c.mu.Lock()
			full := c.now > limit
			c.mu.Unlock()
			if full {
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			some(w, r, body, -1)
		})
		if got, _, err := fetch(t, url, pieces(4)); err != nil || !bytes.Equal(got, body) {
			t.Errorf("%d at a time: %d bytes: %v", limit, len(got), err)
		}
	}
}

// TestServerThatIsBusyInTheMiddle: the download waits for a server which is busy for a while.
func TestServerThatIsBusyInTheMiddle(t *testing.T) {
	body := content(2_000_000)
	var refused atomic.Int32
	url, _ := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		if n >= 8 && refused.Add(1) <= 6 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		some(w, r, body, -1)
	})
	if got, _, err := fetch(t, url, pieces(4)); err != nil || !bytes.Equal(got, body) {
		t.Errorf("%d bytes: %v", len(got), err)
	}
	if refused.Load() < 6 {
		t.Errorf("it was busy %d times", refused.Load())
	}
}

// TestServersThatDisagree: several servers behind the same address, with different validators, are read over a single
// connection.
func TestServersThatDisagree(t *testing.T) {
	body := content(1_000_000)
	url, _ := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", fmt.Sprintf(`"server-%d"`, n%2))
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
	})
	if got, _, err := fetch(t, url, pieces(4)); err != nil || !bytes.Equal(got, body) {
		t.Errorf("%d bytes: %v", len(got), err)
	}
}

func TestRangeErrors(t *testing.T) {
	body := content(2_000_000)
	for _, c := range []struct {
		name   string
		answer func(n int, w http.ResponseWriter, r *http.Request)
		kind   api.Kind
		text   string
	}{
		{"changed between ranges", func(n int, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", fmt.Sprintf(`"v%d"`, n/6))
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
		}, api.Unavailable, "changed on the server"},
		{"changed, and If-Range is not looked at", func(n int, w http.ResponseWriter, r *http.Request) {
			r.Header.Del("If-Range")
			w.Header().Set("ETag", fmt.Sprintf(`"v%d"`, n/6))
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
		}, api.Unavailable, "changed on the server"},
		{"grown meanwhile", func(n int, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", `"v1"`)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(append(body, make([]byte, n/6)...)))
		}, api.Unavailable, "another range"},
		{"gone meanwhile", func(n int, w http.ResponseWriter, r *http.Request) {
			if n > 6 {
				http.NotFound(w, r)
				return
			}
			some(w, r, body, -1)
		}, api.NotFound, "does not have it"},
		{"dead in the middle", func(n int, w http.ResponseWriter, r *http.Request) {
			if n > 6 {
				panic(http.ErrAbortHandler)
			}
			some(w, r, body, -1)
		}, api.Unavailable, "5 tries to get the rest failed"},
		{"stalls in the middle", func(n int, w http.ResponseWriter, r *http.Request) {
			if n > 6 {
				<-r.Context().Done()
			}
			some(w, r, body, -1)
		}, api.Unavailable, "sent nothing within 300ms"},
		{"short pieces", func(n int, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", `"v1"`)
			if n > 6 {
				w.Header().Set("Content-Range", strings.Replace(r.Header.Get("Range"), "=", " ", 1)+"/2000000")
				w.Header().Set("Content-Length", "100000")
				w.WriteHeader(http.StatusPartialContent)
				return
			}
			some(w, r, body, -1)
		}, api.Unavailable, "5 tries to get the rest failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, _ := serve(t, c.answer)
			o := pieces(4)
			if strings.HasPrefix(c.name, "stalls") {
				o = impatient(o)
			}
			_, _, err := fetch(t, url, o)
			if !api.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v, want %q", err, c.text)
			}
		})
	}
}

// TestFirstAnswers: lies in the first answer lead to a single connection and all bytes, or to an error; never to wrong
// bytes.
func TestFirstAnswers(t *testing.T) {
	body := content(300_000)
	for name, lie := range map[string]func(w http.ResponseWriter){
		"no total":     func(w http.ResponseWriter) { w.Header().Set("Content-Range", "bytes 0-99999/*") },
		"other start":  func(w http.ResponseWriter) { w.Header().Set("Content-Range", "bytes 5-100004/300000") },
		"shorter":      func(w http.ResponseWriter) { w.Header().Set("Content-Range", "bytes 0-9/300000") },
		"beyond":       func(w http.ResponseWriter) { w.Header().Set("Content-Range", "bytes 0-99999/50000") },
		"nonsense":     func(w http.ResponseWriter) { w.Header().Set("Content-Range", "all") },
		"none":         func(http.ResponseWriter) {},
		"no validator": func(w http.ResponseWriter) { w.Header().Set("Content-Range", "bytes 0-99999/300000") },
	} {
		url, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") == "" {
				some(w, r, body, -1)
				return
			}
			if name != "no validator" {
				w.Header().Set("ETag", `"v1"`)
			}
			lie(w)
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(body[:100_000])
		})
		if got, size, err := fetch(t, url, pieces(4)); err != nil || !bytes.Equal(got, body) || size != 300_000 {
			t.Errorf("%s: %d bytes, size %d: %v", name, len(got), size, err)
		}
	}
	empty, _ := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) { some(w, r, nil, -1) })
	if got, size, err := fetch(t, empty, pieces(4)); err != nil || len(got) != 0 || size != 0 {
		t.Errorf("an empty file: %d bytes, size %d: %v", len(got), size, err)
	}
}

// TestCloseInTheMiddle: a download closed in the middle leaves no goroutine and no connection.
func TestCloseInTheMiddle(t *testing.T) {
	suite.Slow(t)
	body := content(3_000_000)
	var conns crowd
	url, _ := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		defer conns.in()()
		if n > 5 {
			<-r.Context().Done() // ends when the connection does
			return
		}
		some(w, r, body, -1)
	})
	before := runtime.NumGoroutine()
	for range 5 {
		s, err := Open(t.Context(), url, impatient(pieces(4)))
		if err != nil {
			break // the server hangs from some request on
		}
		_, _ = io.ReadFull(s, make([]byte, 150_000))
		_ = s.Close()
		if _, err := s.Read(make([]byte, 1)); err == nil {
			t.Error("a closed stream can be read")
		}
	}
	for wait := 0; ; wait++ {
		conns.mu.Lock()
		left := conns.now
		conns.mu.Unlock()
		if left == 0 && runtime.NumGoroutine() <= before+4 {
			return
		}
		if wait == 6000 {
			t.Fatalf("%d requests and %d goroutines are left", left, runtime.NumGoroutine()-before)
		}
		<-time.After(10 * time.Millisecond)
	}
}
