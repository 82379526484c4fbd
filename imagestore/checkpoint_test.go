package imagestore_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
	"drover.io/drover/imagestore/origin/upload"
)

// slow is a server of an image with a version, which passes the allowed bytes and waits.
type slow struct {
	body []byte

	mu      sync.Mutex
	more    *sync.Cond
	version string
	allowed int
	cuts    int // how often all clients left
	ranges  []string
	probe   string // a request for probe passes at once: the client discards most of the answer
}

// probed is the first range of a download over a single connection.
const probed = "bytes=0-8388607"

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

// cut ends the answers to all clients: bytes allowed later are for new clients.
func (s *slow) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cuts++
	s.more.Broadcast()
}

// asked returns the ranges requested since the last call.
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
	if s.probe == "" || r.Header.Get("Range") != s.probe {
		w = &gated{w, s, s.cuts}
	}
	s.mu.Unlock()
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
}

type gated struct {
	http.ResponseWriter
	s    *slow
	cuts int
}

// Write passes no more than the allowed bytes, also for a single write of the whole image.
func (g *gated) Write(p []byte) (n int, err error) {
	s := g.s
	for n < len(p) && err == nil {
		s.mu.Lock()
		for s.allowed <= 0 && s.cuts == g.cuts {
			s.more.Wait()
		}
		if s.cuts != g.cuts {
			s.mu.Unlock()
			return n, net.ErrClosed
		}
		m := min(s.allowed, len(p)-n, 32<<10)
		s.allowed -= m
		s.mu.Unlock()
		m, err = g.ResponseWriter.Write(p[n : n+m])
		n += m
	}
	return n, err
}

// first is the lowest requested byte.
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

// TestDownloadGoesOnAfterARestart: a restart in the middle of a download costs the bytes since the last checkpoint, not
// all bytes.
func TestDownloadGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	for _, changed := range []bool{false, true} {
		t.Run(fmt.Sprintf("changed %v", changed), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckpointEvery = 10 * time.Millisecond
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
			if err := w.disks[0].Collect(t.Context(), 0); err != nil { // garbage collection runs meanwhile
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

// TestKeptDownloadIsDeleted: the deletion of an image deletes the checkpoint.
func TestKeptDownloadIsDeleted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.stop()
	w.opts.CheckpointEvery = 10 * time.Millisecond
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

// keptOf is the number of source bytes in the checkpoint on the first disk.
func (w *world) keptOf() int {
	all, _ := filepath.Glob(filepath.Join(w.disks[0].Path(), "layers", "*", "kept.json"))
	if len(all) != 1 {
		return 0
	}
	b, _ := os.ReadFile(all[0])
	var rec struct {
		Body struct {
			Note struct {
				Mark struct {
					Off int `json:"off"`
				} `json:"mark"`
			} `json:"note"`
		} `json:"body"`
	}
	_ = json.Unmarshal(b, &rec) // the importer may replace the file meanwhile
	return rec.Body.Note.Mark.Off
}

// converted is content as an image of a format, made by qemu-img.
func converted(t *testing.T, body []byte, format string, options ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	raw, out := filepath.Join(dir, "raw"), filepath.Join(dir, "image")
	if err := os.WriteFile(raw, body, 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"convert", "-f", "raw", "-O", format}, options...)
	if said, err := exec.Command("qemu-img", append(args, raw, out)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// forms are images of the same content, which an import converts.
func forms(t *testing.T, body []byte) map[string][]byte {
	return map[string][]byte{
		"qcow2":       converted(t, body, "qcow2"),
		"qcow2-zlib":  converted(t, body, "qcow2", "-c", "-W"),
		"vhdx":        converted(t, body, "vhdx"),
		"vmdk":        converted(t, body, "vmdk"),
		"vmdk-stream": converted(t, body, "vmdk", "-o", "subformat=streamOptimized"),
		"vhd":         converted(t, body, "vpc", "-o", "force_size"),
	}
}

// TestConversionGoesOnAfterARestart: a conversion continues after a restart from any place, in every format.
func TestConversionGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	body := content(64<<20, 31)
	copy(body[46<<20:], content(14<<20, 32))
	clear(body[12<<20 : 20<<20])
	for name, file := range forms(t, body) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckpointEvery = 5 * time.Millisecond
			w.opts.Download.Stall, w.opts.Download.Start = 20*time.Second, 20*time.Second
			w.opts.Download.Connections = 1 // then the server passes the next bytes in order
			w.start()
			s, url := newSlow(t, file, len(file)/4)
			s.probe = probed
			w.image("golden", api.SourceDownload, map[string]string{"url": url},
				func(spec *api.BackingImageSpec) { spec.Checksum = sum(file) })
			last := 0
			for i := range 3 {
				// The source is silent by then, but the importer records all received bytes.
				seen, since := 0, time.Now()
				w.eventually("more was kept", func() bool {
					kept := w.keptOf()
					if kept != seen {
						seen, since = kept, time.Now()
					} else if time.Since(since) > 5*time.Second { // unread answers took the allowed bytes
						s.allow(len(file) / 8)
						since = time.Now()
					}
					return kept > last+len(file)/8
				})
				w.stop()
				s.cut()
				last = w.keptOf()
				if err := w.disks[0].Collect(t.Context(), 0); err != nil { // garbage collection runs meanwhile
					t.Fatal(err)
				}
				s.asked()
				s.allow(len(file) / 4)
				w.start()
				if i < 2 {
					continue
				}
				s.allow(1 << 40)
			}
			w.holds(0, w.state("golden", api.ImageReady), body)
			if from := first(s.asked()); from < last {
				t.Errorf("%d bytes were kept, and asked again from byte %d on", last, from)
			}
			if all, _ := filepath.Glob(filepath.Join(w.disks[0].Path(), "layers", "*", "[kb]e*")); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
		})
	}
}

// TestUploadGoesOnAfterARestart: an upload continues after a restart from the node's offset; an upload without a sender
// leaves nothing.
func TestUploadGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	body := content(80<<20, 33)[:40<<20]
	qcow2 := converted(t, body, "qcow2")
	for name, file := range map[string][]byte{"raw": body, "qcow2": qcow2, "left": body} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckpointEvery = 5 * time.Millisecond
			w.opts.UploadTimeout = time.Second
			if name != "left" {
				w.opts.UploadTimeout = 5 * time.Minute
			}
			w.start()
			w.image("golden", api.SourceUpload, map[string]string{"size": fmt.Sprint(len(file))},
				func(spec *api.BackingImageSpec) { spec.Checksum = sum(file) })
			r, pw := io.Pipe()
			url := w.uploadURL("golden")
			answer := make(chan int, 1)
			go func() {
				req, _ := http.NewRequest(http.MethodPut, url, r)
				req.ContentLength = int64(len(file))
				resp, err := http.DefaultClient.Do(req)
				code := 0
				if err == nil {
					_ = resp.Body.Close()
					code = resp.StatusCode
				}
				answer <- code
			}()
			if _, err := pw.Write(file[:len(file)*2/3]); err != nil {
				t.Fatal(err)
			}
			w.eventually("much was kept", func() bool { return w.keptOf() > len(file)*2/5 })
			w.stop()
			_ = pw.CloseWithError(io.ErrClosedPipe)
			if code := <-answer; code != 0 && code != http.StatusServiceUnavailable {
				t.Errorf("the sender is told %d", code)
			}
			kept := w.keptOf()
			w.start()
			if name == "left" {
				w.await("golden", "fails", func(i *api.BackingImage) bool {
					return i.Status.State == api.ImageFailed && strings.Contains(i.Status.Message, "no sender continued it")
				})
				w.clean(0)
				return
			}
			var again string
			var now upload.State
			w.eventually("it is expected again", func() bool {
				again = w.uploadURL("golden")
				resp, err := http.Get(again)
				if err != nil {
					return false // still the old address
				}
				defer resp.Body.Close()
				return json.NewDecoder(resp.Body).Decode(&now) == nil && resp.StatusCode == http.StatusOK
			})
			if again[strings.LastIndex(again, "/"):] != url[strings.LastIndex(url, "/"):] {
				t.Errorf("it was %s, and is %s", url, again)
			}
			if now.Offset != int64(kept) || now.CRC32C != origin.CRC32C(0, file[:kept]) {
				t.Fatalf("%+v, of %d bytes", now, kept)
			}
			req, _ := http.NewRequest(http.MethodPut, again, bytes.NewReader(file[kept:]))
			req.Header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", kept, len(file)-1, len(file)))
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			said, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("%d %s", resp.StatusCode, said)
			}
			w.holds(0, w.state("golden", api.ImageReady), body)
		})
	}
}
