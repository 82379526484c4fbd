package stack

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// The cost of a single operation must not grow with the images and volumes of the disk.

// fillDisk fills a disk with n images, each with a separate layer, and with a replica on each image.
func fillDisk(tb testing.TB, d *Disk, n int) (images, replicas []string) {
	tb.Helper()
	for range n {
		uid := string(api.NewUID())
		w, err := d.Create(tb.Context(), uid, 1<<20)
		if err != nil {
			tb.Fatal(err)
		}
		if _, err := w.WriteAt([]byte("golden"), 0); err != nil {
			tb.Fatal(err)
		}
		if _, _, err := w.Seal(tb.Context()); err != nil {
			tb.Fatal(err)
		}
		img := block.Image{UID: string(api.NewUID()), Name: "golden", Layers: []string{uid}}
		if err := d.PutImage(img); err != nil {
			tb.Fatal(err)
		}
		s := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 1 << 20, Layers: []string{uid}}
		if err := d.CreateReplica(tb.Context(), s); err != nil {
			tb.Fatal(err)
		}
		images, replicas = append(images, img.UID), append(replicas, s.UID)
	}
	return images, replicas
}

// readsFS counts the reads of files, by their names.
type readsFS struct {
	file.FS
	mu    sync.Mutex
	reads map[string]int
}

type readsHandle struct {
	file.Handle
	fs   *readsFS
	name string
}

func (f *readsFS) Open(name string, flag int, perm fs.FileMode) (file.Handle, error) {
	h, err := f.FS.Open(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &readsHandle{h, f, filepath.Base(name)}, nil
}

func (h *readsHandle) ReadAt(p []byte, off int64) (int, error) {
	h.fs.mu.Lock()
	h.fs.reads[h.name]++
	h.fs.mu.Unlock()
	return h.Handle.ReadAt(p, off)
}

func (f *readsFS) take() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.reads
	f.reads = map[string]int{}
	return was
}

// TestNothingKnownIsReadAgain: the searches for unfinished layers and for mergeable layers read no cached record again.
func TestNothingKnownIsReadAgain(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	d := newDisk(t)
	counted := &readsFS{FS: d.FS, reads: map[string]int{}}
	d.FS = counted
	_, replicas := fillDisk(t, d, 5)
	<-time.After(layer.SteadyAge + 100*time.Millisecond) // the records are old enough for the cache
	look := func() {
		t.Helper()
		if list, err := d.ToFinish(); err != nil || len(list) > 0 {
			t.Fatal(list, err)
		}
		if others, err := d.namedByOthers(replicas[0]); err != nil || len(others) != 5 {
			t.Fatal(others, err)
		}
	}
	look()
	if n := counted.take()[layer.LayerFile]; n == 0 {
		t.Fatal("nothing was read at all")
	}
	look()
	again := counted.take()
	for _, name := range []string{layer.LayerFile, stackFile, imageFile} {
		if n := again[name]; n > 0 {
			t.Errorf("%s was read %d times again", name, n)
		}
	}
}

// TestLayerWithoutChecksumsIsFinishedAgain: a layer without checksums is unfinished, even if the last search found the
// layer whole.
func TestLayerWithoutChecksumsIsFinishedAgain(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	images, _ := fillDisk(t, d, 2)
	if list, err := d.ToFinish(); err != nil || len(list) > 0 {
		t.Fatal(list, err)
	}
	img, err := d.readImage(images[1])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(d.Join(layer.Dir, img.Layers[0], layer.CRCsFile)); err != nil {
		t.Fatal(err)
	}
	if list, err := d.ToFinish(); err != nil || !slices.Equal(list, img.Layers) {
		t.Fatal(list, err)
	}
	if err := d.Finish(t.Context(), img.Layers[0]); err != nil {
		t.Fatal(err)
	}
	if list, err := d.ToFinish(); err != nil || len(list) > 0 {
		t.Fatal(list, err)
	}
}

// TestSharedSpaceIsReadFromOneRecord: Space needs a single record with a reference to a shared layer. Space does not
// need the disk's lock, which other calls hold while they wait for the disk. The answer comes from the present record.
func TestSharedSpaceIsReadFromOneRecord(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	images, replicas := fillDisk(t, d, 3)
	shares := func(want bool) {
		t.Helper()
		used, shared, err := d.Space(replicas[1])
		if err != nil || (shared > 0) != want {
			t.Fatalf("%d bytes, %d of them shared, %v", used, shared, err)
		}
	}
	shares(true)
	unlock, err := d.Lock()
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 1)
	go func() {
		_, shared, err := d.Space(replicas[1])
		if err == nil && shared == 0 {
			err = api.Errorf(api.NotFound, "nothing is shared")
		}
		told <- err
	}()
	select {
	case err = <-told:
		unlock()
	case <-time.After(5 * time.Minute):
		unlock()
		t.Fatal("the disk's lock was waited for")
	}
	if err != nil {
		t.Fatal(err)
	}
	img, err := d.readImage(images[1])
	if err != nil {
		t.Fatal(err)
	}
	other, err := d.readImage(images[0])
	if err != nil {
		t.Fatal(err)
	}
	own := img.Layers
	for _, layers := range [][]string{other.Layers, own, other.Layers} { // the record is replaced
		img.Layers = layers
		if err := d.PutImage(img); err != nil {
			t.Fatal(err)
		}
		shares(layers[0] == own[0])
	}
	clone := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 1 << 20, Layers: own}
	if err := d.CreateReplica(t.Context(), clone); err != nil {
		t.Fatal(err)
	}
	shares(true)
	if err := d.RemoveReplica(clone.UID); err != nil {
		t.Fatal(err)
	}
	shares(false)
}

// BenchmarkManyRecords times the readers of a disk's records, beside a thousand images and replicas.
func BenchmarkManyRecords(b *testing.B) {
	d := newDisk(b)
	_, replicas := fillDisk(b, d, 1000)
	<-time.After(layer.SteadyAge + 100*time.Millisecond) // until then records are read each time
	for _, of := range []struct {
		name string
		do   func() error
	}{
		{"named", func() error { _, err := d.referencedLayers(); return err }},
		{"settle", func() error { return d.syncReferences(b.Context()) }},
		{"unfinished", func() error { _, err := d.Unfinished(); return err }},
		{"mergeable", func() error { _, err := d.Mergeable(); return err }},
		{"space", func() error { _, _, err := d.Space(replicas[0]); return err }},
		{"others", func() error { _, err := d.namedByOthers(replicas[0]); return err }},
		{"collect", func() error { return d.Collect(b.Context(), time.Hour) }},
		{"replicas", func() error { _, err := d.Replicas(); return err }},
		{"images", func() error { _, err := d.Images(); return err }},
	} {
		b.Run(of.name, func(b *testing.B) {
			for range b.N {
				if err := of.do(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
