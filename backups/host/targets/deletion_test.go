package targets

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestDeletionFreesSpace: deleted Backups, made here or found, lose their snapshots before their finalizers, and a
// sweep a minute later frees the space; a sweep of the last backup frees everything.
func TestDeletionFreesSpace(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	kept, found := s.save(1<<20, factsOf("kept").Tags()...), s.save(3<<20, factsOf("found").Tags()...)
	made := s.save(3<<20, factsOf("made").Tags()...)
	w.makeBackup("made", "default", made)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	before := s.bytes()
	deletes := func(names ...string) *api.BackupTarget {
		t.Helper()
		for _, name := range names {
			w.Delete(w.backups()[name])
		}
		for _, name := range names {
			w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named(name)}, &api.BackupList{})
		}
		b := w.awaitTarget("default", "to be swept", func(b *api.BackupTarget) bool { return b.Status.SweepRequested != nil })
		if b.Status.LastSweep != nil && !b.Status.LastSweep.EndedAt.Before(b.Status.SweepRequested) {
			t.Errorf("swept before the request: %+v", b.Status)
		}
		w.clock.advance(time.Minute)
		w.wake("default")
		return w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool { return b.Status.SweepRequested == nil })
	}
	st := deletes("made", "found").Status
	if s.has(found) || s.has(made) || !s.has(kept) || st.Backups != 1 {
		t.Errorf("snapshots are wrong; %+v", st)
	}
	if after := s.bytes(); before-after < 6<<20 || st.LastSweep.FreedBytes < 6<<20 || st.LastSweep.Message != "" {
		t.Errorf("%d bytes before, %d after; %+v", before, after, st.LastSweep)
	}
	if u := st.Usage; u == nil || u.UniqueBytes < 1<<20 || u.UniqueBytes > u.UsedBytes || u.UsedBytes > s.bytes() {
		t.Errorf("the use after the sweep: %+v, and the store has %d bytes", u, s.bytes())
	}
	w.clock.advance(time.Minute)
	if st := deletes("kept").Status; s.bytes() > 1<<16 || st.LastSweep.FreedBytes < 1<<20 || st.LastSweep.Message != "" {
		t.Errorf("%d bytes are left of an empty repository; %+v", s.bytes(), st.LastSweep)
	}
}

// TestFinalizerOutlivesTheSnapshot: while the store refuses the deletion, the Backup exists and says why; after the end
// of the fault it is deleted.
func TestFinalizerOutlivesTheSnapshot(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	id := s.save(100, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, "snapshots/") {
			return api.Errorf(api.Unavailable, "the store sleeps")
		}
		return nil
	})
	w.Delete(w.backups()["b"])
	b := w.awaitBackup("b", "waiting", func(b *api.Backup) bool { return b.Status.Message != "" })
	if b.Status.State != api.BackupDeleting || !strings.Contains(b.Status.Message, "the store sleeps") || !b.Ended() ||
		!s.has(id) {
		t.Errorf("status %+v", b.Status)
	}
	w.hooks.set(nil)
	w.clock.advance(time.Minute)
	w.wake("default")
	w.AwaitDeleted(b, &api.BackupList{})
	if s.has(id) {
		t.Error("the snapshot exists")
	}
}

// TestDeletionWaitsForAnotherCluster: the snapshot of a deleted Backup stays while a session of another cluster restores
// it, and the Backup names the holder. No other deletion waits.
func TestDeletionWaitsForAnotherCluster(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	wanted, free := s.save(100, factsOf("wanted").Tags()...), s.save(100, factsOf("free").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	restore, err := s.r.LockSnapshot(t.Context(), wanted)
	must(t, err)
	w.Delete(w.backups()["wanted"])
	w.Delete(w.backups()["free"])
	b := w.awaitBackup("wanted", "waiting", func(b *api.Backup) bool {
		return b.Status.State == api.BackupDeleting &&
			strings.Contains(b.Status.Message, "restores this backup in another cluster")
	})
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("free")}, &api.BackupList{})
	if !s.has(wanted) || s.has(free) {
		t.Errorf("the snapshots are wrong: %s", b.Status.Message)
	}
	must(t, restore.Close(t.Context()))
	w.clock.advance(time.Minute)
	w.wake("default")
	w.AwaitDeleted(b, &api.BackupList{})
	if s.has(wanted) {
		t.Error("the snapshot exists")
	}
}

// TestDeletionFindsFurtherSnapshots: with a Backup that this cluster made, all snapshots of the object are deleted, also
// those that the status does not name; else the next visit would find a backup.
func TestDeletionFindsFurtherSnapshots(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	named := s.save(100, factsOf("b").Tags()...)
	b := w.makeBackup("b", "default", named)
	f := factsOf("b")
	f.Object = api.UID(b.UID)
	further := s.save(100, f.Tags()...)
	kept := s.save(100, factsOf("kept").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	if s.has(named) || s.has(further) || !s.has(kept) {
		t.Errorf("the store has the named snapshot: %v, the further one: %v, that of another backup: %v", s.has(named),
			s.has(further), s.has(kept))
	}
}

// TestDeletionWaitsForAVolumeWithoutRoom: a deleted Backup stays while a volume from the backup waits for a disk, and has
// no hidden image yet. A volume whose hidden image is ready needs the backup no more.
func TestDeletionWaitsForAVolumeWithoutRoom(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	id := s.save(100, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	v := apitest.Volume("waiting", 16<<20)
	v.Spec.FromBackup = w.backups()["b"].Status.URL
	w.Create(v)
	w.Delete(w.backups()["b"])
	b := w.awaitBackup("b", "waiting", func(b *api.Backup) bool { return b.Status.Message != "" })
	if !strings.HasPrefix(b.Status.Message, "volume waiting: is being restored") || !s.has(id) {
		t.Errorf("message %s", b.Status.Message)
	}
	apitest.EditStatus(w.Server, v, func(v *api.Volume) { v.Status.UID, v.Status.State = uid(7), api.VolumeCreating })
	img := &api.BackingImage{ObjectMeta: apitest.Named(v.RestoreImage()), Spec: api.BackingImageSpec{MinNumberOfCopies: 1,
		SourceType: api.SourceRestore, SourceParameters: map[string]string{api.RestoreBackupURL: v.Spec.FromBackup}}}
	w.Create(img)
	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) { i.Status.State = api.ImageReady })
	w.wake("default")
	w.AwaitDeleted(b, &api.BackupList{})
	if s.has(id) {
		t.Error("the snapshot exists")
	}
}

// TestReadOnlyTargetKeepsBackups: a read-only target lists backups and deletes and sweeps nothing.
func TestReadOnlyTargetKeepsBackups(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	id := s.save(100, factsOf("b").Tags()...)
	b := w.addTarget("default", s.url(), "x")
	apitest.Edit(w.Server, b, func(b *api.BackupTarget) { b.Spec.ReadOnly = true })
	w.sync("default")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "put" || operation == "delete" {
			t.Errorf("%s of %s in a read-only target", operation, name)
		}
		return nil
	})
	apitest.EditStatus(w.Server, b, func(b *api.BackupTarget) {
		b.Status.SweepRequested = &metav1.Time{Time: w.clock.now().Add(-time.Hour)}
	})
	w.Delete(w.backups()["b"])
	w.awaitBackup("b", "waiting", func(b *api.Backup) bool {
		return b.Status.State == api.BackupDeleting && strings.Contains(b.Status.Message, "read-only")
	})
	w.sync("default")
	w.hooks.set(nil)
	if !s.has(id) {
		t.Error("the snapshot was deleted")
	}
	apitest.Edit(w.Server, b, func(b *api.BackupTarget) { b.Spec.ReadOnly = false })
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("b")}, &api.BackupList{})
}

// TestFailedBackupIsReleased: a deleted Backup that failed waits for no store while the target never had a repository.
// Backups that did not end are the business of others.
func TestFailedBackupIsReleased(t *testing.T) {
	w := newWorld(t, "node-1")
	w.addTarget("default", "file:///nowhere", "")
	w.awaitReason("default", api.ReasonUnreachable, "")
	source := &api.ExportFact{Volume: "vol", Node: "node-1"}
	for name, of := range map[string]*api.ExportFact{"begun": source, "working": source} {
		b := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer}},
			Spec: api.BackupSpec{BackupTargetName: "default", Volume: "vol", Source: of}}
		w.Create(b)
		if name == "begun" {
			apitest.EditStatus(w.Server, b, func(b *api.Backup) { b.Status.State = api.BackupError })
		}
		w.Delete(b)
	}
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("begun")}, &api.BackupList{})
	if b := w.backups()["working"]; b == nil || len(b.Finalizers) != 1 || b.Status.State != api.BackupNew {
		t.Errorf("the Backup in work: %+v", b)
	}
}

// TestBackupOfALostNodeIsDeletedInTheStore: a deleted backup that a node began, and whose source the controller role took
// away, loses the snapshots of the object before the finalizer, and a sweep is requested; so does one that failed then.
// The snapshot becomes no Backup. A deleted backup that no node began is not the owner's.
func TestBackupOfALostNodeIsDeletedInTheStore(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	b := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: "b", Finalizers: []string{api.Finalizer}},
		Spec: api.BackupSpec{BackupTargetName: "default", Volume: "vol"}}
	failed, fresh := b.DeepCopy(), b.DeepCopy()
	failed.Name, fresh.Name = "failed", "fresh"
	image := &api.BackupBackingImage{ObjectMeta: metav1.ObjectMeta{Name: "i", Finalizers: []string{api.Finalizer}},
		Spec: api.BackupBackingImageSpec{BackupTargetName: "default", BackingImageName: "golden"}}
	w.Create(b, failed, fresh, image)
	begun := api.CommonBackupStatus{State: api.BackupInProgress}
	apitest.EditStatus(w.Server, b, func(b *api.Backup) { b.Status.CommonBackupStatus = begun })
	apitest.EditStatus(w.Server, image, func(b *api.BackupBackingImage) { b.Status.CommonBackupStatus = begun })
	apitest.EditStatus(w.Server, failed, func(b *api.Backup) { b.Status.State, b.Status.Attempts = api.BackupError, 1 })
	facts := tags.Facts{Backup: "i", Image: "golden", ImageDigest: strings.Repeat("a", 64), Object: api.UID(image.UID),
		VolumeSize: 10 << 20}
	of := func(b *api.Backup) []string {
		f := factsOf(b.Name)
		f.Object = api.UID(b.UID)
		return f.Tags()
	}
	ids := s.saveMany(100, of(b), of(failed), facts.Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.Delete(fresh)
	w.Delete(b)
	w.Delete(failed)
	w.Delete(image)
	w.AwaitDeleted(b, &api.BackupList{})
	w.AwaitDeleted(failed, &api.BackupList{})
	w.AwaitDeleted(image, &api.BackupBackingImageList{})
	for _, id := range ids {
		if s.has(id) {
			t.Errorf("snapshot %s exists", id)
		}
	}
	if st := w.sync("default").Status; st.SweepRequested == nil && st.LastSweep == nil || st.Backups != 0 {
		t.Errorf("status %+v", st)
	}
	if left := w.backups(); w.listed() != "fresh" || left["fresh"].Status.State != api.BackupNew {
		t.Errorf("Backups %s; %+v", w.listed(), left["fresh"])
	}
}

// TestSweepWaitsForSessions: a sweep waits for a session in progress and deletes packs after its end; a sweep of
// another program makes the sweep wait, with a message.
func TestSweepWaitsForSessions(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	s.save(1<<20, factsOf("kept").Tags()...)
	s.save(3<<20, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	before := s.bytes()

	busy, err := s.r.Lock(w.Ctx, repo.Sweeping)
	must(t, err)
	w.Delete(w.backups()["b"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("b")}, &api.BackupList{})
	w.clock.advance(time.Minute)
	w.wake("default")
	w.awaitTarget("default", "waiting", func(b *api.BackupTarget) bool {
		return b.Status.LastSweep != nil && strings.Contains(b.Status.LastSweep.Message, "elsewhere")
	})
	locked := w.awaitTarget("default", "locked", func(b *api.BackupTarget) bool {
		return meta.IsStatusConditionTrue(b.Status.Conditions, api.ConditionLocked)
	})
	if c := meta.FindStatusCondition(locked.Status.Conditions, api.ConditionLocked); c.Reason != api.ReasonSweepWaits ||
		!strings.Contains(c.Message, "elsewhere") {
		t.Errorf("the condition does not name the holder: %+v", c)
	}
	if note := w.awaitEvent("RepositoryLocked"); !strings.Contains(note, "elsewhere") {
		t.Errorf("event: %s", note)
	}
	must(t, busy.Close(w.Ctx))

	running, err := s.r.Lock(w.Ctx, repo.Shared)
	must(t, err)
	looks := make(chan struct{}, 1)
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, "data/") {
			t.Error("a pack is deleted while the session runs")
		}
		if operation == "list" && strings.HasPrefix(name, "locks") {
			select {
			case looks <- struct{}{}:
			default:
			}
		}
		return nil
	})
	w.clock.advance(time.Minute)
	w.wake("default")
	for range 20 { // looks at the locks: the sweep waits
		<-looks
	}
	if after := s.bytes(); after < before-1<<20 {
		t.Errorf("%d bytes, before %d", after, before)
	}
	w.clock.advance(sweepPatience)
	w.awaitTarget("default", "waiting for the session", func(b *api.BackupTarget) bool {
		c := meta.FindStatusCondition(b.Status.Conditions, api.ConditionLocked)
		return c.Status == metav1.ConditionTrue && c.Reason == api.ReasonSweepWaits &&
			strings.Contains(c.Message, "the sweep waits for") && strings.Contains(c.Message, "elsewhere")
	})
	w.hooks.set(nil)
	must(t, running.Close(w.Ctx))
	swept := w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool { return b.Status.SweepRequested == nil })
	if meta.IsStatusConditionTrue(swept.Status.Conditions, api.ConditionLocked) {
		t.Errorf("locked after the sweep: %+v", swept.Status.Conditions)
	}
	if after := s.bytes(); before-after < 3<<20 {
		t.Errorf("%d bytes, before %d", after, before)
	}
}

// TestSweepIsRepeatedAfterAKilledSession: the packs of a killed session, which no backup needs, stay while its lock
// counts. The sweep is repeated when the lock is stale, without another deletion.
func TestSweepIsRepeatedAfterAKilledSession(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	s.save(1<<20, factsOf("kept").Tags()...)
	s.save(1<<20, factsOf("b").Tags()...)
	lock, err := s.r.Lock(t.Context(), repo.Shared)
	must(t, err)
	t.Cleanup(func() { _ = lock.Close(context.Background()) })
	locks, err := filepath.Glob(filepath.Join(s.dir, "locks", "*"))
	must(t, err)
	blobs, err := s.r.LoadIndex(t.Context())
	must(t, err)
	writer, err := repo.NewWriter(t.Context(), blobs, repo.WriterOptions{Lock: lock})
	must(t, err)
	body := make([]byte, 3<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(body)
	_, _, err = writer.Add(t.Context(), blob.Data, body)
	must(t, err)
	must(t, errors.Join(writer.Flush(t.Context()), writer.Close(), blobs.Close()))

	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.Delete(w.backups()["b"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("b")}, &api.BackupList{})
	listed := make(chan struct{}, 1)
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "delete" && strings.Contains(name, "index/") { // the sweep knows the running sessions
			select {
			case listed <- struct{}{}:
			default:
			}
		}
		return nil
	})
	w.clock.advance(time.Minute)
	w.wake("default")
	<-listed
	for _, name := range locks { // as a sweep does when the lock is stale
		must(t, os.Remove(name))
	}
	first := w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool { return b.Status.LastSweep != nil })
	if first.Status.SweepRequested == nil || first.Status.LastSweep.Message != "" || s.bytes() < 4<<20 {
		t.Errorf("after the first sweep: %+v, %d bytes", first.Status, s.bytes())
	}
	w.clock.advance(leftTime)
	w.wake("default")
	w.awaitTarget("default", "swept again", func(b *api.BackupTarget) bool { return b.Status.SweepRequested == nil })
	if n := s.bytes(); n > 2<<20 {
		t.Errorf("%d bytes are left", n)
	}
}

// TestSweepDoesNotWaitForTheReaderOfABackup: a restore in another cluster, of a backup that exists, delays no sweep.
func TestSweepDoesNotWaitForTheReaderOfABackup(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	read := s.save(1<<20, factsOf("kept").Tags()...)
	s.save(3<<20, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	before := s.bytes()
	lock, err := s.r.LockSnapshot(w.Ctx, read)
	must(t, err)
	w.Delete(w.backups()["b"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("b")}, &api.BackupList{})
	w.clock.advance(time.Minute)
	w.wake("default")
	w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool { return b.Status.SweepRequested == nil })
	if after := s.bytes(); before-after < 3<<20 {
		t.Errorf("%d bytes, before %d", after, before)
	}
	must(t, lock.Close(w.Ctx))
}

// TestSweepWithoutPermissionIsReported: a store that permits no deletion makes a condition and an event; the first
// sweep that succeeds ends the condition.
func TestSweepWithoutPermissionIsReported(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	s.save(1<<20, factsOf("kept").Tags()...)
	s.save(1<<20, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, "locks/") {
			return api.Errorf(api.Denied, "s3:DeleteObject is not granted")
		}
		return nil
	})
	w.Delete(w.backups()["b"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("b")}, &api.BackupList{})
	w.clock.advance(time.Minute)
	w.wake("default")
	failed := w.awaitTarget("default", "not swept", func(b *api.BackupTarget) bool {
		return meta.IsStatusConditionTrue(b.Status.Conditions, api.ConditionSweepFailed)
	})
	if c := meta.FindStatusCondition(failed.Status.Conditions, api.ConditionSweepFailed); c.Reason !=
		api.ReasonSweepNotPermitted || !strings.Contains(c.Message, "not granted") {
		t.Errorf("%+v", c)
	}
	if note := w.awaitEvent("SweepFailed"); !strings.Contains(note, "not granted") {
		t.Errorf("event: %s", note)
	}
	w.hooks.set(nil)
	must(t, os.RemoveAll(filepath.Join(s.dir, "locks"))) // the lock of the sweep stayed, and becomes stale in half an hour
	w.clock.advance(2 * time.Hour)
	w.wake("default")
	w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool {
		return meta.IsStatusConditionFalse(b.Status.Conditions, api.ConditionSweepFailed)
	})
}

// TestNewDeletionOutlivesTheSweep: a deletion during a sweep asks for another sweep.
func TestNewDeletionOutlivesTheSweep(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	for _, name := range []string{"kept", "first", "second"} {
		s.save(1<<20, factsOf(name).Tags()...)
	}
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	session, err := s.r.Lock(w.Ctx, repo.Shared)
	must(t, err)
	w.Delete(w.backups()["first"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("first")}, &api.BackupList{})
	w.clock.advance(time.Minute)
	hidden := make(chan struct{}, 1)
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "delete" && strings.Contains(name, "index/") {
			select {
			case hidden <- struct{}{}:
			default:
			}
		}
		return nil
	})
	w.wake("default")
	<-hidden // the sweep has looked at the snapshots
	w.Delete(w.backups()["second"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("second")}, &api.BackupList{})
	request := w.awaitTarget("default", "asked", func(b *api.BackupTarget) bool { return b.Status.SweepRequested != nil })
	must(t, session.Close(w.Ctx))
	swept := w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool { return b.Status.LastSweep != nil })
	if !swept.Status.SweepRequested.Equal(request.Status.SweepRequested) {
		t.Errorf("the request of the second deletion is lost: %+v", swept.Status)
	}
	w.clock.advance(time.Minute)
	w.wake("default")
	w.awaitTarget("default", "swept again", func(b *api.BackupTarget) bool { return b.Status.SweepRequested == nil })
	if n := s.bytes(); n > 2<<20 {
		t.Errorf("%d bytes are left", n)
	}
}
