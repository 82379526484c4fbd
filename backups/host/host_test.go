package host

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
	"drover.io/drover/backups/mover"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestMemoryIsShared: the packs of all places together have the node's memory, and each backup fills one pack while it
// sends others.
func TestMemoryIsShared(t *testing.T) {
	for _, c := range []struct {
		memory   int64
		places   int
		packSize int
		packs    int64
	}{
		{256 << 20, 1, 32 << 20, 8},
		{256 << 20, 2, 32 << 20, 4},
		{256 << 20, 5, 3276 * 4096, 4},
		{256 << 20, 16, 4 << 20, 4},
		{256 << 20, 100, 4 << 20, 4}, // more than the node's memory: a smaller pack has no room for a chunk
	} {
		var o mover.BackupOptions
		shareMemory(&o, c.memory, c.places)
		if o.Writer.PackSize != c.packSize || o.Writer.Memory/int64(o.Writer.PackSize) != c.packs ||
			o.Workers < 2 || o.Workers > 16 {
			t.Errorf("%d places: %d workers, %+v", c.places, o.Workers, o.Writer)
		}
		if total := int64(c.places) * o.Writer.Memory; total > c.memory && c.places <= 16 {
			t.Errorf("%d places: %d bytes in all", c.places, total)
		}
	}
}

// TestBaseCandidates: only completed backups of the same volume in the same target can be a base, the newest first.
func TestBaseCandidates(t *testing.T) {
	backup := func(name, at string, change func(*api.Backup)) api.Backup {
		b := api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{BackupTargetName: "t"},
			Status: api.BackupStatus{State: api.BackupCompleted, VolumeUID: "v", SnapshotUID: "s", SnapshotCreatedAt: at}}
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
	for i := range int32(mostAttempts) {
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
		attempt(api.Errorf(api.Busy, "locked"))
	}
	if s := b.Status; s.State != api.BackupError || s.NextTry != nil || s.BackupCreatedAt == "" || s.Message != "locked" {
		t.Errorf("after 10 attempts without progress: %+v", s)
	}
}

// TestStaleHolds: the collector keeps the holds of unfinished Backups of the disk, and of Backups with a work.
func TestStaleHolds(t *testing.T) {
	c := collector{&maker{node: "n", works: newWorkSet()}}
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
		backup("being released", complete),
		backup("other node", func(b *api.Backup) { b.Spec.Source.Node = "m" }),
		backup("other disk", func(b *api.Backup) { b.Spec.Source.Disk = "e" }),
		backup("without source", func(b *api.Backup) { b.Spec.Source = nil }),
	}
	held := map[string]string{"deleted": ""}
	for i := range all {
		held[string(all[i].UID)] = ""
	}
	c.works.byBackup["being released"] = &work{object: "being released"}
	got := slices.Sorted(maps.Keys(c.staleHolds("d", held, all)))
	if want := []string{"completed", "deleted", "other disk", "other node", "without source"}; !slices.Equal(got, want) {
		t.Errorf("stale are %q", got)
	}
}

// TestFailuresForGood: what another attempt cannot mend ends the backup.
func TestFailuresForGood(t *testing.T) {
	for kind, permanent := range map[api.Kind]bool{api.Invalid: true, api.Denied: true, api.Unsupported: true,
		api.NotFound: true, api.Unavailable: false, api.Busy: false, api.Full: false, api.Other: false, api.Corrupt: false} {
		if isPermanent(api.Errorf(kind, "x")) != permanent {
			t.Errorf("%v: permanent is %v", kind, !permanent)
		}
	}
}
