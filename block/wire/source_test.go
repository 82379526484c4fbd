package wire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// memory is a disk with a single layer in memory; other rooms have real disks.
type memory struct {
	block.Layers
	data    []byte
	extents []block.Extent
	mu      sync.Mutex
	open    int
}

func (m *memory) UID() string { return "disk" }
func (m *memory) Digest(string) (string, int64, error) {
	return fmt.Sprintf("root of %d", len(m.data)), 4096, nil
}

func (m *memory) Image(uid string) (block.Image, error) {
	if uid != "image" {
		return block.Image{}, errors.New("no such image")
	}
	return block.Image{UID: uid, Name: "golden", Layers: []string{"layer"}}, nil
}

func (m *memory) Open(uid string) (block.Source, error) {
	if uid != "layer" {
		return nil, errors.New("no such layer")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open++
	return &view{m}, nil
}

type view struct{ m *memory }

func (v *view) Size() int64 { return int64(len(v.m.data)) }
func (v *view) Close() error {
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	v.m.open--
	return nil
}
func (v *view) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(v.m.data).ReadAt(p, off)
}
func (v *view) Next(off int64) (block.Extent, error) {
	for _, e := range v.m.extents {
		if off < e.End() {
			e.Len, e.Off = e.End()-off, off
			return e, nil
		}
	}
	return block.Extent{}, errors.New("beyond the end")
}

// newMemory is a layer of many short runs.
func newMemory() *memory {
	m := &memory{data: make([]byte, 40<<20)}
	for off := int64(0); off < int64(len(m.data)); {
		e := block.Extent{Off: off, Len: min(int64(rand.IntN(8)+1)*block.Size, int64(len(m.data))-off),
			Kind: block.Kind(rand.IntN(3))}
		if e.Kind == block.Data {
			for i := range e.Len {
				m.data[off+i] = byte(rand.IntN(256))
			}
		}
		m.extents = append(m.extents, e)
		off = e.End()
	}
	return m
}

// sink is a block.Sink in memory.
type sink struct {
	data  []byte
	mu    sync.Mutex
	zeros int64
}

func (s *sink) WriteAt(p []byte, off int64) (int, error) { return copy(s.data[off:], p), nil }
func (s *sink) ZeroAt(_, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zeros += n
	return nil
}
func (s *sink) Sync(context.Context) error { return nil }

func serve(t *testing.T, id *Identity, o ServerOptions) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Identity, o.Log = id, slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- NewServer(o).Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return ln.Addr().String()
}

func TestLayerOfAnotherNode(t *testing.T) {
	a := testAuthority(t)
	m := newMemory()
	one, two := issued(t, a, "one"), issued(t, a, "two")
	addr := serve(t, one, ServerOptions{
		Disk: func(uid string) (block.Layers, error) {
			if uid != "disk" {
				return nil, errors.New("no such disk")
			}
			return m, nil
		},
		Kind: func(error) string { return "not found" },
	})
	c := NewClient(two, "one", addr)
	defer c.Close()
	src, err := c.Open(t.Context(), "disk", "layer")
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{data: make([]byte, src.Size())}
	began := time.Now()
	if err := block.Copy(t.Context(), s, src, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MiB of short runs took %v", len(m.data)>>20, time.Since(began))
	var zeros int64
	for _, e := range m.extents {
		if e.Kind == block.Zero {
			zeros += e.Len
		}
	}
	if !bytes.Equal(s.data, m.data) || s.zeros != zeros {
		t.Errorf("the copy differs; %d bytes of zeros, want %d", s.zeros, zeros)
	}
	if n, err := src.ReadAt(make([]byte, 10), src.Size()-4); n != 4 || !errors.Is(err, io.EOF) {
		t.Errorf("read over the end: %d, %v", n, err)
	}
	if root, _, err := c.Digest(t.Context(), "disk", "layer"); err != nil || root != fmt.Sprintf("root of %d", 40<<20) {
		t.Errorf("digest %q: %v", root, err)
	}
	if img, err := c.Image(t.Context(), "disk", "image"); err != nil || img.Name != "golden" {
		t.Errorf("image %+v: %v", img, err)
	}
	var said *Error
	if _, err := c.Open(t.Context(), "disk", "other"); !errors.As(err, &said) || said.Kind != "not found" {
		t.Errorf("a layer that is not there: %v", err)
	}
	if _, err := c.Open(t.Context(), "elsewhere", "layer"); !errors.As(err, &said) {
		t.Errorf("a disk that is not there: %v", err)
	}
	wrong := NewClient(two, "three", addr)
	defer wrong.Close()
	if err := wrong.refused(t.Context()); err == nil || errors.As(err, &said) {
		t.Errorf("a node that is another one: %v", err)
	}
}

// refused asks for a layer without trying again.
func (c *Client) refused(ctx context.Context) error {
	return c.callOnce(ctx, "layer", layerQuery("disk", "layer"), func(io.Reader) error { return nil })
}

func TestSendsAreBounded(t *testing.T) {
	a := testAuthority(t)
	one, two := issued(t, a, "one"), issued(t, a, "two")
	places := make(chan struct{}, 1)
	addr := serve(t, one, ServerOptions{
		Disk: func(string) (block.Layers, error) { return newMemory(), nil },
		Send: func(ctx context.Context, _ string) (func(), error) {
			select {
			case places <- struct{}{}:
				return func() { <-places }, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
	})
	c := NewClient(two, "one", addr)
	defer c.Close()
	end, err := c.Send(t.Context(), "disk")
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := c.Send(short, "disk"); err == nil {
		t.Error("two have a place where one is")
	}
	got := make(chan error, 1)
	go func() {
		end, err := c.Send(t.Context(), "disk")
		if err == nil {
			end()
		}
		got <- err
	}()
	end()
	select {
	case err := <-got:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("a place that is given up is not given to the next")
	}
}

// TestLayersOfOthersAreRefused: a node without permission learns nothing about a layer by any request; a node with
// permission does.
func TestLayersOfOthersAreRefused(t *testing.T) {
	suite.Slow(t)
	a := testAuthority(t)
	one, two, three := issued(t, a, "one"), issued(t, a, "two"), issued(t, a, "three")
	addr := serve(t, one, ServerOptions{
		Disk: func(string) (block.Layers, error) { return newMemory(), nil },
		Allow: func(_ context.Context, node, disk, uid string) error {
			if node != "two" || disk != "disk" {
				return fmt.Errorf("node %s may not read %s", node, uid)
			}
			return nil
		},
		Kind: func(error) string { return "denied" },
	})
	for _, c := range []struct {
		id  *Identity
		may bool
	}{{two, true}, {three, false}} {
		client := NewClient(c.id, "one", addr)
		defer client.Close()
		for _, what := range []string{"image", "layer", "extents", "data", "send"} {
			v := layerQuery("disk", "layer")
			if what == "image" {
				v.Set("uid", "image")
			}
			v.Set("off", "0")
			v.Set("len", "4096")
			resp, err := client.get(t.Context(), what, v)
			var said *Error
			if (err == nil) != c.may || err != nil && (!errors.As(err, &said) || said.Kind != "denied") {
				t.Errorf("node %s asks for %s: %v", c.id.Node(), what, err)
			}
			if err == nil {
				_ = resp.Body.Close()
			}
		}
		if _, err := client.Sums(t.Context(), "disk", "layer", maxLayer); !c.may && err == nil {
			t.Error("a third node reads digests")
		}
	}
}
