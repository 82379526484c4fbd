package repo

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
)

// shortStore has lists that lack objects, which the store has.
type shortStore struct {
	*memoryStore
	hides func(name string) bool
}

func (s *shortStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	return s.memoryStore.List(ctx, prefix, func(o target.Object) error {
		if s.hides != nil && s.hides(o.Name) {
			return nil
		}
		return each(o)
	})
}

func (s *shortStore) hide(ids ...blob.ID) {
	s.hides = func(name string) bool {
		id, err := blob.Parse(strings.TrimPrefix(name, snapshotsFolder))
		return err == nil && slices.Contains(ids, id)
	}
}

// record lists the snapshots as a visit does.
func record(t testing.TB, r *Repository) *SnapshotList {
	t.Helper()
	list, err := r.ListRecorded(t.Context())
	must(t, err)
	must(t, list.Save(t.Context()))
	return list
}

// TestSweepMissesRecordedSnapshots: a process that never listed the repository, as after a restart or on another node,
// sweeps while the store's lists lack a snapshot that another process saw. The sweep deletes nothing, however often it
// runs, and names the snapshot, which ListRecorded has. When the lists are whole again a sweep frees the garbage alone.
func TestSweepMissesRecordedSnapshots(t *testing.T) {
	store := &shortStore{memoryStore: newMemoryStore()}
	r := newRepository(t, store.memoryStore)
	garbage := saveFiles(t, r, 20_000, numbers(0, 20)...)
	hidden := saveFiles(t, r, 20_000, numbers(100, 120)...)
	saveFiles(t, r, 20_000, numbers(200, 220)...)
	record(t, r)
	must(t, r.DeleteSnapshots(t.Context(), garbage.ID))
	store.hide(hidden.ID)
	packs := store.names(dataFolder)
	for range 3 {
		_, err := openRepository(t, store).Sweep(t.Context(), sweepOptions())
		if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), hidden.ID.String()) {
			t.Fatalf("a sweep with a short list: %v", err)
		}
		list := record(t, openRepository(t, store))
		if len(list.All()) != 2 || len(list.Unlisted) != 1 || list.Check() == nil {
			t.Errorf("%d snapshots, %d of them not listed", len(list.All()), len(list.Unlisted))
		}
	}
	if !slices.Equal(store.names(dataFolder), packs) {
		t.Error("a sweep with a short list deleted packs")
	}
	store.hide()
	if stats := mustSweep(t, openRepository(t, store)); stats.DeletedPacks == 0 || stats.Snapshots != 2 {
		t.Errorf("with whole lists: %+v", stats)
	}
	hasFiles(t, openRepository(t, store), append(numbers(100, 120), numbers(200, 220)...)...)
}

// TestListThatTurnsShortCostsNoSnapshot: the lists of a sweep lack a snapshot from the second, third or a later one on.
// The snapshot keeps its packs, and the sweep frees the garbage.
func TestListThatTurnsShortCostsNoSnapshot(t *testing.T) {
	for from := 2; from < 8; from++ {
		store := &shortStore{memoryStore: newMemoryStore()}
		r := newRepository(t, store.memoryStore)
		garbage := saveFiles(t, r, 20_000, numbers(0, 20)...)
		hidden := saveFiles(t, r, 20_000, numbers(100, 120)...)
		must(t, r.DeleteSnapshots(t.Context(), garbage.ID))
		lists := 0
		store.before = func(operation, name string) error {
			if operation == "list" && name == snapshotsFolder {
				if lists++; lists == from {
					store.hide(hidden.ID)
				}
			}
			return nil
		}
		stats, err := openRepository(t, store).Sweep(t.Context(), sweepOptions())
		if err != nil || stats.DeletedPacks == 0 {
			t.Errorf("short from list %d of %d on: %+v, %v", from, lists, stats, err)
		}
		store.before = nil
		hasFiles(t, openRepository(t, store), numbers(100, 120)...)
	}
}

// TestForgottenSnapshotsStopNoSweep: others delete many snapshots that the record has. The next sweep asks the store
// for each of them once, and frees their space.
func TestForgottenSnapshotsStopNoSweep(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	var ids []blob.ID
	for i := range 100 {
		ids = append(ids, saveFiles(t, r, 20_000, i).ID)
	}
	record(t, r)
	must(t, r.DeleteSnapshots(t.Context(), ids[1:]...))
	for _, want := range []int64{99, 0} {
		var asked atomic.Int64
		store.before = func(operation, name string) error {
			if operation == "stat" && strings.HasPrefix(name, snapshotsFolder) {
				asked.Add(1)
			}
			return nil
		}
		stats := mustSweep(t, openRepository(t, store))
		if asked.Load() != want || stats.Snapshots != 1 || (stats.DeletedPacks > 0) != (want > 0) {
			t.Errorf("%d questions, want %d; %+v", asked.Load(), want, stats)
		}
		store.before = nil
	}
	hasFiles(t, openRepository(t, store), 0)
}

// TestFirstSweepWaitsAfterTheFirstList: a repository without a record, of restic or of an earlier Drover, may have a
// short list just now. The first sweep comes when the record is RecordAge old by the store's clock; meanwhile others may
// add snapshots. A repository that Init made has no such wait. Nor has a store whose clock was set back.
func TestFirstSweepWaitsAfterTheFirstList(t *testing.T) {
	o := sweepOptions()
	o.RecordAge = 10 * time.Minute
	store := &shortStore{memoryStore: newMemoryStore()}
	r := newRepository(t, store.memoryStore)
	garbage := saveFiles(t, r, 20_000, numbers(0, 20)...)
	hidden := saveFiles(t, r, 20_000, numbers(100, 120)...)
	must(t, r.DeleteSnapshots(t.Context(), garbage.ID))
	must(t, store.Delete(t.Context(), recordName))
	store.hide(hidden.ID)
	packs := store.names(dataFolder)
	for minute := range 10 {
		store.skew = time.Duration(minute) * time.Minute
		if _, err := openRepository(t, store).Sweep(t.Context(), o); !api.Is(err, api.Busy) {
			t.Fatalf("a sweep %d minutes after the first list: %v", minute, err)
		}
		saveFiles(t, r, 20_000, 200+minute)
	}
	for _, name := range packs {
		if _, err := store.Stat(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	store.hide()
	store.skew = 11 * time.Minute
	stats, err := openRepository(t, store).Sweep(t.Context(), o)
	if err != nil || stats.DeletedPacks == 0 {
		t.Errorf("the first sweep: %+v, %v", stats, err)
	}
	hasFiles(t, openRepository(t, store), append(numbers(100, 120), numbers(200, 210)...)...)
	store.skew = -time.Hour
	if _, err := openRepository(t, store).Sweep(t.Context(), o); err != nil {
		t.Errorf("after the clock was set back: %v", err)
	}
	if _, err := newRepository(t, newMemoryStore()).Sweep(t.Context(), o); err != nil {
		t.Errorf("a new repository: %v", err)
	}
}

// TestDamagedRecordIsWrittenAgain: after damage of the record the next list is a first one.
func TestDamagedRecordIsWrittenAgain(t *testing.T) {
	for how, harm := range harms {
		store := newMemoryStore()
		r := newRepository(t, store)
		saveFiles(t, r, 20_000, 1)
		record(t, r)
		harm(store, recordName)
		if list := record(t, r); list.recorded || len(list.Files) != 1 {
			t.Errorf("%s: %+v", how, list)
		}
		if list := record(t, r); !list.recorded || list.changed || list.first.IsZero() {
			t.Errorf("%s: the record was not written again: %+v", how, list)
		}
		store.change(recordName, func(b []byte) []byte { // no longer bytes of this repository
			return bytes.Repeat([]byte("x"), len(b))
		})
		if list := record(t, r); list.recorded {
			t.Errorf("%s: a foreign record counts", how)
		}
	}
}
