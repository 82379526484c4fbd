package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// liar is a node with a valid certificate and arbitrary answers.
func liar(t *testing.T, id *Identity, answer http.HandlerFunc) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: answer, ReadHeaderTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	done := make(chan error, 1)
	go func() { done <- h.Serve(tls.NewListener(ln, id.Server())) }()
	t.Cleanup(func() {
		_ = h.Close()
		<-done
	})
	return ln.Addr().String()
}

// endless writes until the reader has left.
func endless(w http.ResponseWriter, first, again string) {
	text := []byte(strings.Repeat(again, 4096))
	_, err := io.WriteString(w, first)
	for err == nil {
		_, err = w.Write(text)
	}
}

// TestAnswersAreBounded: a client takes no more memory for an answer than the largest true answer needs, and refuses an
// impossible answer.
func TestAnswersAreBounded(t *testing.T) {
	a := testAuthority(t)
	one, two := issued(t, a, "one"), issued(t, a, "two")
	const sound = `{"size":1073741824,"root":"ab","allocated":4096}`
	var layer, other atomic.Value
	layer.Store(sound)
	other.Store("")
	addr := liar(t, one, func(w http.ResponseWriter, r *http.Request) {
		text := other.Load().(string)
		if r.URL.Path == "/v1/layer" {
			text = layer.Load().(string)
		}
		if first, again, ok := strings.Cut(text, "..."); ok {
			endless(w, first, again)
			return
		}
		_, _ = io.WriteString(w, text)
	})
	c := NewClient(two, "one", addr)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	next := func() error {
		layer.Store(sound)
		src, err := c.Open(ctx, "disk", "layer")
		if err != nil {
			t.Fatal(err)
		}
		_, err = src.Next(0)
		return err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, text := range []string{`{"size":...1`, `{...  `, `{"size":-4096}`, `{"size":4611686018427387904}`,
		`{"size":4097}`, `{"size":0}`, `{"size":4096,"allocated":-1}`,
		`{"size":4096,"root":"` + strings.Repeat("a", 1000) + `"}`, `[]`} {
		layer.Store(text)
		if _, err := c.Open(ctx, "disk", "layer"); !errors.Is(err, errNonsense) {
			t.Errorf("facts %.40s: %v", text, err)
		}
	}
	for _, text := range []string{`[...[0,4096,1],`, `[[0,1073745920,1]]`, `[[0,4611686018427387904,2]]`, `[[0,-1,1]]`, `[[0,1,1]]`,
		`[[4096,4096,1]]`, `[[0,4096,9]]`, `[[0,4096,1],[0,4096,1]]`, `[]`,
		`[` + strings.Repeat(`[0,1,1],`, maxExtents) + `[0,1,1]]`} {
		other.Store(text)
		if err := next(); !errors.Is(err, errNonsense) {
			t.Errorf("extents %.40s: %v", text, err)
		}
	}
	layer.Store(sound)
	for _, text := range []string{`{"uid":"u",..."a":1,`, `{"uid":"../x"}`, `{"uid":"u","virtualSize":-1}`,
		`{"uid":"u","layers":["../x"]}`, `{"uid":"u","virtualSize":4611686018427387904}`} {
		other.Store(text)
		if _, err := c.Image(ctx, "disk", "u"); !errors.Is(err, errNonsense) {
			t.Errorf("image %.40s: %v", text, err)
		}
	}
	other.Store(`x...y`)
	if _, err := c.Sums(ctx, "disk", "layer", maxLayer); !errors.Is(err, errNonsense) {
		t.Errorf("endless digests: %v", err)
	}
	if _, err := c.Sums(ctx, "disk", "layer", 1<<20); !errors.Is(err, errNonsense) {
		t.Errorf("digests of a layer beyond its image: %v", err)
	}
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 512<<20 {
		t.Errorf("%d bytes were allocated", after.TotalAlloc-before.TotalAlloc)
	}
	other.Store(`[[0,1073741824,1]]`)
	if err := next(); err != nil {
		t.Error(err)
	}
}

// TestMessagesAreBounded: a client cuts the message and the kind of a node's error.
func TestMessagesAreBounded(t *testing.T) {
	a := testAuthority(t)
	one, two := issued(t, a, "one"), issued(t, a, "two")
	var text atomic.Value
	addr := liar(t, one, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, text.Load().(string))
	})
	c := NewClient(two, "one", addr)
	defer c.Close()
	long := `{"kind":"` + strings.Repeat("k", 30000) + `","message":"` + strings.Repeat("é", 15000) + `"}`
	for _, s := range []string{long, `{`, strings.Repeat("x", 1<<20)} {
		text.Store(s)
		var said *Error
		_, _, err := c.Digest(t.Context(), "disk", "layer")
		if !errors.As(err, &said) || len(said.Message) > maxMessage || len(said.Kind) > maxID {
			t.Errorf("%.20s: %d bytes of an error", s, len(fmt.Sprint(err)))
		}
	}
}

// TestOnlyUIDsReachADisk: a server looks up no disk, image or layer by a name other than a UID.
func TestOnlyUIDsReachADisk(t *testing.T) {
	a := testAuthority(t)
	one, two := issued(t, a, "one"), issued(t, a, "two")
	var asked atomic.Int32
	addr := serve(t, one, ServerOptions{Disk: func(string) (block.Layers, error) {
		asked.Add(1)
		return newMemory(), nil
	}})
	c := NewClient(two, "one", addr)
	defer c.Close()
	for _, uid := range []string{"", "..", "../../etc", "a/b", "A", strings.Repeat("a", maxID+1), "a\x00", "a."} {
		for _, of := range [][2]string{{"disk", uid}, {uid, "layer"}} {
			_, _, err := c.Digest(t.Context(), of[0], of[1])
			_, serr := c.Sums(t.Context(), of[0], of[1], maxLayer)
			_, ierr := c.Image(t.Context(), of[0], of[1])
			rerr := c.Read(t.Context(), of[0], of[1], make([]byte, 1), 0)
			_, oerr := c.Open(t.Context(), of[0], of[1])
			if err == nil || serr == nil || ierr == nil || rerr == nil || oerr == nil {
				t.Errorf("%q is taken", of)
			}
		}
		if _, err := c.Send(t.Context(), uid); err == nil {
			t.Errorf("%q is taken", uid)
		}
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("%d names reached a disk", n)
	}
}

// TestPlaceOfAnIdleNode: a node with a place loses the place if the node reads nothing, and keeps the place while
// reading.
func TestPlaceOfAnIdleNode(t *testing.T) {
	suite.Slow(t)
	a := testAuthority(t)
	one, two := issued(t, a, "one"), issued(t, a, "two")
	ended := make(chan struct{}, 1)
	s := NewServer(ServerOptions{Identity: one, Log: slog.New(slog.DiscardHandler),
		Disk: func(string) (block.Layers, error) { return newMemory(), nil },
		Send: func(context.Context, string) (func(), error) { return func() { ended <- struct{}{} }, nil }})
	s.idleSend = 2 * time.Second
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, ln) }()
	defer func() {
		cancel()
		<-done
	}()
	c := NewClient(two, "one", ln.Addr().String())
	defer c.Close()
	end, err := c.Send(t.Context(), "disk")
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	if err := c.Read(t.Context(), "disk", "layer", make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	last := s.lastRead["two"]
	s.mu.Unlock()
	if last.IsZero() {
		t.Fatal("the read is not noted")
	}
	select {
	case <-ended:
	case <-time.After(5 * time.Minute):
		t.Error("a node that reads nothing keeps its place")
	}
}
