package cli_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
)

// front stands before the API server, and can cut the server off.
type front struct {
	net.Listener
	to string

	mu    sync.Mutex
	away  bool
	conns map[net.Conn]bool
}

func newFront(t *testing.T, to string) *front {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &front{Listener: ln, to: to, conns: map[net.Conn]bool{}}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		_ = ln.Close()
		f.is(true)
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { f.carry(c) })
		}
	})
	return f
}

// is cuts the server off, or connects the server again.
func (f *front) is(away bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away = away
	for c := range f.conns {
		_ = c.Close()
	}
	clear(f.conns)
}

func (f *front) carry(c net.Conn) {
	defer c.Close()
	s, err := net.Dial("tcp", f.to)
	if err != nil {
		return
	}
	defer s.Close()
	f.mu.Lock()
	away := f.away
	f.conns[c], f.conns[s] = true, true
	f.mu.Unlock()
	if away {
		return
	}
	ended := make(chan bool)
	go func() {
		defer close(ended)
		_, _ = io.Copy(s, c)
		_ = s.Close()
	}()
	_, _ = io.Copy(c, s)
	_ = c.Close()
	<-ended
}

// heard receives a running command's remarks.
type heard chan string

func (h heard) Write(p []byte) (int, error) {
	h <- string(p)
	return len(p), nil
}

func (h heard) await(t *testing.T, ctx context.Context, words string) {
	t.Helper()
	last := ""
	for {
		select {
		case s := <-h:
			if last = s; strings.Contains(s, words) {
				return
			}
		case <-ctx.Done():
			t.Fatalf("nothing is said of %q: %v; the last words were %q", words, context.Cause(ctx), last)
		}
	}
}

// TestImportIsFollowedThroughARestart: the API server is away for a while, as when Drover restarts. The command
// continues to follow the image.
func TestImportIsFollowedThroughARestart(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	host := strings.TrimPrefix(server.Config.Host, "https://")
	f := newFront(t, host)
	raw, err := os.ReadFile(server.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(string(raw), host, f.Addr().String())), 0o600); err != nil {
		t.Fatal(err)
	}
	remarks, done := make(heard, 1000), make(chan result, 1)
	go func() {
		done <- droverTo(ctx, remarks, "image", "import", "http://h.example/x.img", "--name", "followed", "--kubeconfig", path)
	}()
	running, over := context.WithCancelCause(ctx)
	ended := make(chan result, 1)
	go func() {
		r := <-done
		ended <- r
		over(fmt.Errorf("the command ended: %+v", r))
	}()
	remarks.await(t, running, "image followed: pending")
	f.is(true)
	remarks.await(t, running, "waiting for the API server")
	f.is(false)
	if err := status(ctx, "followed", func(i *api.BackingImage) {
		i.Status.State, i.Status.Format, i.Status.VirtualSize, i.Status.Size = api.ImageReady, "raw", 3<<20, 3<<20
	}); err != nil {
		t.Fatal(err)
	}
	r := <-ended
	r.mustSay(t, 0, `image "followed" ready: raw, 3 MiB virtual`)
}
