package imagestore_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// secret makes a Secret, or replaces the Secret of the same name.
func (w *world) secret(ref *api.SecretRef, data map[string]string) {
	w.t.Helper()
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name}, StringData: data}
	_ = w.client.Delete(w.t.Context(), s)
	s.ResourceVersion = ""
	w.create(s)
}

func withSecret(ref *api.SecretRef) func(*api.BackingImageSpec) {
	return func(s *api.BackingImageSpec) { s.SecretRef = ref }
}

// failing waits for a failure with text and a next try.
func (w *world) failing(name, text string) {
	w.t.Helper()
	w.await(name, "fails with "+text+", and is tried again", func(i *api.BackingImage) bool {
		return i.Status.State == api.ImageFailed && strings.Contains(i.Status.Message, text) &&
			strings.Contains(i.Status.Message, "next try at")
	})
}

// TestImageOfASecret: for a server with credentials and an authority of its own, the status names the mistakes in the
// Secret, and the image is ready once the Secret is right.
func TestImageOfASecret(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	body := content(3<<20, 7)
	s := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		user, pass, _ := r.BasicAuth()
		if user != "me" || pass != "pass-1" || r.Header.Get("X-Tenant") != "t-1" {
			rw.WriteHeader(http.StatusUnauthorized)
			return
		}
		rw.Header().Set("ETag", `"v1"`)
		http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(body))
	}))
	t.Cleanup(s.Close)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	ca := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
	ref := &api.SecretRef{Name: "golden-login", Namespace: "images"}
	w.image("golden", api.SourceDownload, map[string]string{"url": s.URL + "/golden.img"}, withSecret(ref))
	w.failing("golden", "Secret golden-login in namespace images: does not exist")
	w.secret(ref, map[string]string{"user": "me"})
	w.failing("golden", "holds none of username, password, token, ca.crt and header.<name>")
	w.secret(ref, map[string]string{"ca.crt": "rubbish"})
	w.failing("golden", "no certificate in PEM form")
	w.secret(ref, map[string]string{"ca.crt": ca, "username": "me", "password": "pass-2", "header.X-Tenant": "t-1"})
	w.failing("golden", "are credentials missing, or wrong?")
	w.secret(ref, map[string]string{"ca.crt": ca, "username": "me", "password": "pass-1\n", "header.X-Tenant": "t-1"})
	img := w.state("golden", api.ImageReady)
	w.holds(0, img, body)
	if strings.Contains(w.copies("golden")[0].Status.Message, "pass") {
		t.Error("a message shows the password")
	}
}

// TestPrivateSourcesAreRefused: an internal address is refused, without a request, until the setting allows the
// address.
func TestPrivateSourcesAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.private(false)
	defer w.private(true)
	body := content(1<<20, 9)
	var hits atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		hits.Add(1)
		_, _ = rw.Write(body)
	}))
	t.Cleanup(s.Close)
	w.image("inside", api.SourceDownload, map[string]string{"url": s.URL})
	w.image("registry", api.SourceRegistry, map[string]string{"url": strings.Replace(s.URL, "http", "docker", 1) + "/a/b:c"})
	w.failing("inside", "127.0.0.1 is a loopback address: Drover fetches images from such an address only if the "+
		"setting allow-private-image-sources is true")
	w.failing("registry", "allow-private-image-sources")
	if hits.Load() != 0 {
		t.Errorf("the server was asked %d times", hits.Load())
	}
	w.private(true)
	w.holds(0, w.state("inside", api.ImageReady), body)
	w.await("registry", "is asked", func(i *api.BackingImage) bool {
		return strings.Contains(i.Status.Message, "manifest cannot be read") // the body is no manifest
	})
}

// pushDisk puts a containerDisk into a registry, and returns the size of the layer, which a tool may pack.
func pushDisk(t *testing.T, reg http.Handler, repo, tag string, disk []byte, pack ...string) int {
	t.Helper()
	push := func(method, path, kind string, body []byte) {
		t.Helper()
		r := httptest.NewRequest(method, "/v2/"+repo+path, bytes.NewReader(body))
		r.Header.Set("Content-Type", kind)
		rec := httptest.NewRecorder()
		if reg.ServeHTTP(rec, r); rec.Code/100 != 2 {
			t.Fatalf("%s %s: %d %s", method, path, rec.Code, rec.Body)
		}
	}
	const manifest, config, layer = "application/vnd.oci.image.manifest.v1+json",
		"application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar"
	describe := func(kind string, body []byte) map[string]any {
		return map[string]any{"mediaType": kind, "size": len(body), "digest": fmt.Sprintf("sha256:%x", sha256.Sum256(body))}
	}
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	err := tw.WriteHeader(&tar.Header{Name: "disk/golden.img", Mode: 0o644, Size: int64(len(disk))})
	if err == nil {
		_, err = tw.Write(disk)
	}
	if err = errors.Join(err, tw.Close()); err != nil {
		t.Fatal(err)
	}
	blob := b.Bytes()
	if len(pack) > 0 {
		blob = packedAs(t, blob, pack...)
	}
	l := describe(layer, blob)
	push(http.MethodPost, "/blobs/uploads/?digest="+l["digest"].(string), "application/octet-stream", blob)
	m, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": manifest, "layers": []any{l},
		"config": describe(config, []byte("{}"))})
	if err != nil {
		t.Fatal(err)
	}
	push(http.MethodPut, "/manifests/"+tag, manifest, m)
	return len(blob)
}

func TestImageOfARegistry(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	reg := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if user, pass, _ := r.BasicAuth(); user != "me" || pass != "pass-1" {
			rw.Header().Set("WWW-Authenticate", `Basic realm="here"`)
			rw.WriteHeader(http.StatusUnauthorized)
			return
		}
		reg.ServeHTTP(rw, r)
	}))
	t.Cleanup(s.Close)
	host := s.Listener.Addr().String()
	body := content(5<<20, 11)
	pushDisk(t, reg, "disks/golden", "1", body)

	url := map[string]string{"url": "docker://" + host + "/disks/golden:1"}
	plain, docker := &api.SecretRef{Name: "plain", Namespace: "default"}, &api.SecretRef{Name: "docker", Namespace: "default"}
	w.secret(plain, map[string]string{"username": "me", "password": "pass-1"})
	w.secret(docker, map[string]string{".dockerconfigjson": `{"auths":{"elsewhere.example":{"auth":"bWU6cA=="}}}`})
	w.image("anonymous", api.SourceRegistry, url)
	w.image("plain", api.SourceRegistry, url, withSecret(plain))
	w.image("docker", api.SourceRegistry, url, withSecret(docker))
	w.holds(0, w.state("plain", api.ImageReady), body)
	w.failing("anonymous", "wants credentials")
	w.failing("docker", "Secret docker in namespace default: the Secret's .dockerconfigjson has no credentials for")
	w.secret(docker, map[string]string{
		".dockerconfigjson": `{"auths":{"` + host + `":{"username":"me","password":"pass-1"}}}`})
	w.holds(0, w.state("docker", api.ImageReady), body)
}
