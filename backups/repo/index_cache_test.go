package repo

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// sameCache is the repository in another process of the node, or after a restart.
func sameCache(t testing.TB, r *Repository) *Repository {
	again := openRepository(t, r.store)
	again.options = r.options
	again.openCache()
	return again
}

// countReads counts the objects of a folder that are read.
func countReads(store *memoryStore, folder string) *atomic.Int64 {
	var reads atomic.Int64
	store.before = func(operation, name string) error {
		if operation == "get" && strings.HasPrefix(name, folder) {
			reads.Add(1)
		}
		return nil
	}
	return &reads
}

// TestSessionsShareTheLoadedIndex: sessions that begin at once read each index file once and have one table, which the
// last one closes.
func TestSessionsShareTheLoadedIndex(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	for i := range 5 {
		writeBlobs(t, openRepository(t, store), 10*i, 10*i+10) // on another node
	}
	reads := countReads(store, indexFolder)
	sessions := make([]*Blobs, 8)
	var group errgroup.Group
	for i := range sessions {
		group.Go(func() (err error) {
			sessions[i], err = r.LoadIndex(t.Context())
			return err
		})
	}
	must(t, group.Wait())
	if reads.Load() != 5 {
		t.Errorf("%d index files were read, want each of 5 once", reads.Load())
	}
	for i, b := range sessions {
		if b.table != sessions[0].table {
			t.Errorf("session %d has a table of its own", i)
		}
	}
	for _, b := range sessions {
		compareBlobs(t, b, 0, 50)
		must(t, b.Close())
	}
	if r.shared.table.Share() {
		t.Error("the table is open after the last session")
	}
	compareBlobs(t, loadIndex(t, r), 0, 50)
}

// TestWaitingSessionEndsWithItsContext: a session that waits for the load of another session ends with its context.
func TestWaitingSessionEndsWithItsContext(t *testing.T) {
	r := newRepository(t, newMemoryStore())
	r.shared.turn <- struct{}{} // as a load that hangs
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.LoadIndex(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the error of the context", err)
	}
	<-r.shared.turn
}

// TestProcessesShareACacheFolder: processes that load the index with one cache folder at once find all blobs, and never
// a blob of an index file that was removed.
func TestProcessesShareACacheFolder(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 10)
	for round := 1; round < 10; round++ {
		removed := store.names(indexFolder)[0]
		gone := map[blobHandle]bool{}
		id, err := blob.Parse(removed[len(indexFolder):])
		must(t, err)
		must(t, scanIndexFile(r, store, id, func(p index.Pack) error {
			for _, e := range p.Entries {
				gone[blobHandle{e.ID, e.Kind}] = true
			}
			return nil
		}))
		writeBlobs(t, openRepository(t, store), 10*round, 10*round+10)
		must(t, store.Delete(t.Context(), removed))
		var group errgroup.Group
		for range 3 {
			process := sameCache(t, r)
			group.Go(func() error {
				b, err := process.LoadIndex(t.Context())
				if err != nil {
					return err
				}
				for i := range 10 * (round + 1) {
					h := blobHandle{blob.Sum(content(i)), kindOf(i)}
					ok, err := b.Has(t.Context(), h.id, h.kind)
					if err != nil || ok && gone[h] || !ok && i >= 10*round {
						t.Errorf("round %d, blob %d: found %v, %v", round, i, ok, err)
					}
				}
				return b.Close()
			})
		}
		must(t, group.Wait())
	}
}

// TestSessionAfterASweepForgetsSweptBlobs: a sweep on another node between two sessions costs the next session the
// sweep's new index files alone; the session finds all blobs that are left, and none of the deleted ones.
func TestSessionAfterASweepForgetsSweptBlobs(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	for i := range 4 {
		saveFiles(t, r, 20_000, numbers(100*i, 100*i+40)...)
	}
	gone := saveFiles(t, r, 20_000, numbers(1000, 1040)...)
	before := loadIndex(t, r)
	if ok, err := before.Has(t.Context(), blob.Sum(content(1000)), blob.Data); err != nil || !ok {
		t.Fatal(ok, err)
	}
	must(t, before.Close())
	old := store.names(indexFolder)
	must(t, r.DeleteSnapshots(t.Context(), gone.ID))
	mustSweep(t, openRepository(t, store))
	added := slices.DeleteFunc(store.names(indexFolder), func(name string) bool { return slices.Contains(old, name) })
	reads := countReads(store, indexFolder)
	b := loadIndex(t, r)
	if n := int(reads.Load()); n != len(added) {
		t.Errorf("%d index files were read, want the %d new ones", n, len(added))
	}
	for i := range 4 {
		hasFiles(t, r, numbers(100*i, 100*i+40)...)
	}
	for i := 1000; i < 1040; i++ {
		if ok, err := b.Has(t.Context(), blob.Sum(content(i)), blob.Data); ok || err != nil {
			t.Fatalf("blob %d of the deleted snapshot: found %v, %v", i, ok, err)
		}
	}
}

// TestForeignCacheIsIgnored: whatever lies in the place of the table, a session reads the index from the store and
// replaces the file.
func TestForeignCacheIsIgnored(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, openRepository(t, store), 0, 100)
	path := filepath.Join(r.cacheFolder(), tableName)
	must(t, loadIndex(t, r).Close())
	good, err := os.ReadFile(path)
	must(t, err)
	other := openRepository(t, newMemoryStore())
	other.config.ID = blob.ID{1}.String()
	other.openCache()
	must(t, loadIndex(t, other).Close())
	foreign, err := os.ReadFile(filepath.Join(other.cacheFolder(), tableName))
	must(t, err)
	for what, content := range map[string][]byte{"empty": {}, "cut": good[:len(good)/2], "short": good[:100],
		"longer": append(slices.Clone(good), good...), "of another repository": foreign} {
		must(t, os.WriteFile(path, content, 0o600))
		reads := countReads(store, indexFolder)
		b := loadIndex(t, sameCache(t, r))
		compareBlobs(t, b, 0, 100)
		if reads.Load() == 0 {
			t.Errorf("%s: the index was not read from the store", what)
		}
		if now, err := os.ReadFile(path); err != nil || len(now) != len(good) {
			t.Errorf("%s: the table was not replaced: %d bytes, %v", what, len(now), err)
		}
	}
}

// TestTableCutWhileOpen: a table whose file another program cuts or removes while a session reads costs a new table.
func TestTableCutWhileOpen(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 300)
	must(t, loadIndex(t, r).Close())
	b := loadIndex(t, r)
	must(t, os.Truncate(filepath.Join(r.cacheFolder(), tableName), 4096))
	compareBlobs(t, b, 0, 300)
	must(t, os.RemoveAll(r.options.Cache))
	compareBlobs(t, b, 0, 300)
	compareBlobs(t, loadIndex(t, r), 0, 300)
}

// TestCachedTableTakesMarksOfOtherNodes: another node marks a pack that the table of this node has. The next session of
// this node lacks the damaged blob, also after a sweep replaced the index file with the mark.
func TestCachedTableTakesMarksOfOtherNodes(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFiles(t, r, 60_000, numbers(0, 30)...)
	id := blob.Sum(content(7))
	l, ok, err := loadIndex(t, r).Find(t.Context(), id, blob.Data)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	store.change(packName(l.Pack), flip(int(l.Offset)+20))
	before := store.names(indexFolder)
	verifyAll(t, store)
	lacks := func(when string) {
		t.Helper()
		for _, r := range []*Repository{r, sameCache(t, r), openRepository(t, store)} {
			if has, err := loadIndex(t, r).Has(t.Context(), id, blob.Data); has || err != nil {
				t.Errorf("%s: a blob of a damaged pack: found %v, %v", when, has, err)
			}
		}
	}
	lacks("after the verification")
	for i := range manySmall {
		saveFiles(t, openRepository(t, store), 60_000, numbers(100*i+100, 100*i+101)...)
	}
	marks := slices.DeleteFunc(store.names(indexFolder), func(name string) bool { return slices.Contains(before, name) })
	lacks("before the sweep")
	mustSweep(t, openRepository(t, store))
	for _, name := range store.names(indexFolder) {
		if slices.Contains(marks, name) {
			t.Fatalf("the sweep has left index file %s", name)
		}
	}
	lacks("after the sweep")
	hasFiles(t, sameCache(t, r), numbers(0, 7)...)
}
