package backups_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/driver/kubeapi/apitest"
)

// newPair is a world with a second target, offsite, whose repository the node makes, as a world of its own.
func newPair(t *testing.T) (w, offsite *world) {
	t.Helper()
	w = newWorld(t)
	offsite = &world{Server: w.Server}
	offsite.folder, offsite.store = newFolder(t)
	offsite.target = &api.BackupTarget{ObjectMeta: apitest.Named("offsite"),
		Spec: api.BackupTargetSpec{BackupTargetURL: "file://" + offsite.folder}}
	w.opts.Targets.OpenStore = openPair(w, offsite)
	w.Create(offsite.target)
	return w, offsite
}

func newFolder(t *testing.T) (string, *hookedStore) {
	t.Helper()
	dir := t.TempDir()
	s, err := folder.Open(t.Context(), dir)
	must(t, err)
	return dir, &hookedStore{Store: s}
}

func openPair(worlds ...*world) func(context.Context, string, map[string][]byte) (target.Store, error) {
	return func(_ context.Context, url string, _ map[string][]byte) (target.Store, error) {
		for _, w := range worlds {
			if url == "file://"+w.folder {
				return w.store, nil
			}
		}
		return nil, api.Errorf(api.Unavailable, "%s: is not there", url)
	}
}

// awaitAvailable waits until a node can use the target.
func (w *world) awaitAvailable(name string) *api.BackupTarget {
	w.T.Helper()
	t := &api.BackupTarget{ObjectMeta: apitest.Named(name)}
	return apitest.Await(w.Server, t, &api.BackupTargetList{}, "available",
		func(t *api.BackupTarget) bool { return t.Status.Available })
}

// newCopy creates a copy, as the controller role leaves it to the node.
func (w *world) newCopy(name, of, volume, to string) *api.Backup {
	w.T.Helper()
	b := &api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{Volume: volume, BackupTargetName: to, CopyOf: of}}
	b.Finalizers = []string{api.Finalizer}
	w.Create(b)
	return b
}

// TestBackupIsCopiedToAnotherTarget: the copy has the content and the facts of its origin and a URL of its own, is
// restored, and outlives its origin. A second copy uploads no data.
func TestBackupIsCopiedToAnotherTarget(t *testing.T) {
	w, offsite := newPair(t)
	v := w.newVolume("v", 6*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)},
		map[int64][]byte{chunk: randomBytes(2, 8<<10)})
	w.start(nil)
	w.awaitAvailable("offsite")
	first, second := w.newBackup("first", v, 0), w.newBackup("second", v, 1)
	early := w.newCopy("early", "second", "v", "offsite") // waits until its origin is completed
	w.awaitState(first, api.BackupCompleted)
	w.awaitState(second, api.BackupCompleted)
	w.awaitState(early, api.BackupCompleted)
	w.awaitEvent(early, "Normal", "BackupCompleted")
	s, o := early.Status, second.Status
	if s.SnapshotUID != o.SnapshotUID || s.VolumeUID != v.uid || s.SnapshotCreatedAt != o.SnapshotCreatedAt ||
		s.VolumeSize != v.size || s.BackupMode != o.BackupMode || s.Labels["of"] != "second" || s.OwnerID != nodeName ||
		s.NewlyUploadDataSize < 2*chunk || s.URL != api.BackupURL("file://"+offsite.folder, "early", "v") ||
		s.SnapshotID == o.SnapshotID {
		t.Errorf("status %+v\norigin %+v", s, o)
	}
	w.Delete(second)
	w.AwaitDeleted(second, &api.BackupList{})
	offsite.check(1)
	offsite.compare(early, v, 1)
	open := w.openBackup(s.URL)
	sink := &memorySink{got: make([]byte, v.size)}
	must(t, open.Restore(t.Context(), sink))
	must(t, open.Close())
	if !bytes.Equal(sink.got, v.contents[1]) {
		t.Error("the copy is restored with other bytes")
	}

	again := w.newCopy("again", "first", "v", "offsite")
	w.awaitState(again, api.BackupCompleted)
	if n := again.Status.NewlyUploadDataSize; n < chunk || n > chunk+64<<10 { // the whole chunk that became fragments
		t.Errorf("the second copy uploaded %d bytes", n)
	}
	offsite.compare(again, v, 0)
	offsite.check(2)
}

// newCluster is another cluster, with a node of the same name, whose target is the store of a world.
func newCluster(t *testing.T, of *world) (w, shared *world) {
	t.Helper()
	w = newWorld(t)
	shared = &world{Server: w.Server, folder: of.folder, store: &hookedStore{Store: of.store.Store}}
	shared.target = &api.BackupTarget{ObjectMeta: apitest.Named("shared"),
		Spec: api.BackupTargetSpec{BackupTargetURL: "file://" + of.folder}}
	w.opts.Targets.OpenStore = openPair(w, shared)
	w.Create(shared.target)
	w.start(nil)
	w.awaitAvailable("shared")
	return w, shared
}

// TestCopyKeepsItsNameInOtherClusters: another cluster finds the copy by the name and the URL that the copy has in this
// one, and knows the cluster that made the backup.
func TestCopyKeepsItsNameInOtherClusters(t *testing.T) {
	w, offsite := newPair(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	origin := w.newBackup("origin", v, 0)
	w.awaitState(origin, api.BackupCompleted)
	c := w.newCopy("data-2026", "origin", "v", "offsite")
	w.awaitState(c, api.BackupCompleted)
	there, _ := newCluster(t, offsite)
	found := &api.Backup{ObjectMeta: apitest.Named("data-2026")}
	must(t, there.Client.Get(there.Ctx, client.ObjectKeyFromObject(found), found)) // since the target is available
	if found.Status.URL != c.Status.URL || found.Status.Cluster == "" || found.Status.Cluster != origin.Status.Cluster ||
		c.Status.Cluster != origin.Status.Cluster {
		t.Errorf("%+v\norigin %+v\ncopy %+v", found.Status, origin.Status, c.Status)
	}
	open, err := there.open(t.Context(), c.Status.URL)
	must(t, err)
	must(t, open.Close())
}

// TestClustersDoNotShareAGroup: restic groups the backups of a cluster's volume, whichever node made them, apart from
// those of a volume of the same name in another cluster with a node of the same name; `restic forget` keeps the newest
// backup of each.
func TestClustersDoNotShareAGroup(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)}, map[int64][]byte{chunk: randomBytes(2, chunk)})
	w.start(nil)
	w.awaitAvailable(api.DefaultBackupTarget)
	first, second := w.newBackup("first", v, 0), w.newBackup("second", v, 1)
	w.awaitState(first, api.BackupCompleted)
	w.awaitState(second, api.BackupCompleted)
	there, _ := newCluster(t, w)
	u := there.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(3, chunk)})
	other := there.newBackup("other", u, 0, func(b *api.Backup) { b.Spec.BackupTargetName = "shared" })
	there.awaitState(other, api.BackupCompleted)

	type snapshot struct {
		ID, Hostname string
		Tags         []string
	}
	read := func() map[string][]snapshot {
		t.Helper()
		var groups []struct {
			Key       struct{ Hostname string } `json:"group_key"`
			Snapshots []snapshot
		}
		must(t, json.Unmarshal(w.restic("snapshots", "--json", "--group-by", "host,paths", "--no-lock"), &groups))
		all := map[string][]snapshot{}
		for _, g := range groups {
			all[g.Key.Hostname] = append(all[g.Key.Hostname], g.Snapshots...)
		}
		return all
	}
	groups := read()
	here, elsewhere := second.Status.Cluster, other.Status.Cluster
	if here == elsewhere || len(groups) != 2 || len(groups[here]) != 2 || len(groups[elsewhere]) != 1 {
		t.Fatalf("clusters %q and %q: %+v", here, elsewhere, groups)
	}
	if !slices.Contains(groups[here][0].Tags, "node="+nodeName) || !slices.Contains(groups[here][0].Tags, "cluster="+here) {
		t.Errorf("tags %q", groups[here][0].Tags)
	}
	w.stop()
	there.stop()
	w.restic("forget", "--group-by", "host,paths", "--keep-last", "1")
	groups = read()
	if len(groups[here]) != 1 || groups[here][0].ID != second.Status.SnapshotID || len(groups[elsewhere]) != 1 ||
		groups[elsewhere][0].ID != other.Status.SnapshotID {
		t.Errorf("after forget: %+v", groups)
	}
}

// awaitImageCopy waits for the completed copy of an image's backup.
func (w *world) awaitImageCopy(name string) *api.BackupBackingImage {
	w.T.Helper()
	b := &api.BackupBackingImage{ObjectMeta: apitest.Named(name)}
	w.awaitStored(b)
	return b
}

// TestImageBackupIsCopiedToAnotherTarget: the copy has the content and the facts of its origin and a URL of its own, also
// what a restored image takes over, and outlives its origin. A copy into the same target, or of other content than its
// object names, has an Error.
func TestImageBackupIsCopiedToAnotherTarget(t *testing.T) {
	w, offsite := newPair(t)
	i := w.newImage("golden", 4*chunk+5*512, nil, nil, map[int64][]byte{0: randomBytes(1, 3*chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	b := w.backUp("b", i)
	copyImage := func(name, to, digest string) *api.BackupBackingImage {
		x := &api.BackupBackingImage{ObjectMeta: apitest.Named(name), Spec: api.BackupBackingImageSpec{CopyOf: "b",
			BackingImageName: "golden", BackupTargetName: to, Digest: digest}}
		w.Create(x)
		return x
	}
	copyImage("c", "offsite", i.digest) // waits until its origin is completed
	w.awaitStored(b)
	for words, x := range map[string]*api.BackupBackingImage{"lies in target default already": copyImage("same", "default",
		i.digest), "the store names": copyImage("other", "offsite", strings.Repeat("0", 64))} {
		w.awaitImage(x, "has an error", func(b *api.BackupBackingImage) bool { return b.Status.State == api.BackupError })
		if !strings.Contains(x.Status.Message, words) {
			t.Errorf("%s: %s", x.Name, x.Status.Message)
		}
	}
	c := w.awaitImageCopy("c")
	s, o := c.Status, b.Status
	if s.Digest != i.digest || s.Checksum != o.Checksum || s.Size != o.Size || s.Labels["of"] != "b" ||
		s.NewlyUploadDataSize < 3*chunk || s.URL != api.ImageBackupURL("file://"+offsite.folder, "c", "golden") ||
		s.RecordedImage == nil || s.RecordedImage.MinNumberOfCopies != 3 || o.RecordedImage == nil {
		t.Errorf("status %+v\norigin %+v", s, o)
	}
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupBackingImageList{})
	offsite.check(1)
	if !bytes.Equal(offsite.dumpImage(c), i.content) {
		t.Error("restic reads other bytes than the image has")
	}
}

// TestCopyTakesTheImageAlong: the copy of a volume's backup brings the backup of its image into the other target, once
// for each content, and both upload the chunks of the image once.
func TestCopyTakesTheImageAlong(t *testing.T) {
	w, offsite := newPair(t)
	i := w.newImage("golden", 4*chunk, nil, nil, map[int64][]byte{0: randomBytes(1, 3*chunk)})
	object := apitest.Volume("v", 6*chunk)
	object.Spec.BackingImage = "golden"
	v := w.newVolumeOf(object, map[int64][]byte{0: i.content[:3*chunk]}, map[int64][]byte{5 * chunk: randomBytes(2, chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	w.awaitStored(w.backUp("b", i))
	first, second := w.newBackup("first", v, 0), w.newBackup("second", v, 1)
	w.awaitState(first, api.BackupCompleted)
	w.awaitState(second, api.BackupCompleted)
	one := w.newCopy("one", "first", "v", "offsite")
	w.awaitState(one, api.BackupCompleted)
	taken := w.awaitImageCopy(api.ImageBackupName("golden", i.digest, "offsite"))
	if n := one.Status.NewlyUploadDataSize + taken.Status.NewlyUploadDataSize; n < 3*chunk || n > 3*chunk+128<<10 ||
		taken.Spec.CopyOf != "b" || taken.Spec.UserCreated {
		t.Errorf("both upload %d bytes, spec %+v", n, taken.Spec)
	}
	two := w.newCopy("two", "second", "v", "offsite")
	w.awaitState(two, api.BackupCompleted)
	var all api.BackupBackingImageList
	if err := w.Client.List(w.Ctx, &all); err != nil || len(all.Items) != 2 {
		t.Errorf("%d backups of images, %v", len(all.Items), err)
	}
	offsite.check(3)
}

// TestFailedImageCopyIsRepeated: the copy of an image's backup failed for good. The next copy of a volume's backup deletes
// the failed one, makes the copy of the image's backup again, and both are completed.
func TestFailedImageCopyIsRepeated(t *testing.T) {
	w, offsite := newPair(t)
	i := w.newImage("golden", 4*chunk, nil, nil, map[int64][]byte{0: randomBytes(1, 3*chunk)})
	object := apitest.Volume("v", 6*chunk)
	object.Spec.BackingImage = "golden"
	v := w.newVolumeOf(object, map[int64][]byte{0: i.content[:3*chunk]})
	w.start(nil)
	w.awaitAvailable("offsite")
	w.awaitStored(w.backUp("b", i))
	first := w.newBackup("first", v, 0)
	w.awaitState(first, api.BackupCompleted)
	failed := &api.BackupBackingImage{ObjectMeta: apitest.Named(api.ImageBackupName("golden", i.digest, "offsite")),
		Spec: api.BackupBackingImageSpec{CopyOf: "of-a-deleted-one", BackingImageName: "golden", BackupTargetName: "offsite",
			Digest: i.digest}}
	failed.Finalizers = []string{api.Finalizer}
	w.Create(failed)
	w.awaitImage(failed, "has an error", func(b *api.BackupBackingImage) bool { return b.Status.State == api.BackupError })
	w.awaitState(w.newCopy("one", "first", "v", "offsite"), api.BackupCompleted)
	again := w.awaitImageCopy(failed.Name)
	if again.UID == failed.UID || again.Spec.CopyOf != "b" {
		t.Errorf("the image's backup is a copy of %q, UID %s; the failed one has UID %s", again.Spec.CopyOf, again.UID,
			failed.UID)
	}
	offsite.check(2)
}

// TestWrongCopiesHaveAnError: a copy into the same target, of a missing backup, of another volume, or into Longhorn's
// store ends at once.
func TestWrongCopiesHaveAnError(t *testing.T) {
	w, offsite := newPair(t)
	old := &world{Server: w.Server}
	old.folder, old.store = newFolder(t)
	longhorntest.AddBackup(t, old.store, longhorntest.Backup{Volume: "pvc", Name: "backup-1", Size: 12 << 20,
		BlockSize: 2 << 20, Method: "lz4"})
	w.opts.Targets.OpenStore = openPair(w, offsite, old)
	w.Create(&api.BackupTarget{ObjectMeta: apitest.Named("old"),
		Spec: api.BackupTargetSpec{BackupTargetURL: "file://" + old.folder}})
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	w.awaitAvailable("old")
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupCompleted)
	for _, c := range []struct{ name, of, volume, to, message string }{
		{"same", "b", "v", "default", "lies in target default already"},
		{"missing", "nothing", "v", "offsite", "does not exist any more"},
		{"volume", "b", "other", "offsite", "is of volume v, not of volume other"},
		{"longhorn", "b", "v", "old", "Longhorn"},
	} {
		copied := w.newCopy(c.name, c.of, c.volume, c.to)
		w.awaitState(copied, api.BackupError)
		if !strings.Contains(copied.Status.Message, c.message) {
			t.Errorf("%s: %s", c.name, copied.Status.Message)
		}
		w.Delete(copied)
		w.AwaitDeleted(copied, &api.BackupList{})
	}
	offsite.check(0)
}

// TestKilledCopyContinues: a process that ends between the snapshot in the repository and the status does not make the
// next one upload: the next process adopts the snapshot, which leaves a single one.
func TestKilledCopyContinues(t *testing.T) {
	w, offsite := newPair(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupCompleted)
	w.stop()
	w.startUntilCompleted()
	c := w.newCopy("c", "b", "v", "offsite")
	w.killed(c)
	offsite.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && (strings.HasPrefix(name, "data/") || strings.HasPrefix(name, "index/")) {
			t.Errorf("the second process writes %s", name)
		}
		return nil
	}, nil)
	w.start(nil)
	w.awaitState(c, api.BackupCompleted)
	if s := c.Status; s.NewlyUploadDataSize < 2*chunk || s.VolumeSize != v.size {
		t.Errorf("status %+v", s)
	}
	offsite.check(1)
	offsite.compare(c, v, 0)
}

// TestAdoptedCopyIsNotCompletedWith: as TestAdoptedSnapshotIsNotCompletedWith, for a copy whose target has another owner
// for a while.
func TestAdoptedCopyIsNotCompletedWith(t *testing.T) {
	w, offsite := newPair(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupCompleted)
	w.stop()
	allow := w.startUntilAllowed()
	c := w.newCopy("c", "b", "v", "offsite")
	w.receive(w.refused, "the node has made the copy")
	offsite.adoptElsewhere(c)
	allow()
	w.awaitState(c, api.BackupCompleted)
	offsite.compare(c, v, 0)
	offsite.check(1)
}

// TestCopyIsDeletedWhileItRuns: neither a snapshot nor a lock stays in either repository.
func TestCopyIsDeletedWhileItRuns(t *testing.T) {
	for _, c := range []struct{ operation, prefix string }{{"put", "data/"}, {"put", "snapshots/"}} {
		t.Run(c.prefix, func(t *testing.T) {
			w, offsite := newPair(t)
			v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
			w.start(nil)
			w.awaitAvailable("offsite")
			b := w.newBackup("b", v, 0)
			w.awaitState(b, api.BackupCompleted)
			g := newGate(c.operation, c.prefix)
			offsite.store.set(g.hook, nil)
			copied := w.newCopy("copied", "b", "v", "offsite")
			w.receive(g.reached, "the copy uploads")
			w.Delete(copied)
			w.AwaitDeleted(copied, &api.BackupList{})
			offsite.check(0)
			w.check(1)
		})
	}
}

// TestLonghornBackupsAreRestoredAndCopied: a backup of Longhorn is restored by its URL, and copied into a repository,
// where restic reads the content. Longhorn's store does not change.
func TestLonghornBackupsAreRestoredAndCopied(t *testing.T) {
	w, offsite := newPair(t)
	old := &world{Server: w.Server}
	old.folder, old.store = newFolder(t)
	v := &volume{name: "pvc-1", size: 20 << 20}
	content := make([]byte, v.size)
	block := randomBytes(3, 16<<20)
	clear(block[5<<20 : 9<<20])
	copy(content, block)
	v.contents = [][]byte{content}
	longhorntest.AddBackup(t, old.store, longhorntest.Backup{Volume: v.name, Name: "backup-1", Size: v.size,
		BlockSize: 16 << 20, Method: "lz4", Blocks: map[int64][]byte{0: block}})
	before := filesOf(t, old.folder)
	w.opts.Targets.OpenStore = openPair(w, offsite, old)
	w.Create(&api.BackupTarget{ObjectMeta: apitest.Named("old"),
		Spec: api.BackupTargetSpec{BackupTargetURL: "file://" + old.folder}})
	w.start(nil)
	w.awaitAvailable("offsite")
	w.awaitAvailable("old")
	found := &api.Backup{ObjectMeta: apitest.Named("backup-1")}
	w.awaitState(found, api.BackupCompleted)
	open := w.openBackup(found.Status.URL)
	sink := &memorySink{got: make([]byte, v.size)}
	must(t, open.Restore(t.Context(), sink))
	must(t, open.Close())
	if !bytes.Equal(sink.got, content) {
		t.Error("Longhorn's backup is restored with other bytes")
	}
	c := w.newCopy("moved", "backup-1", v.name, "offsite")
	w.awaitState(c, api.BackupCompleted)
	if s := c.Status; s.VolumeSize != v.size || s.SnapshotName != "snap-of-backup-1" ||
		s.NewlyUploadDataSize < 10<<20 || s.NewlyUploadDataSize > 13<<20 {
		t.Errorf("status %+v", s)
	}
	offsite.check(1)
	offsite.compare(c, v, 0)
	if after := filesOf(t, old.folder); len(after) != len(before) {
		t.Errorf("Longhorn's store has other files: %v, before %v", after, before)
	}
}

// filesOf are the files below a folder.
func filesOf(t *testing.T, dir string) (files []string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, path)
		}
		return err
	}))
	if _, err := os.Stat(filepath.Join(dir, "config")); err == nil {
		t.Error("the store has a config")
	}
	return files
}
