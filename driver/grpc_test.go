package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"drover.io/drover/api"
	"drover.io/drover/identity"
)

func TestEveryKindHasACode(t *testing.T) {
	for k := api.Other; k <= api.Denied; k++ {
		code, ok := codeOf[k]
		if !ok {
			t.Errorf("kind %v has no gRPC code", k)
		}
		wrapped := fmt.Errorf("outer: %w", api.Errorf(k, "inner"))
		if st, _ := status.FromError(toStatus(wrapped)); st.Code() != code || st.Message() != "outer: inner" {
			t.Errorf("kind %v became %v %q", k, st.Code(), st.Message())
		}
	}
	for err, want := range map[error]codes.Code{
		context.Canceled:         codes.Canceled,
		context.DeadlineExceeded: codes.DeadlineExceeded,
		errors.New("x"):          codes.Internal,
		status.Error(codes.Unimplemented, "not a call"): codes.Unimplemented,
	} {
		if got := status.Code(toStatus(err)); got != want {
			t.Errorf("%v became %v, want %v", err, got, want)
		}
	}
}

// door calls a function of the test.
type door struct {
	csi.UnimplementedControllerServer
	create func(context.Context, *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error)
}

func (d *door) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return d.create(ctx, r)
}

// dial serves d on a socket and returns a client and the log.
func dial(t *testing.T, d *door) (csi.ControllerClient, *bytes.Buffer) {
	t.Helper()
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s := newServer(doors{identity: identity.New("v", nil), controller: d}, log)
	path := filepath.Join(t.TempDir(), "csi.sock")
	ln, err := listenCSI("unix://" + path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- serveDoors(s, ln) }()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		s.GracefulStop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return csi.NewControllerClient(conn), &logged
}

func TestPanicBecomesAnError(t *testing.T) {
	c, logged := dial(t, &door{create: func(context.Context, *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
		panic("ouch")
	}})
	for range 2 {
		resp, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v"})
		if status.Code(err) != codes.Internal || resp != nil {
			t.Fatalf("got %v, %v, want no response and Internal", resp, err)
		}
	}
	if !strings.Contains(logged.String(), "ouch") || !strings.Contains(logged.String(), "grpc_test.go") {
		t.Errorf("neither panic nor stack in the log: %s", logged)
	}
}

func TestErrorsCarryNoResponse(t *testing.T) {
	c, _ := dial(t, &door{create: func(context.Context, *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
		return &csi.CreateVolumeResponse{}, api.Errorf(api.Full, "no room")
	}})
	resp, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v"})
	st, _ := status.FromError(err)
	if st.Code() != codes.ResourceExhausted || st.Message() != "no room" || len(st.Details()) != 0 || resp != nil {
		t.Errorf("got %v, %v", resp, err)
	}
}

func TestSecretsAreNotLogged(t *testing.T) {
	c, logged := dial(t, &door{create: func(context.Context, *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
		return &csi.CreateVolumeResponse{}, nil
	}})
	_, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "a-name", Secrets: map[string]string{"k": "hush"}})
	if err != nil {
		t.Fatal(err)
	}
	if s := logged.String(); strings.Contains(s, "hush") || !strings.Contains(s, "a-name") {
		t.Errorf("want the name and not the secret in the log: %s", s)
	}
}

// within returns the next value of a channel; a missing value ends the test under the given name.
func within[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(5 * time.Minute)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
	}
	t.Fatal("no " + what)
	panic("not reached")
}

func TestOneCallPerVolume(t *testing.T) {
	var running, most atomic.Int32
	entered, release := make(chan string, 9), make(chan struct{})
	c, _ := dial(t, &door{create: func(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
		if n := running.Add(1); n > most.Load() {
			most.Store(n)
		}
		defer running.Add(-1)
		entered <- r.Name
		select {
		case <-release:
		case <-ctx.Done(): // the test has failed
		}
		return &csi.CreateVolumeResponse{}, nil
	}})
	call := func(ctx context.Context, name string) chan error {
		done := make(chan error, 1)
		go func() {
			_, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name})
			done <- err
		}()
		return done
	}
	first := call(t.Context(), "a")
	within(t, "call of the first", entered)
	other := call(t.Context(), "b")
	if name := within(t, "call of the other", entered); name != "b" {
		t.Errorf("%s entered, want the other volume to", name)
	}
	// The second call for a waits until the caller's deadline.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if code := status.Code(within(t, "answer", call(ctx, "a"))); code != codes.DeadlineExceeded && code != codes.Aborted {
		t.Errorf("a call that waited in vain: %v", code)
	}
	third := call(t.Context(), "a")
	close(release)
	for _, d := range []chan error{first, other, third} {
		if err := within(t, "answer", d); err != nil {
			t.Error(err)
		}
	}
	if most.Load() != 2 {
		t.Errorf("%d calls at once, want one per volume", most.Load())
	}
}

func TestListenCSI(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "csi.sock")
	ln, err := listenCSI("unix://" + path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listenCSI(path); !api.Is(err, api.InUse) || !strings.Contains(err.Error(), path) {
		t.Errorf("living socket: %v, want kind in use and its path", err)
	}
	// listenCSI replaces the socket of a killed process.
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = ln.Close()
	again, err := listenCSI("unix:" + path)
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	_ = again.Close()
	for _, bad := range []string{"tcp://127.0.0.1:1", "relative.sock", "unix://" + dir + strings.Repeat("x", 108)} {
		if _, err := listenCSI(bad); !api.Is(err, api.Invalid) {
			t.Errorf("%q: %v, want kind invalid", bad, err)
		}
	}
}

// TestStoppedEarly: a stop before the doors have opened is no failure.
func TestStoppedEarly(t *testing.T) {
	ln, err := listenCSI("unix://" + filepath.Join(t.TempDir(), "csi.sock"))
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(doors{identity: identity.New("v", nil)}, slog.New(slog.DiscardHandler))
	s.Stop()
	if err := serveDoors(s, ln); err != nil {
		t.Error(err)
	}
}
