package imagestore_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/api"
)

// packedAs packs a file with a tool.
func packedAs(t *testing.T, file []byte, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = bytes.NewReader(file)
	b, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return b
}

// leftOver lists the remains of imports in the layers of the first disk.
func (w *world) leftOver() []string {
	all, _ := filepath.Glob(filepath.Join(w.disks[0].Path(), "layers", "*", "[kb]e*"))
	return all
}

// editKept changes the note in the import's checkpoint on the first disk.
func (w *world) editKept(edit func(note map[string]any)) {
	w.t.Helper()
	all, _ := filepath.Glob(filepath.Join(w.disks[0].Path(), "layers", "*", "kept.json"))
	if len(all) != 1 {
		w.t.Fatalf("kept: %v", all)
	}
	k, upTo, b, err := w.disks[0].Resume(w.t.Context(), filepath.Base(filepath.Dir(all[0])))
	if err != nil {
		w.t.Fatal(err)
	}
	var note map[string]any
	if err = json.Unmarshal(b, &note); err != nil {
		w.t.Fatal(err)
	}
	edit(note)
	if b, err = json.Marshal(note); err == nil {
		err = k.Checkpoint(upTo, b)
	}
	if err = errors.Join(err, k.Leave()); err != nil {
		w.t.Fatal(err)
	}
}

// TestPackedDownloadBeginsAgainAfterARestart: after a restart, the importer fetches a packed image again from the
// start, also if the server has other content by then, and removes the parts of the first attempt.
func TestPackedDownloadBeginsAgainAfterARestart(t *testing.T) {
	t.Parallel()
	body := content(80<<20, 53)[:40<<20]
	for i := range body {
		body[i] = "abcdefgh"[body[i]&7]
	}
	other := bytes.Clone(body)
	copy(other[25<<20:], content(10<<20, 54))
	for _, c := range []struct {
		name, format, how string
		args              []string
	}{
		{"raw.gz", "raw", "", []string{"gzip", "-1c"}},
		{"raw.xz", "raw", "", []string{"xz", "-0c", "-T2"}},
		{"raw.zst", "raw", "", []string{"zstd", "-1c"}},
		{"qcow2.zst", "qcow2", "", []string{"zstd", "-3c"}},
		{"changed", "raw", "changed", []string{"gzip", "-1c"}},
		{"deleted", "raw", "deleted", []string{"gzip", "-1c"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			image := func(body []byte) []byte {
				if c.format != "raw" {
					body = converted(t, body, c.format)
				}
				return packedAs(t, body, c.args...)
			}
			file := image(body)
			w := newWorld(t, 1)
			w.stop()
			w.opts.CheckpointEvery = 100 * time.Millisecond
			w.opts.Download.Stall, w.opts.Download.Start = 20*time.Second, 20*time.Second
			w.opts.Download.Connections = 1
			w.start()
			s, url := newSlow(t, file, len(file)*3/4)
			s.probe = probed
			w.image("golden", api.SourceDownload, map[string]string{"url": url})
			w.await("golden", "much came", func(i *api.BackingImage) bool { return i.Status.Progress >= 40 })
			w.stop()
			s.cut()
			s.asked()
			if n := w.keptOf(); n != 0 {
				t.Errorf("%d bytes of an archive are recorded", n)
			}
			want := body
			if c.how == "changed" {
				s.mu.Lock()
				s.version, s.body = `"v2"`, image(other)
				s.mu.Unlock()
				want = other
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
			if from := first(s.asked()); from != 0 {
				t.Errorf("asked from byte %d on", from)
			}
			if all := w.leftOver(); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
		})
	}
}

// TestPackedRecordOfAnEarlierVersionBeginsAgain: earlier versions recorded places in archives. The importer drops such
// a record and begins again.
func TestPackedRecordOfAnEarlierVersionBeginsAgain(t *testing.T) {
	t.Parallel()
	body := content(40<<20, 55)
	point := map[string]any{"format": 1, "packed": 9 << 20, "plain": 16 << 20, "window": 32 << 10,
		"state": map[string]any{"sum": "Y3JjAQ==", "know": map[string]any{"have": 16 << 20, "bit": 3}}}
	t.Run("download", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, 1)
		w.stop()
		w.opts.CheckpointEvery = 100 * time.Millisecond
		w.opts.Download.Connections = 1
		w.start()
		s, url := newSlow(t, body, len(body)*3/4)
		s.probe = probed
		w.image("golden", api.SourceDownload, map[string]string{"url": url})
		w.eventually("much was kept", func() bool { return w.keptOf() > len(body)/4 })
		w.stop()
		s.cut()
		w.editKept(func(note map[string]any) {
			note["packed"] = map[string]any{"point": point, "off": 16 << 20}
			note["from"] = 16<<20 - 32<<10
		})
		s.asked()
		s.allow(1 << 40)
		w.start()
		w.holds(0, w.state("golden", api.ImageReady), body)
		if from := first(s.asked()); from != 0 {
			t.Errorf("asked from byte %d on", from)
		}
	})
	t.Run("registry", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, 1)
		w.stop()
		w.opts.CheckpointEvery = 100 * time.Millisecond
		w.start()
		s, reg, ref := newSlowRegistry(t, 0)
		size := pushDisk(t, reg, "disks/golden", "1", body)
		s.allow(size * 3 / 4)
		w.image("golden", api.SourceRegistry, map[string]string{"url": ref})
		w.eventually("much was kept", func() bool { return w.keptOf() > len(body)/4 })
		w.stop()
		w.editKept(func(note map[string]any) { note["state"].(map[string]any)["point"] = point })
		s.asked()
		s.allow(1 << 40)
		w.start()
		w.holds(0, w.state("golden", api.ImageReady), body)
		if from := first(s.asked()); from != 0 {
			t.Errorf("asked from byte %d on", from)
		}
	})
}
