package imagestore_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Whatever is done by hand to the files of a copy is noticed while the node runs, said, and made good from the source.
func TestDamageIsSeenAndMadeGood(t *testing.T) {
	b := content(3<<20, 1)
	for _, c := range []struct {
		name string
		do   func(layer string) error
		say  string // in the message of the failed copy; empty: it is made again at once
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
			w := newWorld(t, 1)
			w.stop()
			w.opts.Check = 100 * time.Millisecond
			w.start()
			w.image("golden", api.SourceFile, imageFile(t, b))
			img := w.state("golden", api.ImageReady)
			if err := c.do(filepath.Join(w.disks[0].Path(), "layers", string(img.Status.Layers[0]))); err != nil {
				t.Fatal(err)
			}
			bad := w.state("golden", api.ImageFailed)
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

// A touch without harm costs one reading of the copy, and nobody sees it fail.
func TestTouchWithoutHarm(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	w.opts.Check = 50 * time.Millisecond
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

// The copy of an uploaded image cannot be made again: that is said, and what to do.
func TestLostUpload(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	w.opts.Check = 100 * time.Millisecond
	w.start()
	b := content(1<<20, 1)
	w.image("sent", api.SourceUpload, map[string]string{})
	if code, said := upload(t, w.uploadURL("sent"), bytes.NewReader(b), int64(len(b))); code != 200 {
		t.Fatalf("%d %s", code, said)
	}
	img := w.state("sent", api.ImageReady)
	if err := os.RemoveAll(filepath.Join(w.disks[0].Path(), "images", string(img.Status.UUID))); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(w.disks[0].Path(), "layers", string(img.Status.Layers[0]))); err != nil {
		t.Fatal(err)
	}
	bad := w.state("sent", api.ImageFailed)
	if !strings.Contains(bad.Status.Message, "gone") || !strings.Contains(bad.Status.Message, "upload it anew") {
		t.Errorf("message %q", bad.Status.Message)
	}
}

// What a replica needs is never taken away from under it. A layer whose folder is gone is made again under the replica;
// one that is only damaged stays, and who looks is told why.
func TestDamageBelowAReplica(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	w.opts.Check = 100 * time.Millisecond
	w.start()
	b := content(3<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b))
	img := w.state("golden", api.ImageReady)
	rep := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 10 << 20,
		Layers: []string{string(img.Status.Layers[0])}}
	if err := w.disks[0].CreateReplica(t.Context(), rep); err != nil {
		t.Fatal(err)
	}
	layer := filepath.Join(w.disks[0].Path(), "layers", string(img.Status.Layers[0]))
	if err := os.RemoveAll(layer); err != nil {
		t.Fatal(err)
	}
	w.state("golden", api.ImageFailed)
	w.holds(0, w.state("golden", api.ImageReady), b)

	f, err := os.OpenFile(filepath.Join(layer, "data"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{b[5000] ^ 1}, 5000); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	w.await("golden", "says why it is not made again", func(i *api.BackingImage) bool {
		return i.Status.State == api.ImageFailed && strings.Contains(i.Status.Message, "volume v uses it")
	})
	if err := w.disks[0].RemoveReplica(rep.UID); err != nil {
		t.Fatal(err)
	}
	w.holds(0, w.state("golden", api.ImageReady), b)
}
