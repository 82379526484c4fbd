package imagestore_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestDamageIsSeenAndMadeGood: the running node notices and reports manual damage to the files of a copy, and repairs
// the copy from the source.
func TestDamageIsSeenAndMadeGood(t *testing.T) {
	t.Parallel()
	b := content(3<<20, 1)
	for _, c := range []struct {
		name string
		do   func(layer string) error
		say  string // in the message of the failed copy; empty: the copy is made again at once
	}{
		{"folder removed", os.RemoveAll, "damaged"},
		{"data removed", func(l string) error { return os.Remove(filepath.Join(l, "data")) }, "damaged"},
		{"record removed", func(l string) error { return os.Remove(filepath.Join(l, "layer.json")) }, "damaged"},
		{"data cut", func(l string) error { return os.Truncate(filepath.Join(l, "data"), 1<<20) }, "damaged"},
		{"a byte changed", func(l string) error {
			f, err := os.OpenFile(filepath.Join(l, "data"), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt([]byte{b[5000] ^ 1}, 5000)
			return err
		}, "digest"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckEvery = 100 * time.Millisecond
			w.opts.RetryMin, w.opts.RetryMax = 10*time.Second, 10*time.Second // keeps the failure visible
			w.start()
			w.image("golden", api.SourceFile, imageFile(t, b))
			img := w.state("golden", api.ImageReady)
			bad := w.sees("golden", "failed", func() error {
				return c.do(filepath.Join(w.disks[0].Path(), "layers", string(img.Status.Layers[0])))
			}, func(i *api.BackingImage) bool { return i.Status.State == api.ImageFailed })
			if !strings.Contains(bad.Status.Message, c.say) {
				t.Errorf("message %q does not say %q", bad.Status.Message, c.say)
			}
			w.holds(0, w.state("golden", api.ImageReady), b)
			if err := w.disks[0].Verify(t.Context(), string(img.Status.Layers[0])); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDamagedDownloadIsFetchedAgain: a damaged download is fetched again, and repaired in place below a replica.
func TestDamagedDownloadIsFetchedAgain(t *testing.T) {
	t.Parallel()
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprintf("used %v", used), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckEvery = 100 * time.Millisecond
			w.start()
			b := content(3<<20, 1)
			var asked atomic.Int32
			s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				rw.Header().Set("ETag", `"v1"`)
				http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(b))
			}))
			t.Cleanup(s.Close)
			w.image("golden", api.SourceDownload, map[string]string{"url": s.URL})
			img := w.state("golden", api.ImageReady)
			uid := string(img.Status.Layers[0])
			rep := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 10 << 20,
				Layers: []string{uid}}
			if used {
				if err := w.disks[0].CreateReplica(t.Context(), rep); err != nil {
					t.Fatal(err)
				}
			}
			before := asked.Load()
			w.sees("golden", "was known to be damaged", func() error { w.spoil(0, img, b); return nil },
				func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 0 })
			w.holds(0, w.state("golden", api.ImageReady), b)
			if err := w.disks[0].Verify(t.Context(), uid); err != nil {
				t.Error(err)
			}
			if asked.Load() == before {
				t.Error("the server was not asked again")
			}
			if used {
				if err := w.disks[0].RemoveReplica(rep.UID); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestTouchWithoutHarm: a touch without harm costs a reading of the copy, and the copy never counts as failed.
func TestTouchWithoutHarm(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.stop()
	w.opts.CheckEvery = 50 * time.Millisecond
	w.start()
	b := content(3<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b))
	img := w.state("golden", api.ImageReady)
	now := time.Now().Add(time.Second)
	data := filepath.Join(w.disks[0].Path(), "layers", string(img.Status.Layers[0]), "data")
	if err := os.Chtimes(data, now, now); err != nil {
		t.Fatal(err)
	}
	if mark, err := w.disks[0].Touched(string(img.Status.Layers[0])); mark == "" || err != nil {
		t.Fatalf("touched: %q, %v", mark, err)
	}
	end := time.After(time.Second)
	for ended := false; !ended; {
		if s := w.await("golden", "exists", func(*api.BackingImage) bool { return true }); s.Status.State != api.ImageReady {
			t.Fatalf("state %s: %s", s.Status.State, s.Status.Message)
		}
		select {
		case <-end:
			ended = true
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// TestLostUpload: the copy of an uploaded image cannot be made again, and the message names the remedy.
func TestLostUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.stop()
	w.opts.CheckEvery = 100 * time.Millisecond
	w.start()
	b := content(1<<20, 1)
	w.image("sent", api.SourceUpload, map[string]string{})
	if code, said := sendUpload(t, w.uploadURL("sent"), bytes.NewReader(b), int64(len(b))); code != 200 {
		t.Fatalf("%d %s", code, said)
	}
	img := w.state("sent", api.ImageReady)
	w.stop() // so that no check sees half of the removal
	if err := os.RemoveAll(filepath.Join(w.disks[0].Path(), "images", string(img.Status.UUID))); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(w.disks[0].Path(), "layers", string(img.Status.Layers[0]))); err != nil {
		t.Fatal(err)
	}
	w.start()
	bad := w.state("sent", api.ImageFailed)
	if !strings.Contains(bad.Status.Message, "no longer on disk") || !strings.Contains(bad.Status.Message, "upload the image again") {
		t.Errorf("message %q", bad.Status.Message)
	}
}

// TestDamageBelowAReplica: a damaged layer below a replica is repaired in place, from the source or from another disk,
// and an open reader continues to read.
func TestDamageBelowAReplica(t *testing.T) {
	t.Parallel()
	for _, disks := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d disks", disks), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, disks)
			w.stop()
			w.opts.CheckEvery = 100 * time.Millisecond
			w.start()
			b := content(3<<20, 1)
			file := imageFile(t, b)
			w.image("golden", api.SourceFile, file, func(s *api.BackingImageSpec) { s.MinNumberOfCopies = int32(disks) })
			img := w.await("golden", "is on all disks", func(i *api.BackingImage) bool {
				return i.Status.ReadyCopies == int32(disks)
			})
			if disks > 1 { // the source is not needed then
				if err := os.Remove(file["path"]); err != nil {
					t.Fatal(err)
				}
			}
			uid := string(img.Status.Layers[0])
			rep := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 10 << 20,
				Layers: []string{uid}}
			if err := w.disks[0].CreateReplica(t.Context(), rep); err != nil {
				t.Fatal(err)
			}
			open, err := w.disks[0].Open(uid)
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			layer := filepath.Join(w.disks[0].Path(), "layers", uid)
			for name, damage := range map[string]func() error{
				"gone": func() error { return os.RemoveAll(layer) },
				"cut":  func() error { return os.Truncate(filepath.Join(layer, "data"), 1<<20) },
				"a bit": func() error {
					f, err := os.OpenFile(filepath.Join(layer, "data"), os.O_RDWR, 0)
					if err != nil {
						return err
					}
					_, err = f.WriteAt([]byte{b[5000] ^ 1}, 5000)
					return errors.Join(err, f.Close())
				},
				"no record": func() error { return os.Remove(filepath.Join(layer, "layer.json")) },
			} {
				bad := func(i *api.BackingImage) bool { return i.Status.ReadyCopies < int32(disks) }
				w.sees("golden", "was noticed: "+name, damage, bad)
				now := w.await("golden", name+" is repaired", func(i *api.BackingImage) bool { return !bad(i) })
				w.holds(0, now, b)
				got := make([]byte, len(b))
				if _, err := open.ReadAt(got, 0); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(got, b) {
					t.Errorf("%s: who had it open reads something else: %v", name, err)
				}
			}
			if err := w.disks[0].RemoveReplica(rep.UID); err != nil {
				t.Fatal(err)
			}
			w.delete(&api.BackingImage{}, "golden")
			w.gone("golden")
			w.clean(0)
		})
	}
}
