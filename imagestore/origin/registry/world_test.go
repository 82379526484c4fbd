package registry

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
)

// quick are options for a registry of this test, on 127.0.0.1 alone.
var quick = Options{Start: 20 * time.Second, Stall: 20 * time.Second, Pause: time.Millisecond,
	Arch: "amd64", Allow: func(a netip.Addr) bool { return a == netip.MustParseAddr("127.0.0.1") }}

// world is a real registry. A test may set door, a handler before the registry.
type world struct {
	t    testing.TB
	reg  http.Handler
	host string
	url  string

	mu   sync.Mutex
	door func(w http.ResponseWriter, r *http.Request, next http.Handler)
	log  []string
}

func newWorld(t testing.TB, start func(*httptest.Server)) *world {
	t.Helper()
	w := &world{t: t, reg: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.log = append(w.log, r.Method+" "+r.URL.Path+" "+r.Header.Get("Range"))
		door := w.door
		w.mu.Unlock()
		if door != nil {
			door(rw, r, w.reg)
			return
		}
		w.reg.ServeHTTP(rw, r)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	start(s)
	t.Cleanup(s.Close)
	w.url, w.host = s.URL, s.Listener.Addr().String()
	return w
}

func plainWorld(t *testing.T) *world { return newWorld(t, (*httptest.Server).Start) }

func (w *world) ref(rest string) string { return Scheme + w.host + "/" + rest }

// blobs counts the requests for blobs.
func (w *world) blobs() (all, ranged int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.log {
		if strings.HasPrefix(l, "GET") && strings.Contains(l, "/blobs/") {
			all++
			if strings.Contains(l, "bytes=") {
				ranged++
			}
		}
	}
	return all, ranged
}

// push sends a request straight into the registry.
func (w *world) push(method, path, kind string, body []byte) {
	w.t.Helper()
	r := httptest.NewRequest(method, path, bytes.NewReader(body))
	r.Header.Set("Content-Type", kind)
	rec := httptest.NewRecorder()
	w.reg.ServeHTTP(rec, r)
	if rec.Code/100 != 2 {
		w.t.Fatalf("%s %s: %d %s", method, path, rec.Code, rec.Body)
	}
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

type object = map[string]any

// blob pushes a layer and describes the layer.
func (w *world) blob(repo string, kind types.MediaType, body []byte) object {
	w.t.Helper()
	w.push(http.MethodPost, "/v2/"+repo+"/blobs/uploads/?digest="+digest(body), "application/octet-stream", body)
	return object{"mediaType": kind, "size": len(body), "digest": digest(body)}
}

// manifest pushes anything as a manifest and describes the manifest.
func (w *world) manifest(repo, tag string, kind types.MediaType, m object) object {
	w.t.Helper()
	body, err := json.Marshal(m)
	if err != nil {
		w.t.Fatal(err)
	}
	w.push(http.MethodPut, "/v2/"+repo+"/manifests/"+tag, string(kind), body)
	return object{"mediaType": kind, "size": len(body), "digest": digest(body)}
}

// image pushes an image of the layers, the lowest first, each packed with gzip.
func (w *world) image(repo, tag string, layers ...[]byte) object {
	w.t.Helper()
	var all []object
	for _, l := range layers {
		all = append(all, w.blob(repo, types.OCILayer, pack(w.t, "gzip", l)))
	}
	return w.manifest(repo, tag, types.OCIManifestSchema1, image(types.OCIManifestSchema1, all...))
}

func image(kind types.MediaType, layers ...object) object {
	config := object{"mediaType": types.OCIConfigJSON, "size": 2, "digest": digest([]byte("{}"))}
	return object{"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers}
}

// file is an entry of an archive.
type file struct {
	name string
	body []byte
	kind byte
	link string
}

// tarOf makes a layer's archive.
func tarOf(t testing.TB, files ...file) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, f := range files {
		if f.kind == 0 {
			f.kind = tar.TypeReg
		}
		h := &tar.Header{Name: f.name, Typeflag: f.kind, Linkname: f.link, Size: int64(len(f.body)), Mode: 0o644}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write(f.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func disked(t testing.TB, body []byte) []byte {
	return tarOf(t, file{name: "disk/", kind: tar.TypeDir}, file{name: "disk/disk.img", body: body})
}

func pack(t testing.TB, how string, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	var w io.WriteCloser
	switch how {
	case "gzip":
		w, _ = gzip.NewWriterLevel(&buf, gzip.BestSpeed)
	case "zstd":
		w, _ = zstd.NewWriter(&buf, zstd.WithEncoderConcurrency(1))
	default:
		return b
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// noise does not compress.
func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(b)
	return b
}

// run runs a tool of the system in a folder.
func run(t *testing.T, dir string, tool string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), tool, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", tool, args, err, out)
	}
}

func load(t *testing.T, path ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// fetch reads the whole disk.
func fetch(t *testing.T, ref string, o Options) ([]byte, int64, error) {
	t.Helper()
	s, err := Open(t.Context(), ref, o)
	if err != nil {
		return nil, 0, err
	}
	defer s.Close()
	b, err := io.ReadAll(s)
	if serr := s.Settled(); (serr == nil) != (err == nil) {
		t.Errorf("Read says %v, Settled says %v", err, serr)
	}
	return b, s.Size, err
}

// same checks that the whole disk arrives.
func same(t *testing.T, ref string, o Options, want []byte) {
	t.Helper()
	got, size, err := fetch(t, ref, o)
	if err != nil || !bytes.Equal(got, want) || size != int64(len(want)) {
		t.Fatalf("got %d of %d bytes, size %d: %v", len(got), len(want), size, err)
	}
}

// fails checks an error, which must reveal no secret.
func fails(t *testing.T, err error, kind api.Kind, text string) {
	t.Helper()
	if err == nil || api.KindOf(err) != kind || !strings.Contains(err.Error(), text) {
		t.Fatalf("got %v (kind %v), want %q of kind %v", err, api.KindOf(err), text, kind)
	}
	if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "signature=") {
		t.Fatalf("the message tells a secret: %v", err)
	}
	if len(err.Error()) > 700 || strings.ContainsAny(err.Error(), "\n\r\x00") {
		t.Fatalf("not a message for a line: %q", err)
	}
}
