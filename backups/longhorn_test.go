package backups_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/imagestore/format/qcow2"
	"drover.io/drover/imagestore/importer"
)

// newLonghorn is newPair with a third target, old, whose store is one of Longhorn.
func newLonghorn(t *testing.T) (w, offsite, old *world) {
	t.Helper()
	w, offsite = newPair(t)
	old = &world{Server: w.Server}
	old.folder, old.store = newFolder(t)
	w.opts.OpenDisk = importer.OpenDisk
	w.opts.Targets.OpenStore = openPair(w, offsite, old)
	w.Create(&api.BackupTarget{ObjectMeta: apitest.Named("old"),
		Spec: api.BackupTargetSpec{BackupTargetURL: "file://" + old.folder}})
	return w, offsite, old
}

// imageFile is the file of a qcow2 image with a content.
func imageFile(t *testing.T, content []byte) []byte {
	t.Helper()
	raw, out := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "qcow2")
	must(t, os.WriteFile(raw, content, 0o600))
	src, err := file.Open(raw)
	must(t, err)
	defer src.Close()
	f, err := os.Create(out)
	must(t, err)
	defer f.Close()
	must(t, qcow2.Write(t.Context(), f, src, qcow2.WriteOptions{}))
	b, err := os.ReadFile(out)
	must(t, err)
	return b
}

// restored is the content of the backup with a URL.
func (w *world) restored(url string) []byte {
	w.T.Helper()
	open := w.openBackup(url)
	defer open.Close()
	sink := &memorySink{got: make([]byte, open.Size())}
	must(w.T, open.Restore(w.Ctx, sink))
	return sink.got
}

// TestLonghornBackupsAboveImages: a backup of a volume above a backing image is refused while its image is missing. With
// the image in the store, which is qcow2, or on a disk of the node, its restore and its copy have the image's bytes.
func TestLonghornBackupsAboveImages(t *testing.T) {
	for _, where := range []string{"in the store", "on the node"} {
		t.Run(where, func(t *testing.T) {
			w, offsite, old := newLonghorn(t)
			golden := randomBytes(4, 5*chunk)
			clear(golden[3*chunk:])
			copy(golden[4*chunk:], "the last bytes of the image")
			qcow := imageFile(t, golden)
			v := &volume{name: "pvc-1", size: 20 << 20, contents: [][]byte{make([]byte, 20<<20)}}
			above := randomBytes(3, 2<<20)
			copy(v.contents[0], golden)
			copy(v.contents[0][2<<20:], above)
			longhorntest.AddBackup(t, old.store, longhorntest.Backup{Volume: v.name, Name: "backup-1", Size: v.size,
				BlockSize: 2 << 20, Method: "lz4", Image: "golden", ImageSum: longhorntest.ImageSum(qcow),
				Blocks: map[int64][]byte{2 << 20: above}})
			w.start(nil)
			w.awaitAvailable("offsite")
			w.awaitAvailable("old")
			found := &api.Backup{ObjectMeta: apitest.Named("backup-1")}
			w.awaitState(found, api.BackupCompleted)
			if _, err := w.openListed(found.Status.URL); !api.Is(err, api.NotFound) ||
				!strings.Contains(err.Error(), `"golden"`) {
				t.Errorf("the open of a backup without its image: %v", err)
			}
			early := w.newCopy("early", "backup-1", v.name, "offsite")
			w.awaitState(early, api.BackupError)
			if !strings.Contains(early.Status.Message, `"golden"`) {
				t.Errorf("message %q", early.Status.Message)
			}

			if where == "in the store" {
				longhorntest.AddImage(t, old.store, longhorntest.Image{Name: "golden", Content: qcow, Method: "lz4"})
			} else {
				w.addReadyCopy(w.newImage("of-the-cluster", int64(len(golden)), nil, nil, map[int64][]byte{0: golden}), qcow)
			}
			if !bytes.Equal(w.restored(found.Status.URL), v.contents[0]) {
				t.Error("Longhorn's backup is restored with other bytes")
			}
			moved := w.newCopy("moved", "backup-1", v.name, "offsite")
			w.awaitState(moved, api.BackupCompleted)
			if s := moved.Status; s.VolumeBackingImageName != "golden" || s.VolumeBackingImageDigest != "" ||
				s.VolumeBackingImageChecksum != longhorntest.ImageSum(qcow) {
				t.Errorf("status %+v", s)
			}
			offsite.compare(moved, v, 0)
		})
	}
}

// addReadyCopy adds the object of an image's copy on the disk, made of a file.
func (w *world) addReadyCopy(i *image, file []byte) {
	w.T.Helper()
	c := &api.ImageCopy{ObjectMeta: apitest.Named(i.name), Spec: api.ImageCopySpec{Image: i.name, UUID: i.uuid,
		Layers: i.layers, Node: nodeName, Disk: api.UID(w.disk.UID())}}
	w.Create(c)
	apitest.EditStatus(w.Server, c, func(c *api.ImageCopy) {
		c.Status.State, c.Status.Checksum = api.ImageReady, longhorntest.ImageSum(file)
		c.Status.VirtualSize, c.Status.Format = int64(len(i.content)), "qcow2"
	})
	apitest.Await(w.Server, c, &api.ImageCopyList{}, "ready", func(c *api.ImageCopy) bool { return c.Status.Checksum != "" })
}

// TestKnownChunksOfLonghornAreNotRead: a verified backup is open for reads of chunks. Its second copy, into a repository
// that has the chunks, reads no block, and the copy of the next backup reads the changed block. The restore of that one
// learns it, and is open for reads of chunks, too. Backups of which little is known are not read before their restores.
func TestKnownChunksOfLonghornAreNotRead(t *testing.T) {
	w, offsite, old := newLonghorn(t)
	var reads atomic.Int64
	old.store.set(func(_ context.Context, operation, name string) error {
		if operation == "get" && strings.HasSuffix(name, ".blk") {
			reads.Add(1)
		}
		return nil
	}, nil)
	v := &volume{name: "pvc-1", size: 20 << 20, contents: [][]byte{randomBytes(3, 20<<20)}}
	v.contents = append(v.contents, bytes.Clone(v.contents[0]))
	copy(v.contents[1][4<<20:], randomBytes(4, 2<<20))
	for i, name := range []string{"one", "two"} {
		blocks := map[int64][]byte{}
		for off := int64(0); off < v.size; off += 2 << 20 {
			blocks[off] = v.contents[i][off:][:2<<20]
		}
		longhorntest.AddBackup(t, old.store, longhorntest.Backup{Volume: v.name, Name: name, Size: v.size,
			BlockSize: 2 << 20, Method: "lz4", Blocks: blocks, Day: i + 1})
	}
	w.start(nil)
	w.awaitAvailable("offsite")
	w.awaitAvailable("old")
	one, two := &api.Backup{ObjectMeta: apitest.Named("one")}, &api.Backup{ObjectMeta: apitest.Named("two")}
	w.awaitState(one, api.BackupCompleted)
	w.awaitState(two, api.BackupCompleted)
	demand := func(b *api.Backup, known bool, blocks int64) {
		t.Helper()
		reads.Store(0)
		open, err := w.open(w.Ctx, b.Status.URL)
		must(t, err)
		defer open.Close()
		err = open.(block.ChunkedBackup).Digests(w.Ctx, func(int64, [32]byte) {})
		if (err == nil) != known || reads.Load() != blocks {
			t.Errorf("backup %s: %v after reads of %d blocks, want %d", b.Name, err, reads.Load(), blocks)
		}
	}
	copied := func(name string, of *api.Backup, content int, blocks int64) {
		t.Helper()
		reads.Store(0)
		c := w.newCopy(name, of.Name, v.name, "offsite")
		w.awaitState(c, api.BackupCompleted)
		if n := reads.Load(); n != blocks {
			t.Errorf("the copy %s read %d blocks, want %d", name, n, blocks)
		}
		offsite.compare(c, v, content)
	}
	demand(one, false, 0)
	copied("first", one, 0, 10)
	demand(one, true, 0)
	copied("again", one, 0, 0)
	demand(two, true, 1)
	copied("second", two, 1, 1)
}
