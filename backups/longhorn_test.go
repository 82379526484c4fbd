package backups_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
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
