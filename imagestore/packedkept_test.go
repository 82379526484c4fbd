package imagestore_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
)

// packedAs is a file as a tool packs it.
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

// leftOver is what lies beside the layers of the first disk.
func (w *world) leftOver() []string {
	all, _ := filepath.Glob(filepath.Join(w.disks[0].Path(), "layers", "*", "[kb]e*"))
	return all
}

// A packed image goes on after a restart, from any place: the server sends nearly nothing twice.
func TestPackedDownloadGoesOnAfterARestart(t *testing.T) {
	t.Parallel()
	body := content(96<<20, 51)
	copy(body[70<<20:], content(20<<20, 52))
	clear(body[20<<20 : 31<<20])
	for i := 40 << 20; i < 60<<20; i++ {
		body[i] = "abcdefgh"[body[i]&7]
	}
	// The xz tool takes half a minute for that much.
	small := make([]byte, 48<<20)
	for i := 0; i < len(small); i += 3 << 20 {
		copy(small[i:], content(2<<20, byte(i>>20))[:1<<20])
	}
	qcow2, vhdx := converted(t, body, "qcow2"), converted(t, body, "vhdx")
	for _, c := range []struct {
		name       string
		body, file []byte
		args       []string
	}{
		{"raw.gz", body, body, []string{"gzip", "-1c"}},
		{"raw.xz", small, small, []string{"xz", "-0c", "-T1"}},
		{"raw.xz blocks", small, small, []string{"xz", "-0c", "-T2", "--block-size=3MiB"}},
		{"raw.zst", body, body, []string{"zstd", "-1c"}},
		{"raw.zst long", body, body, []string{"zstd", "-3c", "--long=26"}},
		{"qcow2.gz", body, qcow2, []string{"gzip", "-1c"}},
		{"qcow2.xz", small, converted(t, small, "qcow2"), []string{"xz", "-0c", "-T1"}},
		{"qcow2.zst", body, qcow2, []string{"zstd", "-3c"}},
		{"vhdx.zst", body, vhdx, []string{"zstd", "-1c"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := packedAs(t, c.file, c.args...)
			w := newWorld(t, 1)
			w.stop()
			w.opts.KeepEvery = 100 * time.Millisecond
			w.opts.Download.Stall, w.opts.Download.Start = 20*time.Second, 20*time.Second
			w.opts.Download.Connections = 1 // what the server lets through are the next bytes then
			w.start()
			s, url := newSlow(t, file, len(file)*3/8)
			s.probe = probed
			w.image("golden", api.SourceDownload, map[string]string{"url": url},
				func(spec *api.BackingImageSpec) { spec.Checksum = sum(file) })
			last := 0
			for i := range 2 {
				w.eventually("more was kept", func() bool { return w.keptOf() > last+len(file)/8 })
				w.stop()
				s.cut()
				last = w.keptOf()
				if err := w.disks[0].Collect(t.Context(), 0); err != nil { // the disk is put in order meanwhile
					t.Fatal(err)
				}
				s.asked()
				s.allow(len(file) * 3 / 8)
				w.start()
				if i == 1 {
					s.allow(1 << 40)
				}
			}
			w.holds(0, w.state("golden", api.ImageReady), c.body)
			if from := first(s.asked()); from < last {
				t.Errorf("%d bytes were kept, and asked again from byte %d on", last, from)
			}
			if all := w.leftOver(); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
			w.delete(&api.BackingImage{}, "golden")
			w.gone("golden")
			w.clean(0)
		})
	}
}

// Where the server has something else by now, or what was kept is damaged, all of it is fetched anew.
func TestPackedDownloadBeginsAnew(t *testing.T) {
	t.Parallel()
	body := content(80<<20, 53)[:40<<20]
	for i := range body {
		body[i] = "abcdefgh"[body[i]&7]
	}
	other := bytes.Clone(body)
	copy(other[25<<20:], content(10<<20, 54))
	file, again := packedAs(t, body, "gzip", "-1c"), packedAs(t, other, "gzip", "-1c")
	for _, how := range []string{"changed", "damaged", "deleted"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.stop()
			w.opts.KeepEvery = 100 * time.Millisecond
			w.opts.Download.Stall, w.opts.Download.Start = 20*time.Second, 20*time.Second
			w.opts.Download.Connections = 1
			w.start()
			s, url := newSlow(t, file, len(file)*3/4)
			s.probe = probed
			w.image("golden", api.SourceDownload, map[string]string{"url": url})
			w.eventually("much was kept", func() bool { return w.keptOf() > len(file)/4 })
			w.stop()
			s.asked()
			want := body
			switch how {
			case "changed":
				s.mu.Lock()
				s.version, s.body = `"v2"`, again
				s.mu.Unlock()
				want = other
			case "damaged":
				w.damageKept()
			}
			s.allow(1 << 40)
			w.start()
			if how == "deleted" {
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

// damageKept changes what was unpacked before the place where an import is to go on.
func (w *world) damageKept() {
	w.t.Helper()
	all, _ := filepath.Glob(filepath.Join(w.disks[0].Path(), "layers", "*", "data"))
	if len(all) != 1 {
		w.t.Fatalf("%v", all)
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(all[0]), "kept.json"))
	if err != nil {
		w.t.Fatal(err)
	}
	var plain int64
	i := strings.Index(string(b), `"plain":`)
	if _, err := fmt.Sscanf(strings.TrimSpace(string(b)[i+8:]), "%d", &plain); err != nil {
		w.t.Fatal(err)
	}
	f, err := os.OpenFile(all[0], os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xee}, 32<<10), plain-32<<10); err != nil {
		w.t.Fatal(err)
	}
}
