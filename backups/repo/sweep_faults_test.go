package repo

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/backups/target"
)

// TestSweepLeavesLargeBlobsAlone: a blob of another program, or of larger packs, that does not fit a pack of the
// sweep stays where it is.
func TestSweepLeavesLargeBlobsAlone(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	large := make([]byte, 30_000)
	random := rand.New(rand.NewPCG(1, 1))
	for i := range large {
		large[i] = byte(random.Uint32())
	}
	garbage := make([]byte, 60_000)
	for i := range garbage {
		garbage[i] = byte(random.Uint32())
	}
	b := loadIndex(t, r)
	w := newWriter(t, b, WriterOptions{PackSize: 100_000})
	id, _, err := w.Add(t.Context(), blob.Data, large)
	must(t, err)
	_, _, err = w.Add(t.Context(), blob.Data, garbage)
	must(t, err)
	root, err := w.AddTree(t.Context(), []tree.Node{{Name: "a", Type: tree.File, Size: 30_000, Content: []blob.ID{id}}})
	must(t, err)
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	_, err = r.SaveSnapshot(t.Context(), Snapshot{Tree: &root, Paths: []string{"/a"}})
	must(t, err)
	before := len(store.names(dataFolder))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = r.Sweep(ctx, sweepOptions()) // PackSize 20_000
	if n := len(store.names(dataFolder)); err != nil || n > before+3 {
		t.Errorf("sweep: %v; %d packs, before %d", err, n, before)
	}
}

// TestPackInTwoIndexFilesKeepsAllBlobs: two index files name one pack, each with half of the blobs. A sweep that
// merges the files keeps all blobs.
func TestPackInTwoIndexFilesKeepsAllBlobs(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFiles(t, r, 60_000, numbers(0, 10)...)
	var first, second index.FileBuilder
	for _, f := range listAll(t, r, indexFolder) {
		_, err := r.scanIndexFile(t.Context(), f, func(p index.Pack) error {
			all := p.Entries
			half := len(all) / 2
			p.Entries = all[:half]
			first.Add(p)
			p.Entries = all[half:]
			second.Add(p)
			return nil
		})
		must(t, err)
		must(t, store.Delete(t.Context(), f.Name))
	}
	for _, f := range []*index.FileBuilder{&first, &second} {
		_, err := r.saveFile(t.Context(), indexFolder, f.Bytes())
		must(t, err)
	}
	hasFiles(t, openRepository(t, store), numbers(0, 10)...)
	for i := range manySmall { // many small index files, which the sweep merges
		saveFiles(t, r, 20_000, 100+i)
	}
	mustSweep(t, r)
	mustSweep(t, openRepository(t, store))
	hasFiles(t, openRepository(t, store), numbers(0, 10)...)
}

func listAll(t testing.TB, r *Repository, folder string) []namedFile {
	files, err := listFolder(t.Context(), r.store, folder)
	must(t, err)
	return files
}

// TestKilledSweepOfAnEmptyRepositoryIsContinued: a sweep of a repository without snapshots is killed between the
// deletion of the last index file and that of the packs. The next sweep deletes the packs.
func TestKilledSweepOfAnEmptyRepositoryIsContinued(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	s := saveFiles(t, r, 20_000, numbers(0, 20)...)
	must(t, r.DeleteSnapshots(t.Context(), s.ID))
	killed := false
	store.before = func(operation, name string) error {
		if killed = killed || operation == "delete" && strings.HasPrefix(name, dataFolder); killed {
			return fmt.Errorf("killed")
		}
		return nil
	}
	if _, err := r.Sweep(t.Context(), sweepOptions()); err == nil {
		t.Fatal("not killed")
	}
	store.before = nil
	must(t, store.Delete(t.Context(), store.names(locksFolder)...))
	stats, err := openRepository(t, store).Sweep(t.Context(), sweepOptions()) // Empty is set
	if n := len(store.names(dataFolder)); err != nil || n > 0 {
		t.Errorf("the next sweep: %+v, %v; %d packs are left", stats, err, n)
	}
}

// TestClockSetBackHidesNoSession: a lock from a time when the store's clock was ahead makes no running session look
// stale.
func TestClockSetBackHidesNoSession(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	store.skew = 24 * time.Hour
	left := &Lock{r: r, id: "LEFTBYAKILLEDSESSION"}
	_, err := left.save(t.Context())
	must(t, err)
	store.skew = 0 // the store's clock was set right
	running, err := r.Lock(t.Context(), Shared)
	must(t, err)
	sweeper, err := r.Lock(t.Context(), Sweeping)
	must(t, err)
	sessions, err := sweeper.otherSessions(t.Context())
	must(t, err)
	if _, ok := sessions[running.ID()]; !ok {
		t.Errorf("a session that runs is not seen: %v", sessions)
	}
	must(t, running.Close(t.Context()))
	must(t, sweeper.Close(t.Context()))
}

// meanwhileStore lists as the contract allows: a list misses objects that are written or deleted meanwhile.
type meanwhileStore struct {
	*memoryStore
	folder    string
	meanwhile func()
}

func (s *meanwhileStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	names := s.names(prefix)
	if do := s.meanwhile; do != nil && prefix == s.folder {
		s.meanwhile = nil
		do()
	}
	for _, name := range names {
		o, err := s.Stat(ctx, name)
		if err != nil {
			continue
		}
		if err := each(o); err != nil {
			return err
		}
	}
	return nil
}

// TestSecondSweepSeesARefreshedLock: a second sweep lists the locks while the first one refreshes its lock.
func TestSecondSweepSeesARefreshedLock(t *testing.T) {
	store := &meanwhileStore{memoryStore: newMemoryStore(), folder: locksFolder}
	r := newRepository(t, store.memoryStore)
	r.store = store
	first, err := r.Lock(t.Context(), Sweeping)
	must(t, err)
	store.meanwhile = func() {
		_, err := first.refresh(t.Context()) // the refresher sleeps for five minutes
		must(t, err)
	}
	second, err := r.Lock(t.Context(), Sweeping)
	if err == nil {
		t.Error("two sweepers hold the repository")
		must(t, second.Close(t.Context()))
	}
	must(t, first.Close(t.Context()))
}

// TestIndexIsReadWhileASweepReplacesIt: a session lists the index files while a sweep replaces them: the list has
// neither the old nor the new ones. The session finds all blobs.
func TestIndexIsReadWhileASweepReplacesIt(t *testing.T) {
	store := &meanwhileStore{memoryStore: newMemoryStore(), folder: indexFolder}
	r := newRepository(t, store.memoryStore)
	for i := range manySmall + 1 {
		saveFiles(t, r, 20_000, i)
	}
	r = openRepository(t, store)
	sweeper := openRepository(t, store.memoryStore)
	lock, err := r.Lock(t.Context(), Shared) // of a restore
	must(t, err)
	done := make(chan error, 1)
	store.meanwhile = func() {
		replaced := make(chan struct{})
		store.after = func(operation, name string) error {
			if operation == "delete" && strings.HasPrefix(name, indexFolder) && len(store.names(indexFolder)) == 1 {
				close(replaced)
			}
			return nil
		}
		go func() {
			_, err := sweeper.Sweep(t.Context(), sweepOptions())
			done <- err
		}()
		select {
		case <-replaced:
		case err := <-done:
			done <- err
		}
	}
	b := loadIndex(t, r)
	must(t, lock.Close(t.Context()))
	must(t, <-done)
	for i := range manySmall + 1 {
		plain, err := b.Read(t.Context(), blob.Sum(content(i)), blob.Data, nil)
		if err != nil || !bytes.Equal(plain, content(i)) {
			t.Fatalf("file %d of a listed snapshot: %v", i, err)
		}
	}
}

// TestOnlyCopyInAHiddenPackIsKept: of a blob in a hidden pack and in a live one that the store has lost, the sweep
// returns the hidden pack.
func TestOnlyCopyInAHiddenPackIsKept(t *testing.T) {
	for range 8 { // the order of the index files is random
		store := newMemoryStore()
		r := newRepository(t, store)
		b := loadIndex(t, r)
		w := newWriter(t, b, WriterOptions{})
		saveFiles(t, r, 20_000, 1)
		hidden := listAll(t, r, indexFolder)[0]
		saveTree(t, r, w, 1) // again, in other packs
		must(t, w.Close())
		var file index.FileBuilder
		only := ""
		lost := map[string]bool{}
		for _, f := range listAll(t, r, indexFolder) {
			_, err := r.scanIndexFile(t.Context(), f, func(p index.Pack) error {
				if f.id == hidden.id {
					p.Hidden = true
					file.Add(p)
					if p.Entries[0].Kind == blob.Data {
						only = packName(p.ID)
					}
				} else if p.Entries[0].Kind == blob.Data {
					lost[packName(p.ID)] = true
				}
				return nil
			})
			must(t, err)
		}
		must(t, store.Delete(t.Context(), hidden.Name))
		_, err := r.saveFile(t.Context(), indexFolder, file.Bytes())
		must(t, err)
		for name := range lost {
			must(t, store.Delete(t.Context(), name))
		}
		mustSweep(t, r)
		if _, err := store.Stat(t.Context(), only); err != nil {
			t.Fatalf("the sweep deleted the only copy of a blob that a snapshot needs: %v", err)
		}
		hasFiles(t, openRepository(t, store), 1)
	}
}

// TestKnownSnapshotMayBeDeletedMeanwhile: a known snapshot that somebody deletes during the sweep does not end the
// sweep.
func TestKnownSnapshotMayBeDeletedMeanwhile(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	garbage := saveFiles(t, r, 20_000, numbers(0, 20)...)
	second := saveFiles(t, r, 20_000, numbers(100, 120)...)
	third := saveFiles(t, r, 20_000, numbers(200, 220)...)
	must(t, r.DeleteSnapshots(t.Context(), garbage.ID))
	deleted := false
	store.after = func(operation, name string) error { // step 1 has replaced an index file
		if operation == "delete" && strings.HasPrefix(name, indexFolder) && !deleted {
			deleted = true
			return r.DeleteSnapshots(t.Context(), second.ID)
		}
		return nil
	}
	o := sweepOptions()
	o.Known = []blob.ID{second.ID, third.ID}
	stats, err := openRepository(t, store).Sweep(t.Context(), o)
	if err != nil || !deleted || stats.DeletedPacks == 0 {
		t.Errorf("%+v, %v, want deleted packs", stats, err)
	}
}

// TestProbeOfASweepIsNoLock: the first deletion of a sweep fails. The object that the sweep wrote to try the deletion
// does not refuse the next sweep.
func TestProbeOfASweepIsNoLock(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	s := saveFiles(t, r, 20_000, numbers(0, 20)...)
	must(t, r.DeleteSnapshots(t.Context(), s.ID))
	failed := false
	store.before = func(operation, name string) error {
		if operation == "delete" && !failed {
			failed = true
			return api.Errorf(api.Unavailable, "no answer")
		}
		return nil
	}
	_, err := r.Sweep(t.Context(), sweepOptions())
	if !api.Is(err, api.Unavailable) {
		t.Fatal(err)
	}
	if _, err := r.Sweep(t.Context(), sweepOptions()); err != nil {
		t.Errorf("the next sweep: %v", err)
	}
}

// TestStaleLockIsDeletedBeforeItsSessionCountsAsDead: the session of a stale lock counts as dead only without the
// lock; a store that permits no deletion keeps the session alive.
func TestStaleLockIsDeletedBeforeItsSessionCountsAsDead(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	sweeper, err := r.Lock(t.Context(), Sweeping)
	must(t, err)
	store.skew = -lockStale - time.Minute
	_, err = (&Lock{r: r, id: "DEAD"}).save(t.Context())
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, denied := range []bool{true, false} {
		store.before = func(operation, _ string) error {
			if denied && operation == "delete" {
				return api.Errorf(api.Denied, "no permission")
			}
			return ctx.Err()
		}
		sessions, err := sweeper.otherSessions(ctx)
		must(t, err)
		if _, counts := sessions["DEAD"]; counts != denied || (len(store.names(locksFolder)) == 2) != denied {
			t.Errorf("deletion denied %v: the sessions are %v, the locks %v", denied, sessions, store.names(locksFolder))
		}
	}
	must(t, sweeper.Close(t.Context()))
}
