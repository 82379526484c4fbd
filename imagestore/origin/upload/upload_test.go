package upload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
)

func listen(t *testing.T, stall time.Duration) *Server {
	t.Helper()
	u, err := Listen("127.0.0.1:0", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	u.Stall, u.ResumeTimeout = stall, 200*time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- u.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("uploads ended: %v", err)
		}
	})
	return u
}

// receive takes an upload as an import does.
func receive(up *Upload, ctx context.Context, fail error) (got []byte, err error) {
	s, err := up.Accept(ctx)
	if err != nil {
		up.Finish(err)
		return nil, err
	}
	if fail == nil {
		got, err = io.ReadAll(s)
	} else {
		err = fail
	}
	_ = s.Close()
	up.Finish(err)
	return got, err
}

func put(t *testing.T, url string, size int64, body io.Reader) (int, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = size
	return do(t, req)
}

func do(t *testing.T, req *http.Request) (int, string) {
	t.Helper()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(said)
}

func TestUpload(t *testing.T) {
	u := listen(t, 0)
	body := content(3<<20 + 17)
	form := func() (io.Reader, string) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		_ = w.WriteField("note", "not the image")
		f, _ := w.CreateFormFile("chunk", "x.img")
		_, _ = f.Write(body)
		_ = w.Close()
		return &b, w.FormDataContentType()
	}
	for _, c := range []struct {
		name string
		size int64
		send func(url string) (int, string)
		code int
		text string
	}{
		{"put", 0, func(url string) (int, string) { return put(t, url, int64(len(body)), bytes.NewReader(body)) }, 200, "ready"},
		{"put in chunks", 0, func(url string) (int, string) {
			return put(t, fmt.Sprintf("%s?size=%d", url, len(body)), -1, io.MultiReader(bytes.NewReader(body)))
		}, 200, "ready"},
		{"put of the size in the spec", int64(len(body)), func(url string) (int, string) {
			return put(t, url, -1, io.MultiReader(bytes.NewReader(body)))
		}, 200, "ready"},
		{"form", 0, func(url string) (int, string) {
			b, kind := form()
			req, _ := http.NewRequest(http.MethodPost, fmt.Sprintf("%s?size=%d", url, len(body)), b)
			req.Header.Set("Content-Type", kind)
			return do(t, req)
		}, 200, "ready"},
		{"too short", 0, func(url string) (int, string) {
			return put(t, fmt.Sprintf("%s?size=%d", url, len(body)+5), -1, io.MultiReader(bytes.NewReader(body)))
		}, 422, fmt.Sprintf("ended early, after %d of %d bytes", len(body), len(body)+5)},
		{"too long", 0, func(url string) (int, string) {
			return put(t, fmt.Sprintf("%s?size=%d", url, len(body)-5), -1, io.MultiReader(bytes.NewReader(body)))
		}, 422, "larger than announced"},
	} {
		t.Run(c.name, func(t *testing.T) {
			up := u.Expect(c.size, "")
			got := make(chan []byte, 1)
			go func() { b, _ := receive(up, t.Context(), nil); got <- b }()
			code, said := c.send(up.URL)
			if code != c.code || !strings.Contains(said, c.text) {
				t.Fatalf("answer %d %s, want %d %q", code, said, c.code, c.text)
			}
			if b := <-got; c.code == 200 && !bytes.Equal(b, body) {
				t.Fatalf("%d bytes came, want %d", len(b), len(body))
			}
			if code, _ := put(t, up.URL, 1, strings.NewReader("x")); code != 404 {
				t.Fatalf("the address still answers with %d", code)
			}
		})
	}
}

// TestUploadRefusals: an answer explains the mistake of a request, and the upload continues to wait.
func TestUploadRefusals(t *testing.T) {
	u := listen(t, 0)
	up := u.Expect(5, "")
	got := make(chan []byte, 1)
	go func() { b, _ := receive(up, t.Context(), nil); got <- b }()
	for _, c := range []struct {
		method, url, body string
		code              int
		text              string
	}{
		{"PUT", u.base + "guess", "hello", 404, `"state":"failed"`},
		{"DELETE", up.URL, "", 405, `"state":"starting"`},
		{"PUT", up.URL + "?size=x", "hello", 400, `"state":"starting"`},
		{"PUT", up.URL + "?size=6", "hello", 400, `"state":"starting"`},
		{"PUT", up.URL, "hello, world", 400, `"state":"starting"`},
	} {
		req, _ := http.NewRequest(c.method, c.url, strings.NewReader(c.body))
		if code, said := do(t, req); code != c.code || !strings.Contains(said, c.text) {
			t.Errorf("%s %s: %d %s, want %d, %s", c.method, c.url, code, said, c.code, c.text)
		}
	}
	unsized := u.Expect(0, "")
	if code, said := put(t, unsized.URL, -1, io.MultiReader(strings.NewReader("hello"))); code != 400 ||
		!strings.Contains(said, "?size=<bytes>") {
		t.Errorf("%d %s", code, said)
	}
	unsized.Finish(nil)
	if code, said := put(t, up.URL, 5, strings.NewReader("hello")); code != 200 || string(<-got) != "hello" {
		t.Fatalf("%d %s", code, said)
	}
}

func TestUploadIsCutAndStalls(t *testing.T) {
	u := listen(t, 200*time.Millisecond)
	dial := func(up *Upload) net.Conn {
		c, err := net.Dial("tcp", u.ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n0123456789", Path+up.token)
		return c
	}
	for name, end := range map[string]func(c net.Conn, cancel func()){
		"ended early, after 10 of 1000":       func(c net.Conn, _ func()) { _ = c.Close() },
		"no sender continued it within 200ms": func(net.Conn, func()) {},
		"ended early":                         func(_ net.Conn, cancel func()) { cancel() },
	} {
		up := u.Expect(0, "")
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error, 1)
		c := dial(up)
		go func() { _, err := receive(up, ctx, nil); got <- err }()
		end(c, cancel)
		if err := <-got; !api.Is(err, api.Unavailable) && !errors.Is(err, context.Canceled) || !errors.Is(err, context.Canceled) &&
			!strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want %q", err, name)
		}
		cancel()
		_ = c.Close()
	}
}

// TestUploadTellsTheOutcome: the sender receives the reason of a failed import, also in the middle of the transfer.
func TestUploadTellsTheOutcome(t *testing.T) {
	u := listen(t, 0)
	up := u.Expect(0, "")
	go func() { _, _ = receive(up, t.Context(), api.Errorf(api.Full, "disk 7 is full")) }()
	if code, said := put(t, up.URL, 100, bytes.NewReader(make([]byte, 100))); code != 422 ||
		!strings.Contains(said, "disk 7 is full") {
		t.Fatalf("%d %s", code, said)
	}
}

func content(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(b)
	return b
}
