package targets

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestRepositoryIsMadeAndFoundAgain: an empty folder becomes a repository, whose backups another cluster lists with all
// facts, once, in any number.
func TestRepositoryIsMadeAndFoundAgain(t *testing.T) {
	one := newWorld(t, "node-1")
	dir := t.TempDir()
	one.addTarget("default", "file://"+dir, "")
	made := one.awaitReason("default", api.ReasonAvailable, "")
	if st := made.Status; st.RepositoryID == "" || st.Encrypted || st.OwnerID != "node-1" || st.Initializing != nil ||
		st.Backups != 0 || st.LastSyncedAt == nil {
		t.Errorf("a new repository: %+v", st)
	}
	if note := one.awaitEvent("BackupTargetAvailable"); note != "0 backups in the store" {
		t.Errorf("event: %s", note)
	}
	s := openShelf(t, dir, api.PublishedPassword)
	var tags [][]string
	for i := range 200 {
		f := factsOf(fmt.Sprintf("daily-%d", i))
		tags = append(tags, f.Tags())
	}
	ids := s.saveMany(1000, append(tags, []string{"of a user of restic"})...)

	two := startWorld(t, nil, "node-9")
	two.addTarget("far", "file://"+dir, "")
	found := two.awaitReason("far", api.ReasonAvailable, "")
	if st := found.Status; st.RepositoryID != made.Status.RepositoryID || st.Backups != 200 {
		t.Errorf("the other cluster has %+v", st)
	}
	if note := two.awaitEvent("BackupFound"); note != "200 backups found in the store" {
		t.Errorf("event: %s", note)
	}
	all := two.backups()
	b := all["daily-7"]
	if len(all) != 200 || b == nil {
		t.Fatalf("%d Backups", len(all))
	}
	want := api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupCompleted, Progress: 100,
		ByteProgress: api.ByteProgress{BytesDone: 10 << 20, BytesTotal: 10 << 20},
		URL:          "file://" + dir + "?backup=daily-7&volume=vol",
		SnapshotID:   ids[7].String(), BackupCreatedAt: "2023-11-14T22:13:20Z", NewlyUploadDataSize: 3 << 20,
		Labels: map[string]string{"a=b%": "c=d,e"}, SizeText: "10 MiB", UploadedText: "3 MiB",
		LastSyncedAt: b.Status.LastSyncedAt}, SnapshotName: "snap", SnapshotCreatedAt: "2026-01-02T03:04:05Z",
		BackupMode: api.BackupFull, VolumeName: "vol", VolumeUID: uid(2), VolumeSize: 10 << 20,
		VolumeBackingImageName: "golden", SnapshotUID: uid(3)}
	if !equality.Semantic.DeepEqual(b.Status, want) {
		t.Errorf("status %+v\nwant %+v", b.Status, want)
	}
	if b.Spec.SnapshotID != ids[7].String() || b.Spec.Volume != "vol" || b.Target() != "far" ||
		b.Labels[api.LabelVolume] != "vol" || b.Labels[api.LabelBackupTarget] != "far" ||
		len(b.Finalizers) != 1 || b.Spec.Labels["a=b%"] != "c=d,e" {
		t.Errorf("a found Backup: %+v", b)
	}
	two.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "get" && strings.HasPrefix(name, "snapshots/") {
			t.Errorf("a second list reads %s again", name)
		}
		return nil
	})
	two.sync("far")
	if again := two.backups(); len(again) != 200 || again["daily-7"].ResourceVersion != b.ResourceVersion {
		t.Errorf("a second list changed Backups; %d exist", len(again))
	}
}

// TestReasonsTellFaultsApart: a target that cannot be used says why, and how to correct the fault; a corrected one is
// used.
func TestReasonsTellFaultsApart(t *testing.T) {
	w := newWorld(t, "node-1")
	good := newShelf(t, "right")
	empty := t.TempDir()
	w.addTarget("password", good.url(), "wrong")
	w.addTarget("root", "file:///nowhere/at/all", "")
	w.addTarget("url", "ftp://host/x", "")
	w.addTarget("secret", good.url(), "")
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named("secret")}, func(b *api.BackupTarget) {
		b.Spec.CredentialSecret = &api.SecretRef{Name: "missing", Namespace: "default"}
	})
	readOnly := &api.BackupTarget{ObjectMeta: apitest.Named("read-only"), Spec: api.BackupTargetSpec{
		BackupTargetURL: "file://" + empty, ReadOnly: true}}
	w.Create(readOnly)
	denied := newShelf(t, "x")
	damaged := newShelf(t, "x")
	must(t, os.WriteFile(filepath.Join(damaged.dir, "config"), []byte("garbage that is no config at all"), 0o600))
	w.addTarget("damaged", damaged.url(), "x")
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "open" && name == denied.url() {
			return api.Errorf(api.Denied, "the access key is revoked")
		}
		return nil
	})
	w.addTarget("denied", denied.url(), "x")
	w.Create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "keys", Namespace: "default"},
		Data: map[string][]byte{api.SecretBackupPassword: []byte("x")}})
	w.Create(&api.BackupTarget{ObjectMeta: apitest.Named("keys"), Spec: api.BackupTargetSpec{
		BackupTargetURL:  "s3://backups@us-east-1/",
		CredentialSecret: &api.SecretRef{Name: "keys", Namespace: "default"}}})

	w.awaitReason("keys", api.ReasonBadSecret, api.SecretAccessKey)
	w.awaitReason("password", api.ReasonWrongPassword, "correct BACKUP_PASSWORD")
	w.awaitReason("root", api.ReasonUnreachable, "make the folder, or mount")
	w.awaitReason("url", api.ReasonBadURL, "file:///PATH")
	w.awaitReason("secret", api.ReasonBadSecret, "create the Secret")
	w.awaitReason("read-only", api.ReasonReadOnlyAndEmpty, "set readOnly to false")
	w.awaitReason("damaged", api.ReasonBadRepository, "config")
	w.awaitReason("denied", api.ReasonDenied, "revoked")
	if files, err := os.ReadDir(empty); err != nil || len(files) > 0 {
		t.Errorf("a read-only target got %v, %v", files, err)
	}
	for name, kind := range map[string]api.Kind{"password": api.Unavailable, "none": api.NotFound} {
		if _, err := w.nodes["node-1"].Open(w.Ctx, name); !api.Is(err, kind) {
			t.Errorf("Open(%s): %v, want kind %v", name, err, kind)
		}
	}

	secret := w.secret("password")
	secret.Data[api.SecretBackupPassword] = []byte("right")
	must(t, w.Client.Update(w.Ctx, secret))
	w.clock.advance(time.Minute)
	w.wake("password")
	if now := w.awaitReason("password", api.ReasonAvailable, ""); !now.Status.Encrypted {
		t.Errorf("a repository with an own password: %+v", now.Status)
	}
	apitest.Edit(w.Server, readOnly, func(b *api.BackupTarget) { b.Spec.ReadOnly = false })
	w.awaitReason("read-only", api.ReasonAvailable, "")
}

// TestKnownRepositoryIsTheOnlyOne: a store that has another repository than before, or none, is not used, neither for
// lists nor for other work, and nothing is made there.
func TestKnownRepositoryIsTheOnlyOne(t *testing.T) {
	w := newWorld(t, "node-1")
	s, other := newShelf(t, "x"), newShelf(t, "x")
	id := s.save(100, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	known := w.awaitReason("default", api.ReasonAvailable, "").Status.RepositoryID
	if note := w.awaitEvent("BackupTargetAvailable"); note != "1 backup in the store" {
		t.Errorf("event: %s", note)
	}
	aside := s.dir + "-aside"
	must(t, os.Rename(s.dir, aside))
	t.Cleanup(func() { _ = os.RemoveAll(aside) })

	w.sync("default")
	w.awaitReason("default", api.ReasonUnreachable, "mount")
	if note := w.awaitEvent("BackupTargetUnavailable"); !strings.Contains(note, "Unreachable: ") {
		t.Errorf("event: %s", note)
	}
	must(t, os.Mkdir(s.dir, 0o700))
	w.sync("default")
	w.awaitReason("default", api.ReasonLostRepository, "mount or restore")
	if files, err := os.ReadDir(s.dir); err != nil || len(files) > 0 {
		t.Errorf("the empty mount point got %v, %v", files, err)
	}
	must(t, os.Remove(s.dir))
	must(t, os.CopyFS(s.dir, os.DirFS(other.dir)))
	w.sync("default")
	st := w.awaitReason("default", api.ReasonOtherRepository, "make the BackupTarget again").Status
	if _, err := w.nodes["node-1"].Open(w.Ctx, "default"); !api.Is(err, api.Unavailable) {
		t.Errorf("Open of another repository: %v", err)
	}
	must(t, os.RemoveAll(s.dir))
	must(t, os.Rename(aside, s.dir))
	w.sync("default")
	w.awaitReason("default", api.ReasonAvailable, "")
	if b := w.backups()["b"]; st.RepositoryID != known || b == nil || b.DeletionTimestamp != nil || !s.has(id) {
		t.Errorf("repository %s, known %s; Backup %+v", st.RepositoryID, known, b)
	}
}

// TestEmptyListDeletesNothing: a store that lists no snapshot although backups are known is not believed.
func TestEmptyListDeletesNothing(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	a, b := s.save(100, factsOf("a").Tags()...), s.save(100, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	aside := filepath.Join(t.TempDir(), "aside")
	must(t, os.Mkdir(aside, 0o700))
	move := func(from, to string) {
		for _, id := range []blob.ID{a, b} {
			must(t, os.Rename(filepath.Join(from, id.String()), filepath.Join(to, id.String())))
		}
	}
	snapshots := filepath.Join(s.dir, "snapshots")
	move(snapshots, aside)
	for range 3 {
		w.clock.advance(time.Hour)
		w.sync("default")
		w.awaitReason("default", api.ReasonListIncomplete, "2 Backups of the target exist")
	}
	if n := len(w.backups()); n != 2 {
		t.Errorf("%d Backups are left", n)
	}
	move(aside, snapshots)
	w.sync("default")
	w.awaitReason("default", api.ReasonAvailable, "")
}

// TestLostBackupIsDeletedAfterTwoLists: a Backup whose snapshot the store lost is deleted after two lists, with a minute
// in between. A Backup that comes back in between stays, and one that comes back later has an object again.
func TestLostBackupIsDeletedAfterTwoLists(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	lost, other := s.save(100, factsOf("lost").Tags()...), s.save(100, factsOf("other").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	path := filepath.Join(s.dir, "snapshots", lost.String())
	aside := filepath.Join(t.TempDir(), "aside")
	lists := func(pause time.Duration) {
		t.Helper()
		w.clock.advance(pause - time.Second) // and a second in sync
		w.sync("default")
		w.awaitReason("default", api.ReasonAvailable, "")
	}
	before := w.backups()["lost"].UID
	must(t, os.Rename(path, aside))
	lists(time.Hour)
	must(t, os.Rename(aside, path))
	lists(time.Minute)
	must(t, os.Rename(path, aside))
	lists(time.Hour)
	lists(30 * time.Second)
	if b := w.backups()["lost"]; b == nil || b.UID != before || b.DeletionTimestamp != nil || len(b.Finalizers) != 1 {
		t.Errorf("after lists in half a minute: %+v", b)
	}
	w.clock.advance(30 * time.Second)
	w.wake("default") // the second list needs no request
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("lost")}, &api.BackupList{})
	if note := w.awaitEvent("BackupLost"); !strings.Contains(note, "1 backup:") {
		t.Errorf("event: %s", note)
	}
	if !s.has(other) || w.backups()["other"] == nil {
		t.Error("the store, or the API, lost another backup")
	}
	must(t, os.Rename(aside, path))
	lists(time.Minute)
	if b := w.backups()["lost"]; b == nil || b.Status.State != api.BackupCompleted {
		t.Errorf("the backup did not come back: %+v", b)
	}
}

// TestShortListsLoseNothing: a store whose lists lack some snapshots for good, though it has them, costs no object and no
// pack: the target says so, and no sweep runs. When the lists are whole again the sweep frees the space of the deleted
// backup alone.
func TestShortListsLoseNothing(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	image := tags.Facts{Backup: "golden", Image: "golden", ImageDigest: strings.Repeat("a", 64), Object: uid(1),
		VolumeSize: 10 << 20}
	hidden := []blob.ID{s.save(1<<20, factsOf("hidden").Tags()...), s.save(1<<20, image.Tags()...)}
	hidden = append(hidden, s.save(1<<20, "of restic"))
	s.save(1<<20, factsOf("listed").Tags()...)
	s.save(1<<20, factsOf("unwanted").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	before := s.bytes()
	var names []string
	for _, id := range hidden {
		names = append(names, "snapshots/"+id.String())
	}
	w.hooks.hide(names...)
	w.sync("default")
	w.Delete(w.backups()["unwanted"])
	w.AwaitDeleted(&api.Backup{ObjectMeta: apitest.Named("unwanted")}, &api.BackupList{})
	for range 3 {
		w.clock.advance(time.Hour)
		w.syncTo("default", api.ReasonAvailable, "")
	}
	if note := w.awaitEvent("ListIncomplete"); !strings.Contains(note, "3 snapshots that its lists lack") {
		t.Errorf("event %s", note)
	}
	var images api.BackupBackingImageList
	must(t, w.Client.List(w.Ctx, &images))
	if got := w.listed(); got != "hidden listed" || len(images.Items) != 1 {
		t.Errorf("Backups %s, %d BackupBackingImages are left", got, len(images.Items))
	}
	if after := s.bytes(); before-after > 1<<16 {
		t.Errorf("%d bytes before, %d after", before, after)
	}

	w.hooks.hide()
	w.clock.advance(time.Hour)
	w.sync("default")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool { return b.Status.SweepRequested == nil })
	if after := s.bytes(); before-after < 1<<20 || before-after > 5<<19 {
		t.Errorf("%d bytes before, %d after the sweep", before, after)
	}
	if damage, err := s.r.Check(t.Context(), repo.WriterOptions{}); err != nil || !damage.IsZero() {
		t.Errorf("after the sweep: %+v, %v", damage, err)
	}
}

// TestLostBackupStaysWhileTheStoreDoesNotAnswer: lists lack a Backup, and the store does not say whether it has the
// snapshot.
func TestLostBackupStaysWhileTheStoreDoesNotAnswer(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	lost := s.save(100, factsOf("lost").Tags()...)
	s.save(100, factsOf("other").Tags()...)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	name := "snapshots/" + lost.String()
	must(t, os.Remove(filepath.Join(s.dir, name)))
	must(t, os.Remove(filepath.Join(s.dir, "drover-snapshots"))) // the record would ask earlier
	w.hooks.set(func(_ context.Context, operation, of string) error {
		if operation == "stat" && of == name {
			return api.Errorf(api.Unavailable, "the store sleeps")
		}
		return nil
	})
	w.sync("default")
	for range 2 {
		w.clock.advance(time.Hour)
		w.syncTo("default", api.ReasonUnreachable, "the store sleeps")
	}
	if w.listed() != "lost other" {
		t.Errorf("Backups %s are left", w.listed())
	}
	w.hooks.set(nil)
	for range 2 { // lists
		w.clock.advance(time.Hour)
		w.sync("default")
		w.awaitReason("default", api.ReasonAvailable, "")
	}
	if w.listed() != "other" {
		t.Errorf("Backups %s after the answer", w.listed())
	}
}

// TestNamesOfFoundBackups: a found backup gets another name if an object for another snapshot has its name, and waits
// while a Backup of its name and target works. A Backup that a user made of a snapshot stands for the snapshot,
// whatever its name. A damaged snapshot hides no other.
func TestNamesOfFoundBackups(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	ids := s.saveMany(100, factsOf("taken").Tags(), factsOf("working").Tags(), factsOf("mine").Tags(),
		factsOf(strings.Repeat("l", tags.NameLimit)).Tags(), factsOf("damaged").Tags(), factsOf("named").Tags())
	must(t, os.WriteFile(filepath.Join(s.dir, "snapshots", ids[4].String()), []byte("garbage"), 0o600))
	w.makeBackup("taken", "elsewhere", blob.Sum([]byte("another")))
	w.makeBackup(strings.Repeat("l", tags.NameLimit), "elsewhere", blob.Sum([]byte("a third")))
	mine := w.makeBackup("mine", "default", ids[2])
	working := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: "working"},
		Spec: api.BackupSpec{BackupTargetName: "default", Volume: "vol"}}
	chosen := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: "chosen"},
		Spec: api.BackupSpec{BackupTargetName: "default", Volume: "vol", SnapshotID: ids[5].String()}}
	w.Create(working, chosen)
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	all := w.backups()
	other, long := all["taken-"+ids[0].String()[:8]], all[strings.Repeat("l", tags.NameLimit-9)+"-"+ids[3].String()[:8]]
	if len(all) != 7 || other == nil || other.Spec.SnapshotID != ids[0].String() || long == nil {
		t.Errorf("%d Backups; %+v, %+v", len(all), other, long)
	}
	if now := all["mine"]; now.ResourceVersion != mine.ResourceVersion || all["working"].Status.State != api.BackupNew {
		t.Errorf("changed: %+v, %+v", now, all["working"])
	}
	if st := all["chosen"].Status; st.State != api.BackupCompleted || st.VolumeName != "vol" {
		t.Errorf("a Backup that a user made of a snapshot: %+v", st)
	}
	apitest.EditStatus(w.Server, working, func(b *api.Backup) { b.Status.State = api.BackupError })
	w.sync("default")
	w.awaitBackup("working-"+ids[1].String()[:8], "found", func(b *api.Backup) bool {
		return b.Status.State == api.BackupCompleted
	})
}

// TestOwnerMovesFromASilentNode: another node looks after the targets of a node without a heartbeat.
func TestOwnerMovesFromASilentNode(t *testing.T) {
	w := newWorld(t, "node-1", "node-2")
	s := newShelf(t, "x")
	w.addTarget("default", s.url(), "x")
	first := w.awaitReason("default", api.ReasonAvailable, "").Status.OwnerID
	w.stops[first]()
	n := &api.Node{ObjectMeta: apitest.Named(first)}
	silent := metav1.NewTime(w.clock.now().Add(-time.Hour))
	apitest.EditStatus(w.Server, n, func(n *api.Node) { n.Status.Heartbeat = silent })
	w.awaitTarget("default", "owned by the other node", func(b *api.BackupTarget) bool {
		w.wake("default") // its cache may not have the heartbeat yet
		return b.Status.OwnerID != first
	})
}

// TestTwoOwnersMakeOneRepository: of two nodes that both look after a target, one makes the repository, and the other
// waits.
func TestTwoOwnersMakeOneRepository(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) {
		r.owner = func(types.UID, []api.Node, time.Time) string { return r.node }
	}, "node-1", "node-2")
	other, blocked := make(chan struct{}), make(chan struct{})
	var mu sync.Mutex
	configs := 0
	w.hooks.set(func(ctx context.Context, operation, name string) error {
		if operation != "put" || name != "config" {
			return nil
		}
		mu.Lock()
		configs++
		first := configs == 1
		mu.Unlock()
		if first {
			close(blocked)
			select {
			case <-other:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	w.addTarget("default", "file://"+t.TempDir(), "")
	<-blocked
	claimed := w.awaitTarget("default", "claimed", func(b *api.BackupTarget) bool { return b.Status.Initializing != nil })
	owner := claimed.Status.Initializing.Node
	w.clock.advance(2 * time.Minute)
	w.sync("default") // by the other node
	w.awaitTarget("default", "left to its owner", func(b *api.BackupTarget) bool {
		return b.Status.OwnerID != owner && strings.Contains(b.Status.Message, "node "+owner+" makes one")
	})
	close(other)
	w.awaitReason("default", api.ReasonAvailable, "")
	mu.Lock()
	defer mu.Unlock()
	if configs != 1 {
		t.Errorf("%d configs were written", configs)
	}
}

// TestAbandonedClaimEnds: a node makes the repository if the node with the claim did not, after claimTime.
func TestAbandonedClaimEnds(t *testing.T) {
	w := newWorld(t, "node-1")
	b := w.addTarget("default", "file:///nowhere", "")
	apitest.EditStatus(w.Server, b, func(b *api.BackupTarget) {
		b.Status.Initializing = &api.TargetClaim{Node: "node-0", Since: metav1.NewTime(w.clock.now())}
	})
	apitest.Edit(w.Server, b, func(b *api.BackupTarget) { b.Spec.BackupTargetURL = "file://" + t.TempDir() })
	w.awaitReason("default", api.ReasonNotInitialized, "node node-0 makes one")
	w.clock.advance(claimTime)
	w.wake("default")
	w.awaitReason("default", api.ReasonAvailable, "")
}

// TestHangingStoreBlocksNobodyElse: the reconciler looks after a target although the stores of more targets than it has
// workers hang, and the end of the manager ends their jobs.
func TestHangingStoreBlocksNobodyElse(t *testing.T) {
	w := newWorld(t, "node-1")
	var hanging sync.WaitGroup
	hanging.Add(6)
	w.hooks.set(func(ctx context.Context, operation, name string) error {
		if operation != "open" || !strings.Contains(name, "hangs") {
			return nil
		}
		hanging.Done()
		<-ctx.Done()
		return ctx.Err()
	})
	for i := range 6 {
		w.addTarget(fmt.Sprintf("hangs-%d", i), fmt.Sprintf("file:///hangs/%d", i), "")
	}
	hanging.Wait()
	w.addTarget("good", "file://"+t.TempDir(), "")
	w.awaitReason("good", api.ReasonAvailable, "")
	// A corrected URL ends the visit of the store that hangs.
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named("hangs-0")}, func(b *api.BackupTarget) {
		b.Spec.BackupTargetURL = "file://" + t.TempDir()
	})
	w.awaitReason("hangs-0", api.ReasonAvailable, "")
}
