package importer_test

import (
	"bytes"
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
	originhttp "drover.io/drover/imagestore/origin/http"
	"drover.io/drover/replicas/stack"
)

func newDisk(t testing.TB, dir string) *stack.Disk {
	t.Helper()
	d, err := stack.Add(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func newWant() importer.Spec {
	return importer.Spec{UID: api.NewUID(), Name: "golden", Layers: []api.UID{api.NewUID()}}
}

// sample is an image with data, zeros inside and between chunks, and an odd end.
func sample(size int) []byte {
	b := make([]byte, size)
	r := rand.NewChaCha8([32]byte{7})
	for i := 0; i < size; i += 5 << 20 {
		_, _ = r.Read(b[i:min(i+1<<20+777, size)])
	}
	_, _ = r.Read(b[size-1000:])
	return b
}

func sum(b []byte) string {
	h := sha512.Sum512(b)
	return hex.EncodeToString(h[:])
}

// sparseFile writes b with holes for 4 KiB of zeros each.
func sparseFile(t testing.TB, b []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(len(b))); err != nil {
		t.Fatal(err)
	}
	zero := make([]byte, 4096)
	for i := 0; i < len(b); i += 4096 {
		if p := b[i:min(i+4096, len(b))]; !bytes.Equal(p, zero[:len(p)]) {
			if _, err := f.WriteAt(p, int64(i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return name
}

func file(name string) func(context.Context) (*origin.Stream, error) {
	return func(context.Context) (*origin.Stream, error) { return origin.OpenFile(name) }
}

func download(url string) func(context.Context) (*origin.Stream, error) {
	return func(ctx context.Context) (*origin.Stream, error) {
		return originhttp.Open(ctx, url, originhttp.Options{Pause: time.Millisecond, Start: 20 * time.Second,
			Stall: 20 * time.Second, Access: anywhere})
	}
}

// anywhere lets tests ask servers of this machine.
var anywhere = originhttp.Access{Allow: func(netip.Addr) bool { return true }}

// stream is a source in order, of known size or not.
func stream(b []byte, sized bool) func(context.Context) (*origin.Stream, error) {
	return func(context.Context) (*origin.Stream, error) {
		s := &origin.Stream{ReadCloser: io.NopCloser(bytes.NewReader(b)), Size: -1, Name: "a stream"}
		if sized {
			s.Size = int64(len(b))
		}
		return s, nil
	}
}

// server serves b in a single piece; without sized, the answer does not announce the size.
func server(t testing.TB, b []byte, sized bool) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if sized {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
		}
		for i := 0; i < len(b); i += 1 << 20 {
			if _, err := w.Write(b[i:min(i+1<<20, len(b))]); err != nil {
				return
			}
		}
	}))
	t.Cleanup(s.Close)
	return s.URL + "/image"
}

// holds checks the size, the content and the digests of the image on the disk.
func holds(t *testing.T, d *stack.Disk, want importer.Spec, content []byte) importer.Result {
	t.Helper()
	got, err := importer.Find(d, want)
	if err != nil {
		t.Fatal(err)
	}
	if got.VirtualSize != int64(len(content)) {
		t.Fatalf("virtual size %d, want %d", got.VirtualSize, len(content))
	}
	src, err := d.Open(string(want.Layers[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if padded := (int64(len(content)) + 4095) / 4096 * 4096; src.Size() != padded {
		t.Fatalf("layer of %d bytes, want %d", src.Size(), padded)
	}
	b := make([]byte, src.Size())
	if _, err := src.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if !bytes.Equal(b[:len(content)], content) || len(bytes.TrimLeft(b[len(content):], "\x00")) > 0 {
		t.Fatal("the layer holds something else")
	}
	if err := d.Verify(t.Context(), string(want.Layers[0])); err != nil {
		t.Fatal(err)
	}
	return got
}

// clean checks the disk for remains.
func clean(t *testing.T, dir string) {
	t.Helper()
	for _, sub := range []string{"layers", "images"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			t.Errorf("left on the disk: %s/%s", sub, e.Name())
		}
	}
}

func command(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// qcow2File makes a qcow2 image of b.
func qcow2File(t testing.TB, b []byte, opts ...string) string {
	t.Helper()
	raw := sparseFile(t, b)
	out := filepath.Join(t.TempDir(), "image.qcow2")
	command(t, "qemu-img", append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, opts...), raw, out)...)
	return out
}

func read(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestImport imports the same content in every way: the bytes are the same, and the digest is the same for every format
// and archive, from a file and from a stream.
func TestImport(t *testing.T) {
	suite.Slow(t)
	content := sample(23<<20 + 512) // qcow2 counts sectors
	plain := sparseFile(t, content)
	type image struct {
		format, file string
	}
	images := []image{{"raw", plain}}
	for _, f := range []struct{ format, options string }{
		{"qcow2", "-c"}, {"qcow2", ""}, {"qcow2", "-c -o compression_type=zstd"}, {"qcow2", "-o cluster_size=512"},
		{"vmdk", ""}, {"vmdk", "-o subformat=streamOptimized"},
		{"vhd", "-o subformat=fixed,force_size=on"}, {"vhd", "-o subformat=dynamic,force_size=on"},
		{"vhdx", ""}, {"vhdx", "-o subformat=fixed"},
	} {
		out := filepath.Join(t.TempDir(), "image")
		qemu := strings.Replace(f.format, "vhd", "vpc", 1)
		if f.format == "vhdx" {
			qemu = f.format
		}
		command(t, "sh", "-c", fmt.Sprintf("qemu-img convert -f raw -O %s %s %s %s", qemu, f.options, plain, out))
		images = append(images, image{f.format, out})
	}
	type way struct {
		name, format string
		bytes        []byte
		open         func(context.Context) (*origin.Stream, error)
	}
	var ways []way
	for i, m := range images {
		b := read(t, m.file)
		name := fmt.Sprintf("%s %d", m.format, i)
		ways = append(ways, way{name + " file", m.format, b, file(m.file)},
			way{name + " stream", m.format, b, stream(b, true)},
			way{name + " stream of unknown size", m.format, b, stream(b, false)})
		if i < 2 {
			ways = append(ways, way{name + " download", m.format, b, download(server(t, b, true))},
				way{name + " download of unknown size", m.format, b, download(server(t, b, false))})
		}
		for tool, ext := range map[string]string{"gzip -1": ".gz", "xz -0": ".xz", "zstd -1 -q": ".zst"} {
			if i%3 != len(tool)%3 && i > 1 {
				continue // each format in some archive
			}
			out := filepath.Join(t.TempDir(), "packed")
			command(t, "sh", "-c", tool+" -c "+m.file+" > "+out)
			b := read(t, out)
			ways = append(ways, way{name + ext + " file", m.format + ext, b, file(out)},
				way{name + ext + " stream", m.format + ext, b, stream(b, i%2 == 0)})
		}
	}
	// Much of an import is waiting for the disk: two imports run at a time, each on a disk of its own.
	type on struct {
		d   *stack.Disk
		dir string
	}
	disks := make(chan on, 2)
	for range cap(disks) {
		dir := t.TempDir()
		disks <- on{newDisk(t, dir), dir}
	}
	digest := ""
	for i, c := range ways {
		t.Run(c.name, func(t *testing.T) {
			if i > 0 { // the first import sets the digest
				t.Parallel()
			}
			at := <-disks
			defer func() { disks <- at }()
			d, dir := at.d, at.dir
			want := newWant()
			want.Checksum = strings.ToUpper(sum(c.bytes))
			var p importer.Progress
			made, err := importer.Import(t.Context(), d, want, &p, c.open)
			if err != nil {
				t.Fatal(err)
			}
			got := holds(t, d, want, content)
			if got.Format != c.format || got.Checksum != sum(c.bytes) || got.Digest != made.Digest ||
				got.Allocated != made.Allocated || got.Allocated <= 0 || got.Allocated > int64(len(content))*9/10 {
				t.Errorf("found %+v, made %+v", got, made)
			}
			if i == 0 {
				digest = got.Digest
			} else if digest != got.Digest {
				t.Errorf("digest %s differs from the first way's, %s", got.Digest, digest)
			}
			state, _, done, total := p.Snapshot()
			if state != api.ImageTransfer || done != int64(len(c.bytes)) || total != done {
				t.Errorf("progress ended at %s, %d of %d", state, done, total)
			}
			if err := importer.Remove(t.Context(), d, want); err != nil {
				t.Fatal(err)
			}
			clean(t, dir)
		})
	}
}

func TestImportFailuresLeaveNothing(t *testing.T) {
	content := sample(9 << 20)
	q := read(t, qcow2File(t, content, "-c"))
	html := []byte("<!DOCTYPE html><html><body>log in first</body></html>")
	backed := filepath.Join(t.TempDir(), "backed.qcow2")
	command(t, "qemu-img", "create", "-f", "qcow2", "-b", sparseFile(t, content), "-F", "raw", backed)
	cut := func(b []byte, n int) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:n])
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	named := func(b []byte) string {
		name := filepath.Join(t.TempDir(), "x")
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	wrong := sum([]byte("something else"))
	for _, c := range []struct {
		name     string
		open     func(context.Context) (*origin.Stream, error)
		checksum string
		kind     api.Kind
		text     string
	}{
		{"wrong checksum of raw", download(server(t, content, true)), wrong, api.Corrupt, "wrong checksum"},
		{"wrong checksum of qcow2", download(server(t, q, true)), wrong, api.Corrupt, "wrong checksum"},
		{"wrong checksum of a qcow2 file", file(named(q)), wrong, api.Corrupt, "wrong checksum"},
		{"raw cut", download(cut(content, 5<<20)), "", api.Unavailable, "5242880 of 9437184 bytes"},
		{"qcow2 cut", download(cut(q, len(q)/2)), "", api.Unavailable, "and it cannot send the rest alone"},
		{"truncated qcow2 file", file(named(q[:len(q)/2])), "", api.Corrupt, ""},
		{"qcow2 head alone", file(named(q[:200])), "", api.Corrupt, ""},
		{"html", download(server(t, html, true)), "", api.Invalid, "not a disk image"},
		{"empty", download(server(t, nil, true)), "", api.Invalid, "empty"},
		{"empty file", file(named(nil)), "", api.Invalid, "empty"},
		{"backing file", file(backed), "", api.Unsupported, "backing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			d := newDisk(t, dir)
			want := newWant()
			want.Checksum = c.checksum
			_, err := importer.Import(t.Context(), d, want, new(importer.Progress), c.open)
			if err == nil || !api.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v (kind %v), want %q of kind %v", err, api.KindOf(err), c.text, c.kind)
			}
			clean(t, dir)
		})
	}
}

// TestImportIsCancelled: an import cancelled at any moment ends soon, and leaves nothing.
func TestImportIsCancelled(t *testing.T) {
	suite.Slow(t)
	content := sample(24 << 20)
	q := read(t, qcow2File(t, content, "-c"))
	for _, b := range [][]byte{content, q} {
		for _, part := range []int{0, 1, 4096, len(b) / 2, len(b) - 1} {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Length", fmt.Sprint(len(b)))
				_, _ = w.Write(b[:part])
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
			}))
			dir := t.TempDir()
			d := newDisk(t, dir)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			_, err := importer.Import(ctx, d, newWant(), new(importer.Progress), func(ctx context.Context) (*origin.Stream, error) {
				return originhttp.Open(ctx, s.URL, originhttp.Options{Access: anywhere})
			})
			if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
				t.Errorf("stopped after %d of %d bytes: %v", part, len(b), err)
			}
			cancel()
			s.Close()
			clean(t, dir)
		}
	}
}

// smallFS mounts an ext4 of n MiB.
func smallFS(t *testing.T, n int) string {
	t.Helper()
	suite.System(t)
	img, dir := filepath.Join(t.TempDir(), "fs"), t.TempDir()
	command(t, "truncate", "-s", fmt.Sprintf("%dM", n), img)
	command(t, "mkfs.ext4", "-q", "-b", "4096", "-m", "0", img)
	command(t, "mount", "-o", "loop", img, dir)
	t.Cleanup(func() { unmount(t, dir) })
	return dir
}

// unmount takes a mount off. A starting process with a copy of the mount table keeps the mount busy for a moment.
func unmount(t *testing.T, dir string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	err := unix.Unmount(dir, 0)
	for end := time.Now().Add(time.Minute); errors.Is(err, unix.EBUSY) && time.Now().Before(end); <-tick.C {
		err = unix.Unmount(dir, 0)
	}
	if err != nil {
		t.Fatalf("unmount %s: %v", dir, err)
	}
}

func TestDiskFull(t *testing.T) {
	content := make([]byte, 60<<20)
	r := rand.NewChaCha8([32]byte{3})
	_, _ = r.Read(content)
	dir := smallFS(t, 40)
	d, err := stack.Add(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	_, before, _, err := d.Statfs()
	if err != nil {
		t.Fatal(err)
	}
	q := qcow2File(t, content[:30<<20]) // the image fits, but not together with the converted layer
	for name, open := range map[string]func(context.Context) (*origin.Stream, error){
		"file":   file(sparseFile(t, content)),
		"stream": download(server(t, content, true)),
		"qcow2":  download(server(t, read(t, q), true)),
		"spool":  download(server(t, content, false)),
	} {
		least := watchRoom(t, d)
		_, err := importer.Import(t.Context(), d, newWant(), new(importer.Progress), open)
		if n := least(); n < before/40 {
			t.Errorf("%s: the volumes of the disk had %d bytes left", name, n)
		}
		if !api.Is(err, api.Full) || !strings.Contains(err.Error(), "full") {
			t.Errorf("%s: got %v (kind %v)", name, err, api.KindOf(err))
		}
		clean(t, dir)
		if _, now, _, err := d.Statfs(); err != nil || now < before-1<<20 {
			t.Errorf("%s: %d bytes are free, %d were before: %v", name, now, before, err)
		}
	}
	small := newWant()
	if _, err := importer.Import(t.Context(), d, small, new(importer.Progress), file(sparseFile(t, content[:1<<20]))); err != nil {
		t.Errorf("the disk has room again: %v", err)
	}
}

// watchRoom watches the room on a disk, and returns a function which reports the least.
func watchRoom(t *testing.T, d *stack.Disk) func() int64 {
	t.Helper()
	stop, least := make(chan struct{}), make(chan int64)
	go func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		n := int64(1 << 62)
		for {
			select {
			case <-stop:
				least <- n
				return
			case <-tick.C:
				if _, free, _, err := d.Statfs(); err == nil {
					n = min(n, free)
				}
			}
		}
	}()
	return func() int64 { close(stop); return <-least }
}

func TestCopyBetweenDisks(t *testing.T) {
	content := sample(11 << 20)
	from, to := newDisk(t, t.TempDir()), newDisk(t, t.TempDir())
	want := newWant()
	made, err := importer.Import(t.Context(), from, want, new(importer.Progress), file(sparseFile(t, content)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := importer.Copy(t.Context(), to, from, newWant(), new(importer.Progress)); !api.Is(err, api.NotFound) {
		t.Fatalf("copy of what is not there: %v", err)
	}
	for range 2 { // the second copy finds the image
		got, err := importer.Copy(t.Context(), from, to, want, new(importer.Progress))
		if err != nil || got.Digest != made.Digest || got.Checksum != made.Checksum {
			t.Fatalf("%+v: %v", got, err)
		}
		holds(t, to, want, content)
	}
}

// TestLeftovers: the importer uses or removes the remains of a crash: a layer without the image's record.
func TestLeftovers(t *testing.T) {
	content := sample(5 << 20)
	dir := t.TempDir()
	d := newDisk(t, dir)
	name := sparseFile(t, content)
	orphan := func(want importer.Spec) string {
		w, err := d.Create(t.Context(), string(want.Layers[0]), int64(len(content)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteAt(content, 0); err != nil {
			t.Fatal(err)
		}
		root, _, err := w.Seal(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return root
	}
	want := newWant()
	orphan(want)
	if _, err := importer.Find(d, want); !api.Is(err, api.NotFound) {
		t.Fatalf("found without a record: %v", err)
	}
	if _, err := importer.Import(t.Context(), d, want, new(importer.Progress), file(name)); err != nil {
		t.Fatal(err)
	}
	holds(t, d, want, content)
	if err := importer.Remove(t.Context(), d, want); err != nil {
		t.Fatal(err)
	}
	clean(t, dir)

	want = newWant()
	root := orphan(want)
	want.Digest, want.VirtualSize, want.Format, want.Checksum = root, int64(len(content)), "raw", sum(content)
	holds(t, d, want, content) // the digest vouches for the layer
	if err := importer.Remove(t.Context(), d, want); err != nil {
		t.Fatal(err)
	}

	want = newWant()
	orphan(want)
	if err := importer.Remove(t.Context(), d, want); err != nil {
		t.Fatal(err)
	}
	clean(t, dir)

	// A source with changed content is not taken for the same image.
	want = newWant()
	want.Digest = strings.Repeat("0", 64)
	if _, err := importer.Import(t.Context(), d, want, new(importer.Progress), file(name)); !api.Is(err, api.Corrupt) {
		t.Fatalf("other content: %v", err)
	}
	clean(t, dir)
}

func TestRemoveRefusesWhatAReplicaUses(t *testing.T) {
	content := sample(10 << 20)
	d := newDisk(t, t.TempDir())
	want := newWant()
	if _, err := importer.Import(t.Context(), d, want, new(importer.Progress), file(sparseFile(t, content))); err != nil {
		t.Fatal(err)
	}
	rep := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20,
		Layers: []string{string(want.Layers[0])}}
	if err := d.CreateReplica(t.Context(), rep); err != nil {
		t.Fatal(err)
	}
	if err := importer.Remove(t.Context(), d, want); !api.Is(err, api.InUse) {
		t.Fatalf("removed under a replica: %v", err)
	}
	holds(t, d, want, content)
	if err := d.RemoveReplica(rep.UID); err != nil {
		t.Fatal(err)
	}
	if err := importer.Remove(t.Context(), d, want); err != nil {
		t.Fatal(err)
	}
}

var _ block.Layers = (*stack.Disk)(nil)
