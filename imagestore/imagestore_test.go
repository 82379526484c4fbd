package imagestore_test

import (
	"bytes"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/planner"
	"drover.io/drover/replicas/stack"
)

func content(n int, seed byte) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{seed})
	_, _ = r.Read(b[:n/2])
	return b
}

func sum(b []byte) string {
	h := sha512.Sum512(b)
	return hex.EncodeToString(h[:])
}

func imageFile(t *testing.T, b []byte) map[string]string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "image.raw")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return map[string]string{"path": name}
}

// gate is a server which sends the first part of an image, and the rest when open is closed.
type gate struct {
	url  string
	open chan struct{}
	hits atomic.Int32
}

func newGate(t *testing.T, b []byte, first int) *gate {
	t.Helper()
	g := &gate{open: make(chan struct{})}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.hits.Add(1)
		w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		_, _ = w.Write(b[:first])
		_ = http.NewResponseController(w).Flush()
		select {
		case <-g.open:
			_, _ = w.Write(b[first:])
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	g.url = s.URL + "/image"
	return g
}

func (g *gate) params() map[string]string { return map[string]string{"url": g.url} }

func TestImageFromFile(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(6<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b), func(s *api.BackingImageSpec) { s.Checksum = sum(b) })
	img := w.state("golden", api.ImageReady)
	s := img.Status
	if s.UUID == "" || len(s.Layers) != 1 || s.Checksum != sum(b) || s.Format != "raw" || s.VirtualSize != 6<<20 ||
		s.Size <= 0 || s.Size > 4<<20 || s.ReadyCopies != 1 || s.Progress != 100 || s.VirtualSizeText != "6 MiB" || s.Message != "" ||
		len(s.Copies) != 1 || s.Copies[0].State != api.ImageReady || string(s.Copies[0].Disk) != w.disks[0].UID() ||
		!meta.IsStatusConditionTrue(s.Conditions, api.ConditionReady) {
		t.Errorf("status: %+v", s)
	}
	w.holds(0, img, b)
	imgs, err := w.disks[0].Images()
	if err != nil || len(imgs) != 1 || imgs[0].UID != string(s.UUID) {
		t.Errorf("on the disk: %+v, %v", imgs, err)
	}
}

// TestBytesOfAReadyCopy: the last bytes of a copy come after the last progress report, so the final status counts all
// bytes.
func TestBytesOfAReadyCopy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.stop()
	w.opts.ProgressEvery = 2 * time.Second
	w.start()
	g := newGate(t, content(6<<20, 1), 0)
	w.image("golden", api.SourceDownload, g.params())
	w.state("golden", api.ImageInProgress)
	close(g.open)
	w.state("golden", api.ImageReady)
	if st := w.copies("golden")[0].Status; st.BytesDone != 6<<20 || st.BytesTotal != 6<<20 {
		t.Errorf("%d of %d bytes are told of a ready copy", st.BytesDone, st.BytesTotal)
	}
}

// TestSameNameAgain: an image with the name of a deleted image is another image, and meets no remains of the deleted
// image.
func TestSameNameAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	var seen []api.UID
	for i := range byte(3) {
		b := content(3<<20, i)
		w.image("golden", api.SourceFile, imageFile(t, b))
		img := w.state("golden", api.ImageReady)
		w.holds(0, img, b)
		seen = append(seen, img.Status.UUID)
		w.delete(&api.BackingImage{}, "golden")
		w.gone("golden")
		w.clean(0)
	}
	if seen[0] == seen[1] || seen[1] == seen[2] {
		t.Errorf("UUIDs %v", seen)
	}
}

func TestDownloadShowsProgressAndGoesOnAfterRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(8<<20, 1)
	g := newGate(t, b, 6<<20)
	w.opts.Download.Stall = time.Minute
	w.stop()
	w.start()
	w.image("golden", api.SourceDownload, g.params())
	half := func() {
		w.await("golden", "is half there", func(i *api.BackingImage) bool {
			return i.Status.State == api.ImageInProgress && i.Status.Progress > 20 && i.Status.Progress < 100
		})
	}
	half()
	w.stop()
	w.start()
	w.eventually("it is asked for again", func() bool { return g.hits.Load() == 2 })
	half()
	close(g.open)
	w.holds(0, w.state("golden", api.ImageReady), b)

	// A restart finds a complete copy without a request to the server.
	w.stop()
	w.start()
	w.image("other", api.SourceFile, imageFile(t, b)) // a ready image shows the new reconcilers at work
	w.state("other", api.ImageReady)
	if img := w.state("golden", api.ImageReady); g.hits.Load() != 2 || img.Status.Copies[0].Message != "" {
		t.Errorf("%d requests; %+v", g.hits.Load(), img.Status)
	}
}

// refusing is an address without a listener: a socket has the port, so that no other process can listen there
// meanwhile.
func refusing(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", at.(*unix.SockaddrInet4).Port)
}

func TestFailures(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	refused := "http://" + refusing(t) + "/x"
	b := content(2<<20, 1)
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/html":
			_, _ = io.WriteString(w, "<html>log in</html>")
		case "/cut":
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:len(b)/2])
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(page.Close)
	for _, c := range []struct {
		name   string
		source api.SourceType
		params map[string]string
		sum    string
		text   string
		again  bool
	}{
		{"refused", api.SourceDownload, map[string]string{"url": refused}, "", "connection refused", true},
		{"missing", api.SourceDownload, map[string]string{"url": page.URL + "/no"}, "", "404", true},
		{"html", api.SourceDownload, map[string]string{"url": page.URL + "/html"}, "", "not a disk image", false},
		{"cut", api.SourceDownload, map[string]string{"url": page.URL + "/cut"}, "", "1048576 of 2097152 bytes", true},
		{"scheme", api.SourceDownload, map[string]string{"url": "ftp://host/x"}, "", `scheme "ftp"`, false},
		{"wrong-sum", api.SourceFile, imageFile(t, b), sum(nil), "wrong checksum", false},
		{"empty", api.SourceFile, imageFile(t, nil), "", "empty", false},
		{"no-file", api.SourceFile, map[string]string{"path": "/nowhere/x"}, "", "not on this node", true},
		{"no-backup", api.SourceRestore, map[string]string{"backup-url": "file:///x?backup=b&volume=v"}, "", "no backup", true},
		{"unknown", api.SourceFile, map[string]string{"path": "/x", "size": "1"}, "", `"size" is unknown`, false},
	} {
		w.image(c.name, c.source, c.params, func(s *api.BackingImageSpec) { s.Checksum = c.sum })
		img := w.state(c.name, api.ImageFailed)
		if !strings.Contains(img.Status.Message, c.text) {
			t.Errorf("%s: message %q, want %q", c.name, img.Status.Message, c.text)
		}
		again := strings.Contains(img.Status.Message, "next try at") || strings.Contains(img.Status.Message, "tries again")
		if again != c.again {
			t.Errorf("%s: message %q: a next try is promised: %v, want %v", c.name, img.Status.Message, again, c.again)
		}
		cond := meta.FindStatusCondition(img.Status.Conditions, api.ConditionReady)
		if cond == nil || cond.Status != metav1.ConditionFalse || cond.Reason != "Failed" {
			t.Errorf("%s: condition %+v", c.name, cond)
		}
	}
	// An image with a next try, like "cut", has files on the disk during each try.
	w.eventually("nothing is left", func() bool { return len(w.left(0)) == 0 }, func() string { return fmt.Sprint(w.left(0)) })
}

// TestRetry: an import which failed for a passing reason is tried again.
func TestRetry(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(2<<20, 1)
	var well atomic.Bool
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !well.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		_, _ = w.Write(b)
	}))
	t.Cleanup(s.Close)
	w.image("golden", api.SourceDownload, map[string]string{"url": s.URL})
	w.await("golden", "failed twice", func(i *api.BackingImage) bool {
		return strings.Contains(i.Status.Message, " failed, next try at") && !strings.Contains(i.Status.Message, "(try 1 failed")
	})
	well.Store(true)
	w.holds(0, w.state("golden", api.ImageReady), b)
	if c := w.copies("golden")[0].Status; c.Attempts != 0 || !c.NextTry.IsZero() || c.Message != "" {
		t.Errorf("left of the failures: %+v", c)
	}
}

// TestBusyServerIsLeftAlone: the importer waits as long as a busy server asks, up to a bound: for a web server and a
// registry, at the start and in the middle.
func TestBusyServerIsLeftAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	reg := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	body := content(2<<20, 3)
	pushDisk(t, reg, "disks/golden", "1", body)
	for name, c := range map[string]struct {
		source api.SourceType
		at     string // part of the address of refused requests
		after  int    // bytes sent before the refusal
		asks   string
		most   time.Duration
	}{
		"half-an-hour":  {api.SourceDownload, "", 0, "1800", 30 * time.Minute},
		"a-day":         {api.SourceDownload, "", 0, "86400", time.Hour},
		"in-the-middle": {api.SourceDownload, "", 1 << 20, "1800", 30 * time.Minute},
		"registry":      {api.SourceRegistry, "/v2/", 0, "1800", 30 * time.Minute},
		"manifest":      {api.SourceRegistry, "/manifests/", 0, "1800", 30 * time.Minute},
		"layer":         {api.SourceRegistry, "/blobs/", 0, "86400", time.Hour},
		"rest-of-it":    {api.SourceRegistry, "/blobs/", 1 << 20, "1800", 30 * time.Minute},
	} {
		served := http.Handler(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("ETag", `"one"`)
			http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(body))
		}))
		if c.source == api.SourceRegistry {
			served = reg
		}
		var asked atomic.Int32
		s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			switch {
			case !strings.Contains(r.URL.Path, c.at):
				served.ServeHTTP(rw, r)
			case asked.Add(1) == 1 && c.after > 0:
				served.ServeHTTP(&cutWriter{rw, c.after}, r)
			default:
				rw.Header().Set("Retry-After", c.asks)
				rw.WriteHeader(http.StatusTooManyRequests)
			}
		}))
		t.Cleanup(s.Close)
		url := s.URL + "/x"
		if c.source == api.SourceRegistry {
			url = strings.Replace(s.URL, "http", "docker", 1) + "/disks/golden:1"
		}
		before := time.Now()
		w.image(name, c.source, map[string]string{"url": url})
		img := w.state(name, api.ImageFailed)
		if m := img.Status.Message; !strings.Contains(m, "asks to come again in") || !strings.Contains(m, "next try at") {
			t.Errorf("%s: message %q", name, m)
		}
		next := w.copies(name)[0].Status.NextTry.Time
		if next.Before(before.Add(c.most-time.Second)) || next.After(time.Now().Add(c.most+time.Second)) {
			t.Errorf("%s: the next try is in %s", name, time.Until(next))
		}
		if want := int32(min(c.after, 1) + 1); asked.Load() > want {
			t.Errorf("%s: the server was asked %d times, want %d", name, asked.Load(), want)
		}
	}
}

// cutWriter breaks the connection after the first bytes.
type cutWriter struct {
	http.ResponseWriter
	left int
}

func (c *cutWriter) Write(p []byte) (int, error) {
	if len(p) > c.left {
		_, _ = c.ResponseWriter.Write(p[:c.left])
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	c.left -= len(p)
	return c.ResponseWriter.Write(p)
}

func sendUpload(t *testing.T, url string, body io.Reader, size int64) (int, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = size
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	said, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(said)
}

func (w *world) uploadURL(name string) string {
	w.t.Helper()
	url := ""
	w.eventually("an upload is expected", func() bool {
		for _, c := range w.copies(name) {
			if c.Status.State == api.ImageStarting {
				url = c.Status.UploadURL
			}
		}
		return url != ""
	})
	return url
}

func TestUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(5<<20, 1)
	w.image("golden", api.SourceUpload, map[string]string{"size": fmt.Sprint(len(b))})
	w.state("golden", api.ImageStarting)
	first := w.uploadURL("golden")

	// A restart before the first byte: the address changes, because the node here chooses another port.
	w.stop()
	w.start()
	second := first
	w.eventually("there is another address", func() bool { second = w.uploadURL("golden"); return second != first })
	if code, said := sendUpload(t, second, bytes.NewReader(b), int64(len(b))); code != 200 {
		t.Fatalf("%d %s", code, said)
	}
	w.holds(0, w.state("golden", api.ImageReady), b)
	if c := w.copies("golden")[0]; c.Status.UploadURL != "" {
		t.Errorf("the address is still told: %+v", c.Status)
	}

	// A wrong image: both the sender and the object get the error.
	w.image("wrong", api.SourceUpload, nil, func(s *api.BackingImageSpec) {
		s.SourceParameters, s.Checksum = map[string]string{}, sum(nil)
	})
	if code, said := sendUpload(t, w.uploadURL("wrong"), bytes.NewReader(b), int64(len(b))); code != 422 ||
		!strings.Contains(said, "wrong checksum") {
		t.Errorf("%d %s", code, said)
	}
	if img := w.state("wrong", api.ImageFailed); !strings.Contains(img.Status.Message, "wrong checksum") {
		t.Errorf("message %q", img.Status.Message)
	}

	// A restart in the middle, before the first checkpoint: the upload starts again from the beginning.
	w.image("half", api.SourceUpload, map[string]string{"size": fmt.Sprint(len(b))})
	r, pw := io.Pipe()
	url := w.uploadURL("half")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		req, _ := http.NewRequest(http.MethodPut, url, r)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	if _, err := pw.Write(b[:3<<20]); err != nil {
		t.Fatal(err)
	}
	w.await("half", "is in progress", func(i *api.BackingImage) bool { return i.Status.State == api.ImageInProgress })
	w.stop()
	_ = pw.CloseWithError(io.ErrClosedPipe)
	<-ended
	w.start()
	w.eventually("there is another address", func() bool { second = w.uploadURL("half"); return second != url })
	if code, said := sendUpload(t, second, bytes.NewReader(b), int64(len(b))); code != 200 {
		t.Fatalf("%d %s", code, said)
	}
	w.holds(0, w.state("half", api.ImageReady), b)
}

func (w *world) volume(name, image string, disk int) {
	w.t.Helper()
	vol := &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: api.VolumeSpec{Size: 10 << 20, BackingImage: image}}
	w.create(vol)
	var img api.BackingImage
	if err := w.client.Get(w.t.Context(), client.ObjectKey{Name: image}, &img); err != nil {
		w.t.Fatal(err)
	}
	w.create(&api.Replica{ObjectMeta: metav1.ObjectMeta{Name: name + ".r",
		Labels: map[string]string{api.LabelVolume: name, api.LabelImage: image}},
		Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: name, VolumeUID: api.NewUID(), Node: w.node,
			Disk: api.UID(w.disks[disk].UID()), Size: 10 << 20, Layers: img.Status.Layers}})
}

// noVolume deletes a volume and the replica.
func (w *world) noVolume(name string) {
	w.t.Helper()
	w.delete(&api.Replica{}, name+".r")
	w.delete(&api.Volume{}, name)
}

func TestDeletionWaitsForVolumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(3<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b))
	img := w.state("golden", api.ImageReady)
	w.volume("vol-a", "golden", 0)
	w.volume("vol-b", "golden", 0)
	w.delete(&api.BackingImage{}, "golden")
	w.await("golden", "is in use", func(i *api.BackingImage) bool {
		c := meta.FindStatusCondition(i.Status.Conditions, planner.ConditionInUse)
		return c != nil && c.Status == metav1.ConditionTrue && strings.Contains(c.Message, "vol-a, vol-b")
	})
	w.noVolume("vol-a")
	w.await("golden", "is used by one", func(i *api.BackingImage) bool {
		c := meta.FindStatusCondition(i.Status.Conditions, planner.ConditionInUse)
		return c != nil && strings.HasSuffix(c.Message, ": vol-b")
	})
	w.holds(0, img, b)
	w.noVolume("vol-b")
	w.gone("golden")
	w.clean(0)
}

// TestDeletionWaitsForStacks: the disk refuses a deletion while a stack names the layer, even if no object does.
func TestDeletionWaitsForStacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.image("golden", api.SourceFile, imageFile(t, content(3<<20, 1)))
	img := w.state("golden", api.ImageReady)
	rep := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 10 << 20,
		Layers: []string{string(img.Status.Layers[0])}}
	if err := w.disks[0].CreateReplica(t.Context(), rep); err != nil {
		t.Fatal(err)
	}
	w.delete(&api.BackingImage{}, "golden")
	w.eventually("the copy says why it stays", func() bool {
		c := w.copies("golden")
		return len(c) == 1 && strings.Contains(c[0].Status.Message, "volume v uses it")
	})
	if err := w.disks[0].RemoveReplica(rep.UID); err != nil {
		t.Fatal(err)
	}
	w.gone("golden")
	w.clean(0)
}

// TestDeleteAtAnyMoment: a deletion in any state leaves nothing, on the disk or in the API.
func TestDeleteAtAnyMoment(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(16<<20, 1)
	g := newGate(t, b, 13<<20)
	w.image("no-disk", api.SourceFile, imageFile(t, b), func(s *api.BackingImageSpec) { s.DiskSelector = []string{"none"} })
	w.await("no-disk", "has no disk", func(i *api.BackingImage) bool {
		return i.Status.State == api.ImagePending && strings.Contains(i.Status.Message, "tags none")
	})
	w.image("waiting", api.SourceUpload, map[string]string{})
	w.state("waiting", api.ImageStarting)
	w.image("half", api.SourceDownload, g.params())
	w.await("half", "is half there", func(i *api.BackingImage) bool { return i.Status.Progress > 20 })
	w.image("failed", api.SourceFile, imageFile(t, nil))
	w.state("failed", api.ImageFailed)
	for _, name := range []string{"no-disk", "waiting", "half", "failed"} {
		w.delete(&api.BackingImage{}, name)
		w.gone(name)
	}
	w.clean(0)
	params := imageFile(t, b)
	for i := range 25 { // and at moments of chance
		w.image("soon", api.SourceFile, params)
		wait := time.NewTimer(time.Duration(i*3) * time.Millisecond)
		<-wait.C
		w.delete(&api.BackingImage{}, "soon")
		w.gone("soon")
		// An API server which read the image before the finalizer removes the image at once: the copy is deleted a
		// moment later.
		w.eventually("nothing of it is left", func() bool { return len(w.left(0)) == 0 },
			func() string { return fmt.Sprint(w.left(0)) })
	}
}

func TestCopiesOnSeveralDisks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	b := content(3<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b), func(s *api.BackingImageSpec) { s.DiskSelector = []string{"disk-1"} })
	img := w.state("golden", api.ImageReady)
	w.holds(1, img, b)
	if n := len(w.copies("golden")); n != 1 {
		t.Fatalf("%d copies", n)
	}

	// A replica on another disk causes a copy there.
	w.volume("vol", "golden", 2)
	w.await("golden", "is on two disks", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 2 })
	w.holds(2, img, b)

	// The minimum cannot be reached with the selectors.
	change := func(f func(*api.BackingImageSpec)) {
		w.eventually("the image takes the change", func() bool {
			img := &api.BackingImage{}
			if err := w.client.Get(t.Context(), client.ObjectKey{Name: "golden"}, img); err != nil {
				t.Fatal(err)
			}
			f(&img.Spec)
			return w.client.Update(t.Context(), img) == nil
		})
	}
	change(func(s *api.BackingImageSpec) { s.MinNumberOfCopies = 3 })
	w.await("golden", "says what is missing", func(i *api.BackingImage) bool {
		c := meta.FindStatusCondition(i.Status.Conditions, api.ConditionReady)
		return i.Status.State == api.ImageReady && c.Reason == "TooFewCopies" && strings.Contains(i.Status.Message, "2 of 3 copies")
	})
	change(func(s *api.BackingImageSpec) { s.DiskSelector = nil })
	w.await("golden", "is on three disks", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 3 })
	w.holds(0, img, b)

	// Clean-up removes unneeded copies, and no more.
	change(func(s *api.BackingImageSpec) {
		s.MinNumberOfCopies = 1
		for _, d := range w.disks {
			s.CleanupDisks = append(s.CleanupDisks, api.UID(d.UID()))
		}
	})
	w.await("golden", "is only where it is used", func(i *api.BackingImage) bool {
		return len(i.Status.Copies) == 1 && string(i.Status.Copies[0].Disk) == w.disks[2].UID()
	})
	w.clean(0)
	w.clean(1)
	w.holds(2, img, b)

	// A larger minimum makes a second copy again.
	change(func(s *api.BackingImageSpec) { s.CleanupDisks = nil; s.MinNumberOfCopies = 2 })
	w.await("golden", "is on two disks", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 2 })
}
