package imagestore_test

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"drover.io/drover/api"
)

// newSlowRegistry is a registry with layers as slow as a slow server's image.
func newSlowRegistry(t *testing.T, allowed int) (s *slow, reg http.Handler, ref string) {
	t.Helper()
	s = &slow{allowed: allowed}
	s.more = sync.NewCond(&s.mu)
	reg = ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			s.mu.Lock()
			s.ranges = append(s.ranges, r.Header.Get("Range"))
			rw = &gated{rw, s, s.cuts}
			s.mu.Unlock()
		}
		reg.ServeHTTP(rw, r)
	}))
	t.Cleanup(srv.Close)
	t.Cleanup(func() { s.allow(1 << 40) })
	return s, reg, strings.Replace(srv.URL, "http", "docker", 1) + "/disks/golden:1"
}

// TestRegistryGoesOnAfterARestart: after a restart, the disk of a registry's image continues from a plain layer, and
// begins again from a packed layer. If the tag names another image by then, the importer fetches the other image from
// the beginning.
func TestRegistryGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	body := content(80<<20, 61)[:40<<20]
	for i := range body {
		body[i] = "abcdefgh"[body[i]&7]
	}
	clear(body[10<<20 : 16<<20])
	qcow2 := converted(t, body, "qcow2")
	for _, c := range []struct {
		name string
		file []byte
		pack []string
		how  string
	}{
		{"raw tar", body, nil, ""},
		{"raw gzip", body, []string{"gzip", "-1c"}, ""},
		{"raw zstd", body, []string{"zstd", "-1c"}, ""},
		{"qcow2 tar", qcow2, nil, ""},
		{"qcow2 gzip", qcow2, []string{"gzip", "-1c"}, ""},
		{"another image", body, nil, "changed"},
		{"deleted", body, nil, "deleted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckpointEvery = 100 * time.Millisecond
			w.opts.Download.Stall, w.opts.Download.Start = 20*time.Second, 20*time.Second
			w.start()
			s, reg, ref := newSlowRegistry(t, 0)
			size := pushDisk(t, reg, "disks/golden", "1", c.file, c.pack...)
			s.allow(size * 3 / 4)
			w.image("golden", api.SourceRegistry, map[string]string{"url": ref})
			if c.pack != nil {
				w.await("golden", "much came", func(i *api.BackingImage) bool { return i.Status.Progress >= 40 })
			} else {
				w.eventually("much was kept", func() bool { return w.keptOf() > len(c.file)/4 })
			}
			w.stop()
			last := w.keptOf()
			if err := w.disks[0].Collect(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			s.asked()
			want := body
			if c.how == "changed" {
				want = content(8<<20, 62)
				pushDisk(t, reg, "disks/golden", "1", want, c.pack...)
			}
			s.allow(1 << 40)
			w.start()
			if c.how == "deleted" {
				w.delete(&api.BackingImage{}, "golden")
				w.gone("golden")
				w.clean(0)
				return
			}
			w.holds(0, w.state("golden", api.ImageReady), want)
			from := first(s.asked())
			if c.pack != nil || c.how != "" {
				if from != 0 {
					t.Errorf("asked from byte %d on", from)
				}
			} else if from < last-1<<20 { // the state of the digest is known every 256 KiB
				t.Errorf("%d of %d bytes were kept, and it was asked for from byte %d of %d on", last, len(c.file), from, size)
			}
			if all := w.leftOver(); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
		})
	}
}
