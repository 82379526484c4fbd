package kubeapi_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi"
)

// TestUploadIsForwarded: the API server forwards an upload to the node, and the node's answer back, unchanged but for
// the token. Without the token, the API server forwards nothing.
func TestUploadIsForwarded(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir()})
	c := newClient(t, s.Config)
	sent := make([]byte, 24<<20)
	for i := range sent {
		sent[i] = byte(i * 7 >> (i % 5))
	}
	half := make(chan struct{}, 1) // the node has read a part of an unfinished body
	node := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/upload/secret" || r.Header.Get("Authorization") != "" {
			t.Errorf("%s came with %q", r.URL, r.Header)
		}
		switch r.URL.RawQuery {
		case "streams":
			_, _ = io.ReadFull(r.Body, make([]byte, 1000))
			half <- struct{}{}
		case "refused":
			http.Error(w, `{"message":"not an image"}`, http.StatusUnprocessableEntity)
			return
		}
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		fmt.Fprintf(w, "%s %s %d %x %v", r.Method, r.Header.Get("Content-Range"), n, sum.Sum(nil), err)
	}))
	defer node.Close()
	cp := &api.ImageCopy{Spec: api.ImageCopySpec{Image: "golden", UUID: api.NewUID(), Layers: []api.UID{api.NewUID()},
		Node: "here", Disk: api.NewUID()}}
	cp.Name, cp.Labels = "golden.x", map[string]string{api.LabelImage: "golden"}
	if err := c.Create(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
	tell := func(to, authority string) {
		t.Helper()
		cp.Status.State, cp.Status.UploadURL, cp.Status.UploadCA = api.ImageStarting, to, authority
		if err := c.Status().Update(t.Context(), cp); err != nil {
			t.Fatal(err)
		}
	}
	path := s.Config.Host + api.UploadPath("golden")
	ask := func(h *http.Client, method, to string, body io.Reader, size int64, header ...string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, to, body)
		if err != nil {
			t.Fatal(err)
		}
		if body != nil {
			req.ContentLength = size
		}
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := h.Do(req)
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
	for name, protocols := range map[string][]string{"HTTP/1.1": {"http/1.1"}, "HTTP/2": nil} {
		cfg := rest.CopyConfig(s.Config)
		cfg.NextProtos = protocols
		h, err := rest.HTTPClientFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		tell("", "")
		if code, said := ask(h, "PUT", path, strings.NewReader("x"), 1); code != 404 || !strings.Contains(said, "no upload") {
			t.Fatalf("%s: nothing is expected: %d %s", name, code, said)
		}
		tell(node.URL+"/v1/upload/secret", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
			Bytes: node.Certificate().Raw})))
		want := fmt.Sprintf("PUT bytes 0-9/10 %d %x <nil>", len(sent), sha256.Sum256(sent))
		for _, size := range []int64{int64(len(sent)), -1} {
			if code, said := ask(h, "PUT", path, bytes.NewReader(sent), size, "Content-Range", "bytes 0-9/10"); code != 200 ||
				said != want {
				t.Fatalf("%s: %d %s, want %s", name, code, said, want)
			}
		}
		// curl asks before sending.
		if code, said := ask(h, "PUT", path, bytes.NewReader(sent), int64(len(sent)), "Expect", "100-continue"); code != 200 {
			t.Fatalf("%s: %d %s", name, code, said)
		}
		if code, said := ask(h, "GET", path, nil, 0); code != 200 || !strings.HasPrefix(said, "GET  0 ") {
			t.Fatalf("%s: %d %s", name, code, said)
		}
		// The node has the beginning while the end is not sent yet.
		r, w := io.Pipe()
		go func() {
			_, _ = w.Write(make([]byte, 1000))
			<-half
			_, _ = w.Write([]byte("end"))
			_ = w.Close()
		}()
		if code, said := ask(h, "PUT", path+"?streams", r, -1); code != 200 || !strings.HasPrefix(said, "PUT  3 ") {
			t.Fatalf("%s: %d %s", name, code, said)
		}
		if code, said := ask(h, "PUT", path+"?refused", strings.NewReader("x"), 1); code != 422 ||
			!strings.Contains(said, "not an image") {
			t.Fatalf("%s: %d %s", name, code, said)
		}
		tell(node.URL+"/v1/upload/secret", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: otherCA(t)})))
		if code, said := ask(h, "GET", path, nil, 0); code != 502 || !strings.Contains(said, "node here") {
			t.Fatalf("%s: a node of another authority: %d %s", name, code, said)
		}
		h.CloseIdleConnections()
	}
	if code, said := get(t, s, api.UploadPath("golden"), "wrong", "*/*"); code != 401 {
		t.Fatalf("without the token: %d %s", code, said)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tell("https://"+ln.Addr().String()+"/x", cp.Status.UploadCA)
	_ = ln.Close()
	if code, said := get(t, s, api.UploadPath("golden"), s.Config.BearerToken, "*/*"); code != 502 ||
		!strings.Contains(said, "node here") {
		t.Fatalf("a node that is away: %d %s", code, said)
	}
}

func otherCA(t *testing.T) []byte {
	t.Helper()
	_, ca, err := kubeapi.NewCertificate("x")
	if err != nil {
		t.Fatal(err)
	}
	b, _ := pem.Decode(ca)
	return b.Bytes
}
