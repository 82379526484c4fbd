package targets

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/tags"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestFoundBackupsHaveURLsOfTheirOwn: two snapshots of one name and volume, such as those of two clusters, become
// Backups with two URLs. A restore names its backup by the URL.
func TestFoundBackupsHaveURLsOfTheirOwn(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	s.saveMany(100, factsOf("nightly").Tags(), factsOf("nightly").Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	var urls []string
	for name, b := range w.backups() {
		urls = append(urls, b.Status.URL)
		if want := api.BackupURL(s.url(), name, "vol"); b.Status.URL != want {
			t.Errorf("backup %s has the URL %s, want %s", name, b.Status.URL, want)
		}
	}
	slices.Sort(urls)
	if len(urls) != 2 || urls[0] == urls[1] {
		t.Errorf("URLs of two backups: %q", urls)
	}
}

// TestNameOfATagStopsNoVisit: a name in a tag from which no second name of an object can be made hides no other backup.
func TestNameOfATagStopsNoVisit(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	long := strings.Repeat("l", tags.NameLimit-10) + "." + strings.Repeat("m", 9)
	ids := s.saveMany(100, factsOf(long).Tags(), factsOf(long).Tags(), factsOf("other").Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	found := map[string]bool{}
	for _, b := range w.backups() {
		found[b.Spec.SnapshotID] = b.Status.State == api.BackupCompleted
	}
	for _, id := range ids {
		if !found[id.String()] {
			t.Errorf("snapshot %s has no completed Backup", id)
		}
	}
}

// TestHostileLabelsStopNoVisit: labels of the greatest allowed length, all of characters that JSON writes as six, hide
// no other backup.
func TestHostileLabelsStopNoVisit(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	hostile := factsOf("hostile").Tags()
	for i := range 64 {
		hostile = append(hostile, fmt.Sprintf("label:%03d%s=%s", i, strings.Repeat("\x01", 317),
			strings.Repeat("\x02", 1024)))
	}
	s.saveMany(100, hostile, factsOf("other").Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	for _, name := range []string{"hostile", "other"} {
		if b := w.backups()[name]; b == nil || b.Status.State != api.BackupCompleted {
			t.Errorf("backup %s: %+v", name, b)
		}
	}
}

// listed are the names of the Backups.
func (w *world) listed() string { return strings.Join(slices.Sorted(maps.Keys(w.backups())), " ") }

// day are the tags of a backup of a volume on a day.
func day(volume string, n int) []string {
	f := factsOf(fmt.Sprintf("%s-%d", volume, n))
	f.Volume, f.Object, f.SnapshotCreated = volume, uid(3+n), fmt.Sprintf("2026-01-%02dT00:00:00Z", n)
	return f.Tags()
}

// TestNewestBackupsAreListed: of a store with more backups than may have objects, the newest of each volume have one
// first, and the newest of all. A newer backup takes the place of an old one, unless a restore reads the old one. The
// store keeps all.
func TestNewestBackupsAreListed(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups = 3 }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	old := s.saveMany(1000, day("a", 3), day("a", 5), day("b", 1), day("a", 2), []string{"of restic"}, day("a", 4))
	w.addTarget("default", s.url(), "")
	target := w.awaitReason("default", api.ReasonAvailable, "")
	c := meta.FindStatusCondition(target.Status.Conditions, api.ConditionTooManyBackups)
	if got := w.listed(); got != "a-4 a-5 b-1" || c == nil || !strings.Contains(c.Message, "2 backups") ||
		target.Status.Backups != 5 {
		t.Errorf("Backups %s, condition %+v, status %+v", got, c, target.Status)
	}
	s.save(100, day("a", 6)...)
	if target = w.sync("default"); w.listed() != "a-5 a-6 b-1" || target.Status.Backups != 6 || !s.has(old[5]) {
		t.Errorf("with a newer backup: Backups %s, %d in the store", w.listed(), target.Status.Backups)
	}
	img := &api.BackingImage{ObjectMeta: apitest.Named("restored"), Spec: api.BackingImageSpec{MinNumberOfCopies: 1,
		SourceType:       api.SourceRestore,
		SourceParameters: map[string]string{api.RestoreBackupURL: w.backups()["a-5"].Status.URL}}}
	w.Create(img)
	s.save(100, day("a", 7)...)
	if w.sync("default"); w.listed() != "a-5 a-6 a-7 b-1" {
		t.Errorf("while a restore reads a-5: Backups %s", w.listed())
	}
	w.Delete(img)
	s.save(100, day("b", 8)...)
	w.sync("default") // b-1 has its object until b-8 has one
	if target = w.sync("default"); w.listed() != "a-6 a-7 b-8" || target.Status.Backups != 8 {
		t.Errorf("after the restore: Backups %s, %d in the store", w.listed(), target.Status.Backups)
	}
}

// TestSoughtBackupsHaveObjects: the object of a backup stays while a volume waits that begins with the backup. A backup
// without an object gets one when the URL in a volume, or in an image, names it.
func TestSoughtBackupsHaveObjects(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups = 2 }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	s.saveMany(1000, day("a", 1), day("a", 2))
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	waiting := apitest.Volume("waiting", 16<<20)
	waiting.Spec.FromBackup = w.backups()["a-1"].Status.URL
	w.Create(waiting)
	s.saveMany(1000, day("a", 3), day("a", 4))
	w.sync("default")
	if w.sync("default"); w.listed() != "a-1 a-4" {
		t.Errorf("while a volume waits: Backups %s", w.listed())
	}
	apitest.EditStatus(w.Server, waiting, func(v *api.Volume) { v.Status.State = api.VolumeDetached })
	w.sync("default")
	if w.sync("default"); w.listed() != "a-3 a-4" {
		t.Errorf("after the restore: Backups %s", w.listed())
	}
	late := apitest.Volume("late", 16<<20)
	late.Spec.FromBackup = api.BackupURL(s.url(), "a-1", "a")
	w.Create(late, &api.BackingImage{ObjectMeta: apitest.Named("late"), Spec: api.BackingImageSpec{MinNumberOfCopies: 1,
		SourceType:       api.SourceRestore,
		SourceParameters: map[string]string{api.RestoreBackupURL: api.BackupURL(s.url(), "a-2", "a")}}})
	if w.sync("default"); w.listed() != "a-1 a-2 a-4" {
		t.Errorf("while restores seek older backups: Backups %s", w.listed())
	}
}

// TestFloodOfVolumesKeepsObjects: new backups of many volumes take no object of the newest backup of a volume, of which a
// newer backup still gets one. The older ones stay known: a list that lacks one of them is not believed.
func TestFloodOfVolumesKeepsObjects(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups = 3 }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	old := s.saveMany(1000, day("a", 1), day("a", 2), day("b", 1))
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	s.saveMany(1000, day("c", 10), day("d", 11), day("e", 12), day("f", 13))
	if w.sync("default"); w.listed() != "a-2 b-1 f-13" {
		t.Errorf("after a flood: Backups %s", w.listed())
	}
	s.save(100, day("a", 3)...)
	s.save(100, day("b", 2)...)
	w.sync("default")
	if w.sync("default"); w.listed() != "a-3 b-2 f-13" {
		t.Errorf("after newer backups of the volumes: Backups %s", w.listed())
	}
	w.hooks.hide("snapshots/" + old[0].String())
	w.sync("default")
	if note := w.awaitEvent("ListIncomplete"); !strings.Contains(note,
		"1 snapshot that its lists lack, such as snapshots/"+old[0].String()) {
		t.Errorf("event %s", note)
	}
}

// sweep requests a sweep and waits for its end.
func (w *world) sweep(name string) *api.SweepFact {
	w.T.Helper()
	at := metav1.NewTime(w.clock.now())
	apitest.EditStatus(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named(name)}, func(b *api.BackupTarget) {
		b.Status.SweepRequested = &at
	})
	w.clock.advance(time.Minute)
	w.wake(name)
	return w.awaitTarget(name, "swept", func(b *api.BackupTarget) bool {
		return b.Status.LastSweep != nil && b.Status.LastSweep.EndedAt.After(at.Time)
	}).Status.LastSweep
}

// TestSweepFollowsDeletionsOfOthers: a backup without an object, deleted from the store by others, ends no sweep. After
// the deletion of a backup with an object a visit follows the sweep, and deletes the object, without pollInterval, too.
func TestSweepFollowsDeletionsOfOthers(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups = 2 }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	ids := s.saveMany(1000, day("a", 1), day("a", 2), day("a", 3), day("a", 4))
	apitest.Edit(w.Server, w.addTarget("default", s.url(), ""), func(b *api.BackupTarget) {
		b.Spec.PollInterval = &metav1.Duration{}
	})
	w.awaitReason("default", api.ReasonAvailable, "")
	if w.sync("default"); w.listed() != "a-3 a-4" {
		t.Fatalf("Backups %s", w.listed())
	}
	must(t, s.r.DeleteSnapshots(t.Context(), ids[0]))
	if m := w.sweep("default").Message; m != "" {
		t.Errorf("a sweep after others deleted a backup without an object says %q", m)
	}
	must(t, s.r.DeleteSnapshots(t.Context(), ids[2]))
	failed := w.sweep("default")
	if !strings.Contains(failed.Message, "lacks snapshot "+ids[2].String()[:8]) {
		t.Errorf("a sweep after others deleted a backup with an object says %q", failed.Message)
	}
	w.awaitTarget("default", "visited", func(b *api.BackupTarget) bool {
		return b.Status.LastSyncedAt != nil && !b.Status.LastSyncedAt.Before(&failed.EndedAt)
	})
	w.clock.advance(2 * time.Minute)
	w.wake("default")
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("a-3")}, &api.BackupList{})
	for m := failed.Message; m != ""; { // a sweep that ran during the visit may have failed again
		m = w.sweep("default").Message
	}
	if !s.has(ids[1]) || !s.has(ids[3]) {
		t.Error("the store lost a backup")
	}
}

// TestImageBackupStaysWhileBackupsHaveNoObject: backups without an object may need the backup of an image, which is
// deleted by force alone until each backup has an object again.
func TestImageBackupStaysWhileBackupsHaveNoObject(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups = 2 }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	image := tags.Facts{Backup: "golden", Image: "golden", ImageDigest: strings.Repeat("a", 64), Object: uid(1),
		VolumeSize: 10 << 20}
	ids := s.saveMany(1000, image.Tags(), day("a", 1), day("a", 2))
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	found := &api.BackupBackingImage{ObjectMeta: apitest.Named("golden")}
	w.Delete(found)
	apitest.Await(w.Server, found, &api.BackupBackingImageList{}, "waiting", func(b *api.BackupBackingImage) bool {
		return b.Status.State == api.BackupDeleting && strings.Contains(b.Status.Message, "may need image golden")
	})
	if !s.has(ids[0]) {
		t.Error("the store lost the backup of the image")
	}
	w.Delete(w.backups()["a-2"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("a-2")}, &api.BackupList{})
	w.sync("default")
	w.AwaitDeleted(found, &api.BackupBackingImageList{})
}

// TestOriginalOfAnImagesCopyHasAnObject: the object of an image's backup stays while a copy of the backup is made. The
// backup of a volume with the same name does not.
func TestOriginalOfAnImagesCopyHasAnObject(t *testing.T) {
	t.Parallel()
	var cached client.Reader
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups, cached = 2, r.Client }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	saveImage := func(name string, n int) {
		f := tags.Facts{Backup: name, Image: "golden", ImageDigest: strings.Repeat(fmt.Sprint(n), 64), Object: uid(n),
			VolumeSize: 10 << 20}
		s.now = time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC)
		s.save(100, f.Tags()...)
	}
	saveImage("a-4", 1)
	s.save(100, day("a", 4)...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	copied := &api.BackupBackingImage{ObjectMeta: apitest.Named("copy"), Spec: api.BackupBackingImageSpec{
		BackupTargetName: "far", BackingImageName: "golden", CopyOf: "a-4"}}
	w.Create(copied)
	apitest.Await(w.Server, copied, &api.BackupBackingImageList{}, "cached", func(b *api.BackupBackingImage) bool {
		return cached.Get(w.Ctx, client.ObjectKeyFromObject(b), b.DeepCopy()) == nil
	})
	saveImage("golden-2", 2)
	s.save(100, day("a", 5)...)
	w.sync("default") // objects of new backups come before those of old ones are deleted
	w.sync("default")
	var images api.BackupBackingImageList
	must(t, w.Client.List(w.Ctx, &images))
	var names []string
	for _, b := range images.Items {
		names = append(names, b.Name)
	}
	if got := strings.Join(names, " "); got != "a-4 copy golden-2" || w.listed() != "a-5" {
		t.Errorf("BackupBackingImages %s, Backups %s", got, w.listed())
	}
}

// TestInstantBeyondTheStoreIsNoted: a backup that claims an instant in the future has the instant of its object in the
// store in its status, also a backup of this cluster. A store whose clock is behind changes the instant of no other
// backup.
func TestInstantBeyondTheStoreIsNoted(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	ahead, right := factsOf("ahead"), factsOf("right")
	ahead.SnapshotCreated, right.Object = "2099-01-01T00:00:00Z", uid(5)
	ids := s.saveMany(100, ahead.Tags(), right.Tags())
	stored := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) // before the instants of factsOf
	own := s.save(100, "of this cluster")
	past := s.save(100, "of this cluster, too")
	for _, id := range append(ids, own, past) {
		must(t, os.Chtimes(filepath.Join(s.dir, "snapshots", id.String()), stored, stored))
	}
	apitest.EditStatus(w.Server, w.makeBackup("own", "default", own), func(b *api.Backup) {
		b.Status.SnapshotCreatedAt = ahead.SnapshotCreated
	})
	w.makeBackup("own-past", "default", past)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	all := w.backups()
	noted := stored.Format(time.RFC3339)
	for name, want := range map[string]string{"ahead": noted, "own": noted, "right": "", "own-past": ""} {
		if b := all[name]; b == nil || b.Status.StoredAt != want {
			t.Errorf("backup %s: %+v, want storedAt %q", name, b, want)
		}
	}
	if !all["right"].NewerThan(all["ahead"]) {
		t.Error("the clock of the source hides a newer backup")
	}
}

// TestStoreOfTwoTargetsIsListedInBoth: a backup that the cluster made in one target is found in another target of the
// same store, although the backup's object exists.
func TestStoreOfTwoTargetsIsListedInBoth(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	w.addTarget("one", s.url(), "x")
	w.awaitReason("one", api.ReasonAvailable, "")
	made := w.makeBackup("made", "one", s.save(100))
	facts := factsOf("made")
	facts.Object = api.UID(made.UID)
	id := s.save(100, facts.Tags()...)
	apitest.EditStatus(w.Server, made, func(b *api.Backup) { b.Status.SnapshotID = id.String() })
	w.addTarget("two", s.url(), "x")
	w.awaitReason("two", api.ReasonAvailable, "")
	w.sync("two") // the cache of the first visit may have been late
	for name, b := range w.backups() {
		if b.Target() == "two" && b.Spec.SnapshotID == id.String() && b.Status.State == api.BackupCompleted {
			return
		}
		t.Logf("Backup %s: %+v", name, b.Spec)
	}
	t.Error("target two has no Backup of the snapshot")
}
