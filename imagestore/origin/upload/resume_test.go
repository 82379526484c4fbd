package upload

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// partly sends the beginning of an upload over a connection of its own, like a sender before a cut.
func partly(t *testing.T, up *Upload, head string, body []byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", up.srv.ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	fmt.Fprintf(c, "PUT %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", Path+up.token, head)
	if _, err := c.Write(body); err != nil {
		t.Fatal(err)
	}
	return c
}

// state waits until the upload has the bytes before off.
func state(t *testing.T, up *Upload, off int64) State {
	t.Helper()
	for {
		resp, err := http.Get(up.URL)
		if err != nil {
			t.Fatal(err)
		}
		var s State
		err = json.NewDecoder(resp.Body).Decode(&s)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v", resp.Status, err)
		}
		if s.Offset >= off {
			return s
		}
		<-time.After(time.Millisecond)
	}
}

// from continues an upload.
func from(t *testing.T, up *Upload, body []byte, first, last int) (int, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, up.URL, bytes.NewReader(body[first:last]))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last-1, len(body)))
	return do(t, req)
}

func TestUploadIsContinued(t *testing.T) {
	body := content(2_000_000)
	for name, again := range map[string]func(t *testing.T, up *Upload, c net.Conn){
		"after a cut": func(t *testing.T, up *Upload, c net.Conn) {
			_ = c.Close()
			if code, said := from(t, up, body, 700_000, len(body)); code != 200 {
				t.Errorf("%d %s", code, said)
			}
		},
		"while the old connection hangs": func(t *testing.T, up *Upload, _ net.Conn) {
			if code, said := from(t, up, body, 700_000, len(body)); code != 200 {
				t.Errorf("%d %s", code, said)
			}
		},
		"from before": func(t *testing.T, up *Upload, c net.Conn) {
			_ = c.Close()
			if code, said := from(t, up, body, 1234, len(body)); code != 200 {
				t.Errorf("%d %s", code, said)
			}
		},
		"in parts": func(t *testing.T, up *Upload, c net.Conn) {
			_ = c.Close()
			for _, p := range [][2]int{{700_000, 700_001}, {700_001, 1_500_000}, {1_400_000, 1_999_999}} {
				if code, said := from(t, up, body, p[0], p[1]); code != 202 || !strings.Contains(said, "in-progress") {
					t.Errorf("%d %s", code, said)
				}
			}
			if code, said := from(t, up, body, 1_999_999, len(body)); code != 200 {
				t.Errorf("%d %s", code, said)
			}
		},
		"after mistakes": func(t *testing.T, up *Upload, c net.Conn) {
			_ = c.Close()
			if code, said := from(t, up, body, 800_000, len(body)); code != 409 || !strings.Contains(said, "700000 bytes are here") {
				t.Errorf("a gap: %d %s", code, said)
			}
			state(t, up, 700_000)
			for { // until the cut was noticed
				code, said := put(t, up.URL, int64(len(body)), bytes.NewReader(body))
				if code == 409 && strings.Contains(said, "curl: -C 700000") {
					break
				}
				if code != 409 || !strings.Contains(said, "another request continues") {
					t.Fatalf("all of it again: %d %s", code, said)
				}
			}
			if code, said := put(t, up.URL, 5, strings.NewReader("other")); code != 400 {
				t.Errorf("another size: %d %s", code, said)
			}
			if code, said := from(t, up, body, 700_000, len(body)); code != 200 {
				t.Errorf("%d %s", code, said)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			u := listen(t, 0)
			u.ResumeTimeout = time.Minute
			up := u.Expect(0, "")
			got := make(chan []byte, 1)
			go func() {
				b, err := receive(up, context.WithoutCancel(t.Context()), nil)
				if err != nil {
					t.Errorf("the import failed: %v", err)
				}
				got <- b
			}()
			c := partly(t, up, fmt.Sprintf("Content-Length: %d", len(body)), body[:700_000])
			if s := state(t, up, 700_000); s.Offset != 700_000 || s.Size != int64(len(body)) || !s.Sending ||
				s.CRC32C != origin.CRC32C(0, body[:700_000]) || s.State != api.ImageInProgress {
				t.Errorf("state %+v", s)
			}
			again(t, up, c)
			if b := <-got; !bytes.Equal(b, body) {
				t.Errorf("%d bytes came, want %d", len(b), len(body))
			}
		})
	}
}

// TestUploadThatIsLeft: an upload fails if no sender continues, and later requests find no upload.
func TestUploadThatIsLeft(t *testing.T) {
	u := listen(t, 0)
	up := u.Expect(0, "")
	got := make(chan error, 1)
	go func() { _, err := receive(up, t.Context(), nil); got <- err }()
	c := partly(t, up, "Content-Length: 1000", make([]byte, 10))
	state(t, up, 10)
	_ = c.Close()
	if err := <-got; !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "after 10 of 1000 bytes, and no sender") {
		t.Errorf("got %v", err)
	}
	if code, _ := put(t, up.URL, 1000, io.LimitReader(strings.NewReader(strings.Repeat("x", 1000)), 1000)); code != 404 {
		t.Errorf("the address still answers with %d", code)
	}
}
