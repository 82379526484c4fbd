package host

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/mover"
	"drover.io/drover/block"
	"drover.io/drover/block/budget"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestMemoryIsShared: the parts have the size of the memory together, the buffers of all places of backups fit into the
// part of backups, and a backup fills one pack while the backup sends others.
func TestMemoryIsShared(t *testing.T) {
	for _, size := range []int64{256 << 20, 1 << 20} {
		m := Options{Memory: size}.ForTargets().Memory
		sum := int64(0)
		for _, p := range []*budget.Part{m.Readers, m.Reads, m.Moves, m.Backups, m.Copies, m.Maintenance, m.Heals} {
			sum += p.Size()
		}
		if sum != max(size, 192<<20) {
			t.Errorf("%d bytes have parts of %d bytes", size, sum)
		}
	}
	memory := Options{}.ForTargets().Memory.Backups
	for _, c := range []struct {
		places   int
		packSize int // 0: any
	}{
		{1, 0},
		{2, 0},
		{4, 0},
		{100, 4 << 20}, // more than the node's memory: a smaller pack has no room for a chunk
	} {
		var o mover.BackupOptions
		shareMemory(&o, memory, c.places)
		size := o.Writer.PackSize
		if c.packSize > 0 && size != c.packSize || size < 4<<20 || size%block.Size != 0 ||
			o.Writer.Memory/int64(size) != 4 || o.Workers < 2 || o.Workers > 16 || o.Writer.Budget != nil {
			t.Errorf("%d places: %d workers, %+v", c.places, o.Workers, o.Writer)
		}
		backups := int64(c.places) * (o.Writer.Memory + o.Writer.Beside)
		if backups > memory.Size() && c.places <= 2 || o.Writer.Beside != int64(o.Workers)*block.ChunkSize {
			t.Errorf("%d places: %d bytes for backups of %d", c.places, backups, memory.Size())
		}
	}
}

// TestBaseCandidates: only completed backups of the same volume in the same target can be a base, the newest first.
func TestBaseCandidates(t *testing.T) {
	backup := func(name, at string, change func(*api.Backup)) api.Backup {
		b := api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{BackupTargetName: "t"},
			Status: api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupCompleted}, VolumeUID: "v", SnapshotUID: "s", SnapshotCreatedAt: at}}
		change(&b)
		return b
	}
	same := func(*api.Backup) {}
	all := []api.Backup{
		backup("old", "2026-01-01T00:00:00Z", same),
		backup("new", "2026-01-03T00:00:00Z", same),
		backup("middle", "2026-01-02T00:00:00Z", same),
		backup("unfinished", "2026-01-04T00:00:00Z", func(b *api.Backup) { b.Status.State = api.BackupInProgress }),
		backup("foreign", "2026-01-04T00:00:00Z", func(b *api.Backup) { b.Status.VolumeUID = "w" }),
		backup("elsewhere", "2026-01-04T00:00:00Z", func(b *api.Backup) { b.Spec.BackupTargetName = "u" }),
		backup("found", "2026-01-04T00:00:00Z", func(b *api.Backup) { b.Spec.SnapshotID = "ab" }),
		backup("imported", "2026-01-04T00:00:00Z", func(b *api.Backup) { b.Status.SnapshotUID = "" }),
	}
	var names []string
	for _, b := range baseCandidates(all, "v", "t") {
		names = append(names, b.Name)
	}
	if got := fmt.Sprint(names); got != "[new middle old]" {
		t.Errorf("candidates %s", got)
	}
}

// TestAttemptsWithoutProgressEndTheBackup: the tenth attempt in a row that comes no further than the one before is the
// last, and progress starts the count again.
func TestAttemptsWithoutProgressEndTheBackup(t *testing.T) {
	m := &maker{opts: Options{}.withDefaults()}
	b := &api.Backup{}
	attempt := func(err error) {
		m.setFailed(b, &work{reached: b.Status.BytesDone, err: err})
	}
	for i := range 10 {
		if i == 5 { // an attempt that came further
			b.Status.BytesDone = 0
			w := &work{reached: -1, err: api.Errorf(api.Unavailable, "away")}
			m.setFailed(b, w)
			if b.Status.Attempts != 1 || b.Status.State != api.BackupPending {
				t.Fatalf("after progress: %+v", b.Status)
			}
		}
		attempt(api.Errorf(api.Unavailable, "away"))
	}
	if b.Status.State != api.BackupPending || b.Status.Attempts != 6 || b.Status.NextTry == nil {
		t.Errorf("after 6 attempts without progress: %+v", b.Status)
	}
	for range 4 {
		attempt(api.Errorf(api.Busy, "busy"))
	}
	if s := b.Status; s.State != api.BackupError || s.NextTry != nil || s.BackupCreatedAt == "" || s.Message != "busy" {
		t.Errorf("after 10 attempts without progress: %+v", s)
	}
}

// TestStaleHolds: the collector keeps the holds of unfinished Backups of the disk.
func TestStaleHolds(t *testing.T) {
	c := collector{&maker{node: "n"}}
	backup := func(name string, change func(*api.Backup)) api.Backup {
		b := api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{Source: &api.ExportFact{Node: "n", Disk: "d"}}}
		b.UID = types.UID(name)
		change(&b)
		return b
	}
	complete := func(b *api.Backup) { b.Status.State = api.BackupCompleted }
	all := []api.Backup{
		backup("unfinished", func(*api.Backup) {}),
		backup("completed", complete),
		backup("other node", func(b *api.Backup) { b.Spec.Source.Node = "m" }),
		backup("other disk", func(b *api.Backup) { b.Spec.Source.Disk = "e" }),
		backup("without source", func(b *api.Backup) { b.Spec.Source = nil }),
	}
	held := map[string]string{"deleted": ""}
	var stored []api.StoredBackup
	for i := range all {
		held[string(all[i].UID)] = ""
		stored = append(stored, &all[i])
	}
	got := slices.Sorted(maps.Keys(c.staleHolds("d", held, stored)))
	if want := []string{"completed", "deleted", "other disk", "other node", "without source"}; !slices.Equal(got, want) {
		t.Errorf("stale are %q", got)
	}
}

// noSettings is an API server without objects.
type noSettings struct{ client.Client }

func (noSettings) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return apierrors.NewNotFound(schema.GroupResource{}, "")
}

// TestBackupWithoutAPlaceLooksAgain: a place that another backup takes and gives back without a work, after a lost race,
// has no event.
func TestBackupWithoutAPlaceLooksAgain(t *testing.T) {
	m := &maker{Client: noSettings{}, node: "n", opts: Options{}.withDefaults(), log: slog.New(slog.DiscardHandler)}
	for { // all places
		if _, ok := m.places.TryAcquire(struct{}{}, m.placeCount(t.Context())); !ok {
			break
		}
	}
	b := &api.Backup{Spec: api.BackupSpec{Source: &api.ExportFact{Node: "n"}},
		Status: api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupInProgress}}}
	result, err := m.beginAttempt(t.Context(), b)
	if err != nil || result.RequeueAfter <= 0 {
		t.Errorf("%+v, %v", result, err)
	}
}

// liveBackup is an API server with a single Backup; nil: with none.
type liveBackup struct {
	client.Reader
	backup *api.Backup
}

func (l liveBackup) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	if l.backup == nil {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "backups"}, key.Name)
	}
	l.backup.DeepCopyInto(o.(*api.Backup))
	return nil
}

// TestOnlyTheSourceCommits: right before the commit, a node that was cut off from the API server learns that the Backup
// is deleted, complete, made by another node, or was begun by another node.
func TestOnlyTheSourceCommits(t *testing.T) {
	source := api.ExportFact{Node: "me", Replica: "r"}
	b := &api.Backup{ObjectMeta: apitest.Named("b"), Spec: api.BackupSpec{Source: &source}}
	b.UID, b.Status.OwnerID = "1", "me"
	w := &work{object: b.UID, source: source}
	for name, c := range map[string]struct {
		change func(b *api.Backup)
		ok     bool
	}{
		"unchanged":        {func(*api.Backup) {}, true},
		"another node":     {func(b *api.Backup) { b.Spec.Source.Node = "other" }, false},
		"another replica":  {func(b *api.Backup) { b.Spec.Source.Replica = "s" }, false},
		"begun elsewhere":  {func(b *api.Backup) { b.Status.OwnerID = "other" }, false},
		"no node":          {func(b *api.Backup) { b.Spec.Source = nil }, false},
		"completed":        {func(b *api.Backup) { b.Status.SnapshotID = strings.Repeat("a", 64) }, false},
		"deleted":          {func(b *api.Backup) { b.DeletionTimestamp = &metav1.Time{Time: time.Now()} }, false},
		"of the same name": {func(b *api.Backup) { b.UID = "2" }, false},
	} {
		now := b.DeepCopy()
		c.change(now)
		a := &attempt{maker: &maker{node: "me", live: liveBackup{backup: now}}, b: b}
		if err := a.confirmSource(t.Context(), w); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	a := &attempt{maker: &maker{node: "me", live: liveBackup{}}, b: b}
	if err := a.confirmSource(t.Context(), w); !api.Is(err, api.NotFound) {
		t.Errorf("gone: %v", err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
