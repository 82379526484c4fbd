package targets

import (
	"bytes"
	"context"
	"crypto/sha512"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/driver/kubeapi/apitest"
)

// addLonghorn writes a backup of volume pvc-1 with one block into a folder.
func addLonghorn(t *testing.T, dir, name string, change ...func(*longhorntest.Backup)) {
	t.Helper()
	b := longhorntest.Backup{Volume: "pvc-1", Name: name, Size: 12 << 20, BlockSize: 2 << 20, Method: "lz4",
		Image: "golden", Labels: map[string]string{"RecurringJob": "daily"},
		Blocks: map[int64][]byte{2 << 20: make([]byte, 2<<20)}}
	for _, c := range change {
		c(&b)
	}
	longhorntest.AddBackup(t, openFolder(t, dir), b)
}

// forbidWrites reports every write into the store.
func (w *world) forbidWrites() {
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "put" || operation == "delete" {
			w.T.Errorf("Drover calls %s for %s in Longhorn's store", operation, name)
		}
		return nil
	})
}

// TestLonghornStoreIsShownAndNotChanged: the backups of Longhorn appear as Backups, and not those in progress until their
// end. Nothing is written into the store: no repository, no lock, no deletion, no sweep. A Backup that a user deletes
// comes back, and one that Longhorn deletes is deleted after two lists.
func TestLonghornStoreIsShownAndNotChanged(t *testing.T) {
	w := newWorld(t, "node-1")
	w.forbidWrites()
	dir := t.TempDir()
	addLonghorn(t, dir, "backup-1")
	addLonghorn(t, dir, "backup-2", func(b *longhorntest.Backup) { b.InProgress = true })
	addLonghorn(t, dir, "Not_a_name")
	addLonghorn(t, dir, "odd", func(b *longhorntest.Backup) { b.Quantity = "7Mi" })
	w.addTarget("old", "file://"+dir, "")
	target := w.awaitReason("old", api.ReasonAvailable, "")
	if st := target.Status; st.Format != api.FormatLonghorn || st.RepositoryID != "" || st.Encrypted || st.Backups != 1 ||
		st.Initializing != nil {
		t.Errorf("status %+v", st)
	}
	id := blob.ID(longhorn.Name{Volume: "pvc-1", Backup: "backup-1"}.ID()).String()
	b := w.backups()["backup-1"]
	if b == nil || len(w.backups()) != 1 {
		t.Fatalf("Backups %v", w.backups())
	}
	if s := b.Status; s.State != api.BackupCompleted || s.SnapshotID != id || b.Spec.SnapshotID != id ||
		b.Spec.Volume != "pvc-1" || s.VolumeSize != 12<<20 || s.SnapshotCreatedAt != "2026-01-02T03:04:05Z" ||
		s.BackupCreatedAt != "2026-01-02T03:05:00Z" || s.Labels["RecurringJob"] != "daily" ||
		s.VolumeBackingImageName != "golden" || s.SnapshotName != "snap-of-backup-1" || s.NewlyUploadDataSize != 12345 ||
		s.URL != api.BackupURL("file://"+dir, "backup-1", "pvc-1") || b.Target() != "old" || s.BackupMode != api.BackupFull {
		t.Errorf("backup %+v\n%+v", b.Spec, s)
	}

	addLonghorn(t, dir, "backup-2")
	w.sync("old")
	if second := w.backups()["backup-2"]; second == nil || second.Status.State != api.BackupCompleted {
		t.Errorf("the backup that ended has %+v", second)
	}

	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	if note := w.awaitEvent("BackupKept"); !strings.Contains(note, "backup-1") {
		t.Errorf("event: %s", note)
	}
	again := w.sync("old")
	if w.backups()["backup-1"] == nil || again.Status.SweepRequested != nil {
		t.Errorf("the deleted Backup did not come back: %+v", again.Status)
	}

	w.hooks.hide(longhorntest.CfgName("pvc-1", "backup-1"))
	w.sync("old")
	w.clock.advance(time.Hour)
	w.syncTo("old", api.ReasonListIncomplete, "1 backup that its lists lack, such as backup-1;")
	if w.backups()["backup-1"] == nil {
		t.Error("short lists deleted the Backup")
	}
	w.hooks.hide()
	w.sync("old")
	w.awaitReason("old", api.ReasonAvailable, "")

	must(t, os.Remove(filepath.Join(dir, longhorntest.CfgName("pvc-1", "backup-1"))))
	w.sync("old")
	if w.backups()["backup-1"] == nil {
		t.Error("one list deleted the Backup")
	}
	w.clock.advance(time.Minute)
	w.sync("old")
	if all := w.backups(); all["backup-1"] != nil || all["backup-2"] == nil {
		t.Errorf("after two lists: %v", all)
	}

	must(t, os.RemoveAll(filepath.Join(dir, "backupstore")))
	w.sync("old")
	w.awaitReason("old", api.ReasonLostRepository, "no backups of Longhorn any more")
	if w.backups()["backup-2"] == nil {
		t.Error("the Backup of a lost store is deleted")
	}
}

// TestLonghornImagesAreShown: the backing images of Longhorn appear as BackupBackingImages beside the backups of
// volumes, and not those in progress, or with names that no image can have. The file of an image is read, and nothing
// is written.
func TestLonghornImagesAreShown(t *testing.T) {
	w := newWorld(t, "node-1")
	w.forbidWrites()
	dir := t.TempDir()
	addLonghorn(t, dir, "backup-1")
	content := bytes.Repeat([]byte("an image of any format "), 200_000)
	store := openFolder(t, dir)
	longhorntest.AddImage(t, store, longhorntest.Image{Name: "golden", Content: content, Method: "lz4"})
	longhorntest.AddImage(t, store, longhorntest.Image{Name: "late", Content: content, Method: "lz4", InProgress: true})
	longhorntest.AddImage(t, store, longhorntest.Image{Name: "Not_a_name", Content: content, Method: "lz4"})
	w.addTarget("old", "file://"+dir, "")
	if st := w.awaitReason("old", api.ReasonAvailable, "").Status; st.Backups != 2 {
		t.Errorf("status %+v", st)
	}
	var list api.BackupBackingImageList
	must(t, w.Client.List(w.Ctx, &list))
	if len(list.Items) != 1 {
		t.Fatalf("BackupBackingImages %+v", list.Items)
	}
	b, sum := &list.Items[0], fmt.Sprintf("%x", sha512.Sum512(content))
	if s := b.Status; b.Name != "golden" || b.Spec.BackingImageName != "golden" || s.State != api.BackupCompleted ||
		s.Checksum != sum || s.Size != int64(len(content)) || s.BackupCreatedAt != "2026-01-02T03:05:00Z" ||
		s.URL != api.ImageBackupURL("file://"+dir, "golden", "golden") {
		t.Errorf("%+v\n%+v", b.Spec, s)
	}
	id, err := blob.Parse(b.Status.SnapshotID)
	must(t, err)
	o, err := w.nodes["node-1"].OpenLonghornImage(t.Context(), "old", "golden", id)
	must(t, err)
	got := make([]byte, o.Size())
	if _, err := o.File().ReadAt(got, 0); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(got, content) ||
		o.Checksum() != sum {
		t.Errorf("the file of the image: %d bytes, checksum %s, %v", len(got), o.Checksum(), err)
	}
	must(t, o.Close())
	if _, err := w.nodes["node-1"].OpenLonghornImage(t.Context(), "old", "late", id); !api.Is(err, api.NotFound) {
		t.Errorf("an image with the ID of another: %v", err)
	}
	if opens, closes := w.hooks.counts(); opens != closes {
		t.Errorf("%d stores opened, %d closed", opens, closes)
	}
}

// TestRepositoryWinsOverLonghorn: a store with a repository and with Longhorn's backups is one of Drover, and shows the
// repository's backups alone.
func TestRepositoryWinsOverLonghorn(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	s.save(100, factsOf("mine").Tags()...)
	addLonghorn(t, s.dir, "backup-1")
	w.addTarget("default", s.url(), "x")
	if st := w.awaitReason("default", api.ReasonAvailable, "").Status; st.Format != api.FormatRestic || st.Backups != 1 {
		t.Errorf("status %+v", st)
	}
	if w.backups()["mine"] == nil || len(w.backups()) != 1 {
		t.Errorf("Backups %v", w.backups())
	}
}

// TestLonghornAfterAClaimMakesNoRepository: Longhorn begins to use the store after a node claimed the making of a
// repository there.
func TestLonghornAfterAClaimMakesNoRepository(t *testing.T) {
	w := newWorld(t, "node-1")
	dir := t.TempDir()
	var opens atomic.Int32
	w.hooks.set(func(_ context.Context, operation, name string) error {
		switch {
		case operation == "open" && opens.Add(1) == 2: // the first visit asks for the claim
			addLonghorn(t, dir, "backup-1")
		case operation == "put" || operation == "delete":
			t.Errorf("%s of %s in Longhorn's store", operation, name)
		}
		return nil
	})
	w.addTarget("old", "file://"+dir, "")
	if st := w.awaitReason("old", api.ReasonAvailable, "").Status; st.Format != api.FormatLonghorn ||
		st.Initializing != nil {
		t.Errorf("status %+v", st)
	}
}

// TestLonghornIsOpenedByID: a backup is opened although its object has another name, and other work with a repository
// is refused for good.
func TestLonghornIsOpenedByID(t *testing.T) {
	w := newWorld(t, "node-1")
	w.forbidWrites()
	dir := t.TempDir()
	addLonghorn(t, dir, "backup-1", func(b *longhorntest.Backup) { b.Image = "" })
	w.Create(&api.Backup{ObjectMeta: metav1.ObjectMeta{Name: "backup-1"},
		Spec: api.BackupSpec{BackupTargetName: "other", Volume: "vol"}})
	apitest.EditStatus(w.Server, &api.Backup{ObjectMeta: apitest.Named("backup-1")}, func(b *api.Backup) {
		b.Status.State = api.BackupError
	})
	w.addTarget("old", "file://"+dir, "")
	w.awaitReason("old", api.ReasonAvailable, "")
	id := blob.ID(longhorn.Name{Volume: "pvc-1", Backup: "backup-1"}.ID())
	b := w.backups()["backup-1-"+id.String()[:8]]
	if b == nil {
		t.Fatalf("Backups %v", w.backups())
	}
	r := w.nodes["node-1"]
	o, err := r.OpenLonghorn(t.Context(), "old", b.Spec.Volume, id)
	must(t, err)
	if o.Size() != 12<<20 || o.Facts.Backup != "backup-1" {
		t.Errorf("%d bytes, %+v", o.Size(), o.Facts)
	}
	must(t, o.Close())
	if opens, closes := w.hooks.counts(); opens != closes {
		t.Errorf("%d stores opened, %d closed", opens, closes)
	}
	if _, err := r.OpenLonghorn(t.Context(), "old", b.Spec.Volume, blob.ID{}); !api.Is(err, api.NotFound) {
		t.Errorf("a missing backup: %v", err)
	}
	if _, err := r.Open(t.Context(), "old"); !api.Is(err, api.Invalid) || !strings.Contains(err.Error(), "Longhorn") {
		t.Errorf("the repository of Longhorn's store: %v", err)
	}
}
