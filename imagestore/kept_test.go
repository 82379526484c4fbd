package imagestore_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
)

// slow is a server whose image has a version, and which lets so many bytes through before it waits.
type slow struct {
	body []byte

	mu      sync.Mutex
	more    *sync.Cond
	version string
	allowed int
	ranges  []string
}

func newSlow(t *testing.T, body []byte, allowed int) (*slow, string) {
	t.Helper()
	s := &slow{body: body, version: `"v1"`, allowed: allowed}
	s.more = sync.NewCond(&s.mu)
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	t.Cleanup(func() { s.allow(1 << 40) })
	return s, srv.URL + "/golden.img"
}

func (s *slow) allow(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.allowed = n
	s.more.Broadcast()
}

// asked are the ranges that were asked for since the last call.
func (s *slow) asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranges
	s.ranges = nil
	return r
}

func (s *slow) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.ranges = append(s.ranges, r.Header.Get("Range"))
	w.Header().Set("ETag", s.version)
	body := s.body
	s.mu.Unlock()
	http.ServeContent(&gated{w, s}, r, "", time.Time{}, bytes.NewReader(body))
}

type gated struct {
	http.ResponseWriter
	s *slow
}

func (g *gated) Write(p []byte) (int, error) {
	s := g.s
	s.mu.Lock()
	for s.allowed <= 0 {
		s.more.Wait()
	}
	s.allowed -= len(p)
	s.mu.Unlock()
	return g.ResponseWriter.Write(p)
}

// first is the lowest byte that was asked for.
func first(ranges []string) int {
	low := -1
	for _, r := range ranges {
		var from int
		if _, err := fmt.Sscanf(r, "bytes=%d-", &from); err != nil {
			from = 0
		}
		if low < 0 || from < low {
			low = from
		}
	}
	return low
}

// A restart in the middle of a download costs what came since the last look at the disk, not all.
func TestDownloadGoesOnAfterARestart(t *testing.T) {
	for _, changed := range []bool{false, true} {
		t.Run(fmt.Sprintf("changed %v", changed), func(t *testing.T) {
			w := newWorld(t, 1)
			w.stop()
			w.opts.KeepEvery = 10 * time.Millisecond
			w.opts.Download.Stall, w.opts.Download.Start = 20*time.Second, 20*time.Second
			w.start()
			body := content(96<<20, 21)
			copy(body[70<<20:], content(20<<20, 22))
			s, url := newSlow(t, body, 60<<20)
			w.image("golden", api.SourceDownload, map[string]string{"url": url},
				func(spec *api.BackingImageSpec) { spec.Checksum = sum(body) })
			record := filepath.Join(w.disks[0].Path(), "layers", "*", "kept.json")
			w.eventually("much was kept", func() bool {
				all, _ := filepath.Glob(record)
				if len(all) != 1 {
					return false
				}
				b, _ := os.ReadFile(all[0])
				var upTo int
				if i := strings.Index(string(b), `"upTo":`); i >= 0 {
					_, _ = fmt.Sscanf(strings.TrimSpace(string(b)[i+7:]), "%d", &upTo)
				}
				return upTo >= 20<<20
			})
			w.stop()
			if all, _ := filepath.Glob(record); len(all) != 1 {
				t.Fatal("what was kept went with the process")
			}
			if err := w.disks[0].Collect(t.Context(), 0); err != nil { // the disk is put in order meanwhile
				t.Fatal(err)
			}
			s.asked()
			if changed {
				s.mu.Lock()
				s.version, s.body = `"v2"`, content(96<<20, 23)
				body = s.body
				s.mu.Unlock()
			}
			s.allow(1 << 40)
			w.start()
			if changed {
				w.await("golden", "fails", func(i *api.BackingImage) bool {
					return i.Status.State == api.ImageFailed && strings.Contains(i.Status.Message, "wrong checksum")
				})
				if from := first(s.asked()); from != 0 {
					t.Errorf("of another content, the bytes from %d on were asked for", from)
				}
				w.clean(0)
				return
			}
			w.holds(0, w.state("golden", api.ImageReady), body)
			if from := first(s.asked()); from < 20<<20 {
				t.Errorf("asked again from byte %d on", from)
			}
			if all, _ := filepath.Glob(record); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
		})
	}
}

// What was kept of an image goes with it.
func TestKeptDownloadIsDeleted(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	w.opts.KeepEvery = 10 * time.Millisecond
	w.opts.Download.Stall = 20 * time.Second
	w.start()
	_, url := newSlow(t, content(96<<20, 25), 60<<20)
	w.image("golden", api.SourceDownload, map[string]string{"url": url})
	record := filepath.Join(w.disks[0].Path(), "layers", "*", "kept.json")
	w.eventually("something was kept", func() bool {
		all, _ := filepath.Glob(record)
		return len(all) == 1
	})
	w.stop()
	w.start()
	w.delete(&api.BackingImage{}, "golden")
	w.gone("golden")
	w.clean(0)
}
