package imagestore_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// mayFollow lists the visible states of a copy after each state. Short states may not show.
var mayFollow = map[api.ImageState][]api.ImageState{
	"":                  {api.ImagePending, api.ImageUnknown, api.ImageReady, api.ImageFailed},
	api.ImagePending:    {api.ImageStarting, api.ImageInProgress, api.ImageTransfer, api.ImageReady, api.ImageFailed, api.ImageUnknown},
	api.ImageStarting:   {api.ImagePending, api.ImageInProgress, api.ImageTransfer, api.ImageReady, api.ImageFailed, api.ImageUnknown},
	api.ImageInProgress: {api.ImagePending, api.ImageTransfer, api.ImageReady, api.ImageFailed, api.ImageUnknown},
	api.ImageTransfer:   {api.ImagePending, api.ImageReady, api.ImageFailed, api.ImageUnknown},
	api.ImageReady:      {api.ImagePending, api.ImageFailed, api.ImageUnknown},
	api.ImageFailed: {api.ImagePending, api.ImageUnknown, api.ImageReady,
		api.ImageStarting, api.ImageInProgress, api.ImageTransfer}, // a restore waited for its store
	api.ImageUnknown: {api.ImagePending, api.ImageReady, api.ImageFailed},
}

// steps watches the copies and records the states of each copy.
type steps struct {
	mu   sync.Mutex
	seen map[string][]api.ImageState // by UID of the copy
}

func watchSteps(t *testing.T, w *world) *steps {
	t.Helper()
	s := &steps{seen: map[string][]api.ImageState{}}
	watch, err := w.client.Watch(t.Context(), &api.ImageCopyList{})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ev := range watch.ResultChan() {
			c, ok := ev.Object.(*api.ImageCopy)
			if !ok {
				continue
			}
			s.mu.Lock()
			if all := s.seen[string(c.UID)]; len(all) == 0 || all[len(all)-1] != c.Status.State {
				s.seen[string(c.UID)] = append(all, c.Status.State)
			}
			s.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		watch.Stop()
		<-ended
		for _, all := range s.seen {
			for i := 1; i < len(all); i++ {
				if !slices.Contains(mayFollow[all[i-1]], all[i]) {
					t.Errorf("a copy went from %q to %q: %q", all[i-1], all[i], all)
				}
			}
		}
	})
	return s
}

// frozen is a disk with a file system of its own, which can make writers wait.
func frozen(t *testing.T) (dir string, freeze, thaw func()) {
	t.Helper()
	img, dir := filepath.Join(t.TempDir(), "img"), t.TempDir()
	command := func(args ...string) string {
		t.Helper()
		said, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v: %s", args, err, said)
		}
		return strings.TrimSpace(string(said))
	}
	command("truncate", "-s", "512M", img)
	command("mkfs.ext4", "-q", "-b", "4096", "-m", "0", img)
	command("mount", "-o", "loop", img, dir)
	t.Cleanup(func() { command("umount", dir) })
	is := false
	call := func(what uint, now bool) func() {
		return func() {
			t.Helper()
			if is == now {
				return
			}
			f, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := unix.IoctlSetInt(int(f.Fd()), what, 0); err != nil {
				t.Fatal(err)
			}
			is = now
		}
	}
	const fifreeze, fithaw = 0xc0045877, 0xc0045878
	freeze, thaw = call(fifreeze, true), call(fithaw, false)
	t.Cleanup(thaw)
	return dir, freeze, thaw
}

// held passes a body up to a byte, and the rest after the release.
type held struct {
	*bytes.Reader
	at   int64
	let  chan struct{}
	once sync.Once
}

func newHeld(b []byte, at int) *held {
	return &held{Reader: bytes.NewReader(b), at: int64(at), let: make(chan struct{})}
}

func (h *held) release() { h.once.Do(func() { close(h.let) }) }

func (h *held) Read(p []byte) (int, error) {
	pos := h.Size() - int64(h.Len())
	if pos == h.at {
		<-h.let
	} else if pos < h.at {
		p = p[:min(int64(len(p)), h.at-pos)]
	}
	return h.Reader.Read(p)
}

// The body of the tests: data, and then zeros, so that held bytes cause no write.
const (
	stateData = 4 << 20
	stateSize = 16 << 20
	stateHeld = 12 << 20
)

func stateBody(seed byte) []byte {
	b := make([]byte, stateSize)
	copy(b, content(2*stateData, seed)[:stateData])
	return b
}

// way is a source type in the tests: begin makes the image golden, which stays in a state until the release.
type way struct {
	kind  api.SourceType
	holds []api.ImageState
	begin func(s *stand, body []byte, in api.ImageState) (release func())
	fail  func(s *stand, body []byte) (mend func()) // makes a failing image; nil: for good
}

// stand is the base of the tests of a source type.
type stand struct {
	*world
	t      *testing.T
	freeze func()
}

func (s *stand) golden(kind api.SourceType, params map[string]string, body []byte) {
	s.image("golden", kind, params, onDisk0, func(spec *api.BackingImageSpec) {
		if kind != api.SourceRegistry {
			spec.Checksum = sum(body)
		}
	})
}

// serve answers every request with the body, and stops where the state needs.
func (s *stand) serve(body []byte, in api.ImageState) (url string, release func()) {
	at := map[api.ImageState]int{api.ImageStarting: 0, api.ImageInProgress: stateData / 2, api.ImageTransfer: stateHeld}
	let := make(chan struct{})
	var once sync.Once
	release = func() { once.Do(func() { close(let) }) }
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		stop, ok := at[in]
		if ok && stop == 0 {
			select {
			case <-let:
			case <-r.Context().Done():
				return
			}
		}
		rw.Header().Set("Content-Length", fmt.Sprint(len(body)))
		if ok && stop > 0 {
			_, _ = rw.Write(body[:stop])
			_ = http.NewResponseController(rw).Flush()
			select {
			case <-let:
			case <-r.Context().Done():
				return
			}
		}
		_, _ = rw.Write(body[stop:])
	}))
	s.t.Cleanup(srv.Close)
	s.t.Cleanup(release)
	return srv.URL + "/golden", release
}

var ways = []way{
	{api.SourceFile, []api.ImageState{api.ImageInProgress},
		func(s *stand, body []byte, in api.ImageState) func() {
			if in == api.ImageInProgress {
				s.freeze()
			}
			s.golden(api.SourceFile, imageFile(s.t, body), body)
			return func() {}
		},
		func(s *stand, body []byte) func() {
			name := filepath.Join(s.t.TempDir(), "late.raw")
			s.golden(api.SourceFile, map[string]string{"path": name}, body)
			return func() {
				if err := os.WriteFile(name, body, 0o600); err != nil {
					s.t.Fatal(err)
				}
			}
		}},
	{api.SourceClone, []api.ImageState{api.ImageInProgress},
		func(s *stand, body []byte, in api.ImageState) func() {
			s.t.Helper()
			var old api.BackingImage
			if s.client.Get(s.t.Context(), client.ObjectKey{Name: "origin"}, &old) == nil {
				s.delete(&api.BackingImage{}, "origin")
				s.gone("origin")
			}
			s.image("origin", api.SourceFile, imageFile(s.t, body),
				func(spec *api.BackingImageSpec) { spec.DiskSelector = []string{"disk-1"} })
			s.state("origin", api.ImageReady)
			if in == api.ImageInProgress {
				s.freeze()
			}
			s.golden(api.SourceClone, map[string]string{"backingImage": "origin"}, body)
			return func() {}
		},
		func(s *stand, body []byte) func() {
			s.golden(api.SourceClone, map[string]string{"backingImage": "nobody"}, body)
			return nil
		}},
	{api.SourceDownload, []api.ImageState{api.ImageStarting, api.ImageInProgress, api.ImageTransfer},
		func(s *stand, body []byte, in api.ImageState) func() {
			url, release := s.serve(body, in)
			s.golden(api.SourceDownload, map[string]string{"url": url}, body)
			return release
		},
		func(s *stand, body []byte) func() {
			var there atomic.Bool
			srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if there.Load() {
					_, _ = rw.Write(body)
				} else {
					http.NotFound(rw, r)
				}
			}))
			s.t.Cleanup(srv.Close)
			s.golden(api.SourceDownload, map[string]string{"url": srv.URL}, body)
			return func() { there.Store(true) }
		}},
	{api.SourceUpload, []api.ImageState{api.ImageStarting, api.ImageInProgress, api.ImageTransfer},
		func(s *stand, body []byte, in api.ImageState) func() {
			s.golden(api.SourceUpload, map[string]string{"size": fmt.Sprint(len(body))}, body)
			if in == api.ImageStarting {
				return func() {}
			}
			at := map[api.ImageState]int{api.ImageInProgress: stateData / 2, api.ImageTransfer: stateHeld}[in]
			h := newHeld(body, at)
			if at == 0 {
				h.release()
			}
			url := s.uploadURL("golden")
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPut, url, struct{ io.Reader }{h})
				req.ContentLength = int64(len(body))
				if resp, err := http.DefaultClient.Do(req); err == nil {
					_ = resp.Body.Close()
				}
			}()
			s.t.Cleanup(func() { h.release(); cancel(); <-ended })
			return h.release
		},
		func(s *stand, body []byte) func() {
			s.golden(api.SourceUpload, map[string]string{"size": "3"}, body)
			sendUpload(s.t, s.uploadURL("golden"), strings.NewReader("no!"), 3)
			return nil
		}},
	{api.SourceRegistry, []api.ImageState{api.ImageStarting, api.ImageInProgress, api.ImageTransfer},
		func(s *stand, body []byte, in api.ImageState) func() {
			reg := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
			pushDisk(s.t, reg, "disks/golden", "1", body)
			at := map[api.ImageState]int{api.ImageInProgress: stateData / 2, api.ImageTransfer: stateHeld}[in]
			let := make(chan struct{})
			var once sync.Once
			release := func() { once.Do(func() { close(let) }) }
			if in == "" {
				release()
			}
			srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
					reg.ServeHTTP(&heldWriter{ResponseWriter: rw, at: at, let: let, done: r.Context().Done()}, r)
					return
				}
				reg.ServeHTTP(rw, r)
			}))
			s.t.Cleanup(srv.Close)
			s.t.Cleanup(release)
			s.golden(api.SourceRegistry, map[string]string{
				"url": strings.Replace(srv.URL, "http", "docker", 1) + "/disks/golden:1"}, body)
			return release
		},
		func(s *stand, body []byte) func() {
			reg := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
			srv := httptest.NewServer(reg)
			s.t.Cleanup(srv.Close)
			s.golden(api.SourceRegistry, map[string]string{
				"url": strings.Replace(srv.URL, "http", "docker", 1) + "/disks/golden:1"}, body)
			return func() { pushDisk(s.t, reg, "disks/golden", "1", body) }
		}},
	wayOfRestore,
}

// heldWriter passes the first bytes of an answer before waiting.
type heldWriter struct {
	http.ResponseWriter
	at   int
	let  <-chan struct{}
	done <-chan struct{}
}

func (h *heldWriter) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		part := p
		if h.at >= 0 {
			part = p[:min(len(p), h.at)]
		}
		m, err := h.ResponseWriter.Write(part)
		if n += m; err != nil {
			return n, err
		}
		p = p[m:]
		if h.at >= 0 {
			if h.at -= m; h.at == 0 && len(p) > 0 {
				_ = http.NewResponseController(h.ResponseWriter).Flush()
				select {
				case <-h.let:
				case <-h.done:
					return n, context.Canceled
				}
				h.at = -1
			}
		}
	}
	return n, nil
}

// TestStates walks every state of every source type: the status is right, a deletion in the state leaves nothing
// behind, the process may end in the state, and an image of the same name meets no remains of the image before.
func TestStates(t *testing.T) {
	t.Parallel()
	for _, way := range ways {
		t.Run(string(way.kind), func(t *testing.T) {
			t.Parallel()
			dir, freeze, thaw := frozen(t)
			w := newWorld(t, 2, dir)
			t.Cleanup(thaw) // before the world stops writers waiting for the disk
			w.stop()
			w.opts.Download.Start, w.opts.Download.Stall = 5*time.Minute, 5*time.Minute
			w.opts.CheckpointEvery = time.Hour // no checkpoint writes to the disk
			w.opts.Parallel = 1
			w.start()
			watchSteps(t, w)
			s := &stand{w, t, freeze}
			seed := byte(1)
			next := func() []byte { seed++; return stateBody(seed) }
			gone := func() {
				t.Helper()
				w.delete(&api.BackingImage{}, "golden")
				thaw()
				w.gone("golden")
				w.clean(0)
				if n := len(w.copies("golden")); n != 0 {
					t.Errorf("%d copies are left", n)
				}
			}
			ready := func(body []byte) *api.BackingImage {
				t.Helper()
				img := w.isOn("golden", 0)
				w.holds(0, img, body)
				if st := w.copies("golden")[0].Status; st.State != api.ImageReady || st.Progress != 100 || st.Message != "" ||
					st.Checksum == "" || st.Digest == "" || st.UploadURL != "" || st.VirtualSize != stateSize {
					t.Errorf("ready is told as %+v", st)
				}
				return img
			}

			// Pending: no disk suits.
			w.nodeIs(func(n *api.NodeSpec) { n.Disks[0].Tags = nil }, nil)
			way.begin(s, next(), api.ImageStarting)
			img := w.await("golden", "waits for a disk", func(i *api.BackingImage) bool {
				return i.Status.State == api.ImagePending && strings.Contains(i.Status.Message, "disk-0")
			})
			if img.Status.UUID == "" {
				t.Errorf("pending is told as %+v", img.Status)
			}
			gone()
			w.nodeIs(func(n *api.NodeSpec) { n.Disks[0].Tags = []string{"disk-0"} }, nil)

			for _, in := range way.holds {
				release := way.begin(s, next(), in)
				s.reach(in, release)
				gone()
			}
			// Each import continues from the state, also in another process.
			for _, in := range way.holds {
				if way.kind == api.SourceUpload && in != api.ImageTransfer {
					continue // the sender has left
				}
				body := next()
				release := way.begin(s, body, in)
				s.reach(in, release)
				if in == api.ImageStarting || in == api.ImageInProgress && way.kind != api.SourceFile &&
					way.kind != api.SourceClone {
					w.stop()
					release()
					w.start()
				}
				release()
				thaw()
				ready(body)
				gone()
			}

			// Failed: for good, or with the time of the next try.
			body := next()
			mend := way.fail(s, body)
			st := w.state("golden", api.ImageFailed).Status
			again := "next try at"
			if way.kind == api.SourceRestore {
				again = "tries again"
			}
			if st.Message == "" || mend != nil && !strings.Contains(st.Message, again) {
				t.Errorf("failed is told as %+v", st)
			}
			gone()
			if mend != nil {
				body = next()
				mend = way.fail(s, body)
				w.state("golden", api.ImageFailed)
				mend()
				ready(body)
				gone()
			}

			// Ready, away and back; deleted while away.
			body = next()
			way.begin(s, body, "")
			img = ready(body)
			w.mounted(0, false)
			if st := w.state("golden", api.ImageUnknown).Status; !strings.Contains(st.Message, "not mounted") {
				t.Errorf("unknown is told as %+v", st)
			}
			w.mounted(0, true)
			if again := ready(body); again.Status.UUID != img.Status.UUID {
				t.Error("it is another image")
			}
			w.mounted(0, false)
			w.state("golden", api.ImageUnknown)
			w.delete(&api.BackingImage{}, "golden")
			w.mounted(0, true)
			w.gone("golden")
			w.clean(0)
		})
	}
}

// reach waits until golden is in a state. For a transfer, reach freezes the disk before the last bytes come.
func (s *stand) reach(in api.ImageState, release func()) {
	s.t.Helper()
	if in == api.ImageTransfer {
		s.eventually("all data is written", s.written, func() string { return fmt.Sprintf("%+v", s.copies("golden")) })
		s.freeze()
		release()
	}
	st := s.copyState(in)
	switch {
	case st.LastTransition.IsZero():
		s.t.Errorf("%s since when is not told: %+v", in, st)
	case in == api.ImageInProgress && (st.Progress >= 100 || st.BytesTotal <= 0 && st.BytesDone <= 0 && st.Progress != 0):
		s.t.Errorf("in progress is told as %+v", st)
	}
}

// written reports whether all data of golden is on the disk. Received bytes may not be written yet, because the import
// hashes while writing. The last write of a chunk has the checksums of the blocks, all at once.
func (s *stand) written() bool {
	all, _ := filepath.Glob(filepath.Join(s.disks[0].Path(), "layers", "*", "crcs"))
	if len(all) != 1 {
		return false
	}
	b, _ := os.ReadFile(all[0])
	const chunk = block.ChunkSize / block.Size * 4
	for at := 0; at < stateData/block.Size*4; at += chunk {
		if len(b) < at+chunk || bytes.Equal(b[at:at+chunk], make([]byte, chunk)) {
			return false
		}
	}
	return true
}

func (s *stand) copyState(in api.ImageState) (st api.ImageCopyStatus) {
	s.t.Helper()
	s.eventually("the copy is "+string(in), func() bool {
		all := s.copies("golden")
		if len(all) == 1 {
			st = all[0].Status
		}
		return len(all) == 1 && st.State == in
	}, func() string { return fmt.Sprintf("%+v", st) })
	return st
}
