package repo

import (
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// readAll reads files through an index, one by one and many at once.
func readAll(t testing.TB, b *Blobs, numbers ...int) {
	t.Helper()
	ids := make([]blob.ID, len(numbers))
	for k, i := range numbers {
		ids[k] = blob.Sum(content(i))
		if k%2 == 0 {
			plain, err := b.Read(t.Context(), ids[k], blob.Data, nil)
			if err != nil || string(plain) != string(content(i)) {
				t.Fatalf("file %d: %d bytes, %v", i, len(plain), err)
			}
		}
	}
	must(t, b.ReadMany(t.Context(), blob.Data, ids, func(place int, plain []byte, err error) error {
		if err != nil || string(plain) != string(content(numbers[place])) {
			t.Errorf("file %d: %d bytes, %v", numbers[place], len(plain), err)
		}
		return nil
	}))
}

// newReader has a snapshot whose blobs lie in packs that are mostly garbage, because another snapshot was deleted, and a
// session that restores the snapshot by the index of before.
func newReader(t *testing.T) (store *memoryStore, r *Repository, read Snapshot, files []int, lock *Lock, b *Blobs) {
	store = newMemoryStore()
	r = newRepository(t, store)
	deleted := saveFiles(t, r, 20_000, numbers(0, 200)...)
	files = []int{3, 40, 41, 90, 150}
	read = saveFiles(t, r, 20_000, append(files, 700)...)
	must(t, r.DeleteSnapshots(t.Context(), deleted.ID))
	reader := openRepository(t, store)
	lock, err := reader.LockSnapshot(t.Context(), read.ID)
	must(t, err)
	return store, r, read, files, lock, loadIndex(t, reader)
}

// TestReaderFollowsASweep: a sweep does not wait for a session that restores a snapshot which exists. It copies blobs of
// the snapshot, and deletes their packs; the session finds the copies, also those of further sweeps. IsCurrent of the
// session still tells that the index is another one.
func TestReaderFollowsASweep(t *testing.T) {
	store, r, _, files, lock, b := newReader(t)
	before := store.names(dataFolder)
	for round := range 3 {
		o := sweepOptions()
		o.Threshold = DefaultThreshold + round*100 // further sweeps copy all packs
		o.Waits = func(why error) { t.Errorf("the sweep waits: %v", why) }
		stats, err := r.Sweep(t.Context(), o)
		must(t, err)
		if stats.CopiedBlobs == 0 || stats.DeletedPacks == 0 {
			t.Fatalf("sweep %d deletes no pack of the reader: %+v", round, stats)
		}
		readAll(t, b, append(files, 700)...)
	}
	if slices.Equal(before, store.names(dataFolder)) {
		t.Error("no pack was replaced")
	}
	if current, err := b.IsCurrent(t.Context()); err != nil || current {
		t.Errorf("the index is current: %v, %v", current, err)
	}
	must(t, lock.Close(t.Context()))
	mustCheck(t, store.save(t))
}

// TestMissingPackWithoutASweepIsDamage: a pack that the store lost is damage, although the index is loaded again for
// every sweep.
func TestMissingPackWithoutASweepIsDamage(t *testing.T) {
	store, _, _, files, lock, b := newReader(t)
	must(t, store.Delete(t.Context(), store.names(dataFolder)...))
	if _, err := b.Read(t.Context(), blob.Sum(content(files[0])), blob.Data, nil); !api.Is(err, api.Corrupt) {
		t.Errorf("%v, want an error of kind corrupt", err)
	}
	must(t, lock.Close(t.Context()))
}

// TestSweepWaitsForTheReaderOfADeletedSnapshot: a sweep waits for a session that restores a snapshot which was deleted
// before the sweep, also if the object comes back meanwhile, or after the sweep listed the snapshots. The sweep says for
// whom.
func TestSweepWaitsForTheReaderOfADeletedSnapshot(t *testing.T) {
	for _, deleted := range []string{"before", "before, and comes back", "during"} {
		store, _, read, files, lock, b := newReader(t)
		name := snapshotsFolder + read.ID.String()
		body, err := store.Get(t.Context(), name, 0, -1)
		must(t, err)
		if deleted != "during" {
			must(t, store.Delete(t.Context(), name))
		}
		sweeper, marked := openRepository(t, store), false
		sweeper.store = &hookedStore{memoryStore: store, before: func(operation, object string) {
			if operation != "list" || object != locksFolder || !marked {
				marked = marked || operation == "delete" && strings.HasPrefix(object, indexFolder)
				return
			}
			marked = false // the sweep looks for sessions to wait for
			switch deleted {
			case "during":
				must(t, store.Delete(t.Context(), name))
			case "before, and comes back":
				must(t, store.Put(t.Context(), name, body))
			}
		}}
		o, waits := sweepOptions(), 0
		o.Waits = func(why error) {
			if waits++; waits > 1 {
				return
			}
			if !IsLocked(why) || !strings.Contains(why.Error(), read.ID.String()[:8]) {
				t.Errorf("deleted %s: %v", deleted, why)
			}
			readAll(t, b, files...)
			must(t, lock.Close(t.Context()))
		}
		stats, err := sweeper.Sweep(t.Context(), o)
		must(t, err)
		if waits == 0 || stats.HiddenPacks == 0 {
			t.Errorf("deleted %s: the sweep waits for nobody: %+v", deleted, stats)
		}
	}
}

// TestReaderFindsHiddenCopies: while a session restores a snapshot, a sweep copies the blobs of the snapshot into other
// packs, and deletes their packs. Somebody deletes the snapshot, and a second sweep hides the copies and waits for the session. The session
// still reads all blobs.
func TestReaderFindsHiddenCopies(t *testing.T) {
	store, r, read, files, lock, b := newReader(t)
	stats, err := r.Sweep(t.Context(), sweepOptions())
	must(t, err)
	if stats.CopiedBlobs == 0 || stats.DeletedPacks == 0 {
		t.Fatalf("the first sweep deletes no pack of the reader: %+v", stats)
	}
	must(t, r.DeleteSnapshots(t.Context(), read.ID))
	o, waits := sweepOptions(), 0
	o.Waits = func(error) {
		if waits++; waits == 1 {
			readAll(t, b, append(files, 700)...)
			must(t, lock.Close(t.Context()))
		}
	}
	stats, err = openRepository(t, store).Sweep(t.Context(), o)
	must(t, err)
	if waits == 0 || stats.HiddenPacks == 0 || stats.DeletedPacks == 0 {
		t.Errorf("the second sweep: %d waits, %+v", waits, stats)
	}
	must(t, b.Close())
}

// TestReaderSurvivesAnEmptyList: while the list of the store is empty, as below a share that was unmounted, a read fails;
// afterwards the session reads as before.
func TestReaderSurvivesAnEmptyList(t *testing.T) {
	store, _, _, files, lock, b := newReader(t)
	store.mu.Lock()
	away := store.objects
	store.objects = map[string]memoryObject{}
	store.mu.Unlock()
	if _, err := b.Read(t.Context(), blob.Sum(content(files[0])), blob.Data, nil); err == nil {
		t.Error("a read from an empty store has no error")
	}
	store.mu.Lock()
	store.objects = away
	store.mu.Unlock()
	readAll(t, b, files...)
	must(t, lock.Close(t.Context()))
}
