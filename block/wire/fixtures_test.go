package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"drover.io/drover/block"
)

// testdata/v1 holds every request between nodes here, and the answers. Nodes of different versions exchange these
// messages during an upgrade, so the file never changes: a new message gets a new path and a new file.
const transcript = "testdata/v1/transcript"

// scribe records a client's requests and the answers.
type scribe struct {
	http.RoundTripper
	mu    sync.Mutex
	lines []string
}

func (s *scribe) RoundTrip(q *http.Request) (*http.Response, error) {
	a, err := s.RoundTripper.RoundTrip(q)
	if err != nil {
		return nil, err
	}
	body := []byte("(open)")
	if q.URL.Path != "/v1/send" { // the answer stays open
		body, err = io.ReadAll(a.Body)
		if err != nil {
			return nil, err
		}
		_ = a.Body.Close()
		a.Body = io.NopCloser(bytes.NewReader(body))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, fmt.Sprintf("%s %s", q.Method, q.URL.RequestURI()),
		fmt.Sprintf("%d %s %q", a.StatusCode, a.Header.Get("Content-Type"), body))
	return a, nil
}

// told is a disk with a constant layer and image.
type told struct{ *memory }

var toldImage = block.Image{UID: "image", Name: "golden", Layers: []string{"base", "layer"}, Format: "qcow2.xz",
	VirtualSize: 40000, Checksum: "5e5e", Digest: "c0ffee", Object: json.RawMessage(`{"spec":{"size":1}}`)}

func (t told) Image(uid string) (block.Image, error) {
	if uid != "image" {
		return block.Image{}, errors.New("no such image")
	}
	return toldImage, nil
}

func (t told) Sums(string) ([]byte, error) { return []byte("sums\x00\xff"), nil }

// TestNodesReadLayersAsBefore has a client send every request to a server. Client and server decode the messages, so a
// transcript equal to the old transcript proves that both read old messages, too.
func TestNodesReadLayersAsBefore(t *testing.T) {
	a := testAuthority(t)
	m := &memory{data: bytes.Repeat([]byte("0123456789abcdef"), 3*block.Size/16), extents: []block.Extent{
		{Off: 0, Len: block.Size, Kind: block.Data}, {Off: block.Size, Len: block.Size, Kind: block.Zero},
		{Off: 2 * block.Size, Len: block.Size, Kind: block.Hole}}}
	addr := serve(t, issued(t, a, "one"), ServerOptions{
		Disk: func(uid string) (block.Layers, error) {
			if uid != "disk" {
				return nil, errors.New("no such disk")
			}
			return told{m}, nil
		},
		Kind: func(error) string { return "not found" },
	})
	c := NewClient(issued(t, a, "two"), "one", addr)
	defer c.Close()
	s := &scribe{RoundTripper: c.http.Transport}
	c.http.Transport = s
	ctx := t.Context()
	if img, err := c.Image(ctx, "disk", "image"); err != nil || !reflect.DeepEqual(img, toldImage) {
		t.Errorf("image %+v, %v", img, err)
	}
	if root, n, err := c.Digest(ctx, "disk", "layer"); err != nil || root != "root of 12288" || n != 4096 {
		t.Errorf("digest %s, %d, %v", root, n, err)
	}
	if sums, err := c.Sums(ctx, "disk", "layer", maxLayer); err != nil || string(sums) != "sums\x00\xff" {
		t.Errorf("sums %q, %v", sums, err)
	}
	buf := make([]byte, 20)
	if err := c.Read(ctx, "disk", "layer", buf, 4092); err != nil || string(buf) != "cdef0123456789abcdef" {
		t.Errorf("it reads %q, %v", buf, err)
	}
	src, err := c.Open(ctx, "disk", "layer")
	if err != nil || src.Size() != 3*block.Size {
		t.Fatalf("open: %v", err)
	}
	for _, want := range m.extents {
		if e, err := src.Next(want.Off); err != nil || e != want {
			t.Errorf("extent %+v, %v; want %+v", e, err, want)
		}
	}
	end, err := c.Send(ctx, "disk")
	if err != nil {
		t.Fatal(err)
	}
	end()
	var said *Error
	_, err = c.Image(ctx, "disk", "none")
	if !errors.As(err, &said) || *said != (Error{"one", "not found", "no such image"}) {
		t.Errorf("an image that does not exist: %v", err)
	}
	got := withoutRepeats(strings.Join(s.lines, "\n") + "\n")
	was, err := os.ReadFile(transcript)
	if errors.Is(err, os.ErrNotExist) && os.Getenv("DROVER_WRITE_FIXTURES") != "" {
		if err := errors.Join(os.MkdirAll("testdata/v1", 0o755), os.WriteFile(transcript, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if got != string(was) {
		t.Errorf("the protocol changed. It is\n%s\nand was\n%s", got, was)
	}
}

// withoutRepeats drops an exchange equal to the exchange before: a client may ask for a layer's size again to bound an
// answer. An exchange is a line of the request and a line of the answer.
func withoutRepeats(transcript string) string {
	lines := strings.SplitAfter(transcript, "\n")
	var kept []string
	for ; len(lines) > 1; lines = lines[2:] {
		if n := len(kept); n >= 2 && slices.Equal(kept[n-2:], lines[:2]) {
			continue
		}
		kept = append(kept, lines[:2]...)
	}
	return strings.Join(append(kept, lines...), "")
}
