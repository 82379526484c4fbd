package repo

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// TestDamagedIndexFileStopsNobody: an index file is damaged in each way. A node without a cache reads all files, and a
// backup of the same files succeeds. A verification repairs the index; afterwards a backup finds all blobs, a sweep
// runs, and restic finds no error.
func TestDamagedIndexFileStopsNobody(t *testing.T) {
	suite.System(t)
	origin := newMemoryStore()
	r := newRepository(t, origin)
	saveFiles(t, r, 20_000, numbers(0, 30)...)
	name := origin.names(indexFolder)[0]
	saveFiles(t, r, 20_000, numbers(20, 40)...)
	for how, harm := range harms {
		t.Run(how, func(t *testing.T) {
			store := origin.clone()
			harm(store, name)
			if how != "deleted" { // then Check looks for the blobs
				hasFiles(t, openRepository(t, store), numbers(0, 40)...)
			}
			saveFiles(t, openRepository(t, store.clone()), 20_000, numbers(0, 35)...)
			before := store.names(indexFolder)
			if stats := verifyAll(t, store); stats.Repaired != (how != "deleted") || len(stats.Damaged) > 0 {
				t.Errorf("the verification: %+v", stats)
			}
			if d := check(t, store); !d.IsZero() || len(d.Snapshots) > 0 || d.Repaired != (how == "deleted") {
				t.Errorf("after the repair: %+v", d)
			}
			if now := store.names(indexFolder); slices.Contains(now, name) || len(now) > max(len(before), 2) {
				t.Errorf("index files %v, before %v", now, before)
			}
			again := openRepository(t, store)
			w := newWriter(t, loadIndex(t, again), WriterOptions{PackSize: 20_000})
			saveTree(t, again, w, numbers(0, 40)...)
			must(t, w.Close())
			if n := w.Stats().NewBlobs; n > 1 { // the folder of all files
				t.Errorf("%d blobs were stored again", n)
			}
			mustSweep(t, openRepository(t, store))
			hasFiles(t, openRepository(t, store), numbers(0, 40)...)
			mustCheck(t, store.save(t))
		})
	}
}

// TestPacksOfADamagedIndexFileAreStoredAgain: before the repair, a backup does not rely on a pack that only a damaged
// index file may name, because a sweep may be about to delete the pack.
func TestPacksOfADamagedIndexFileAreStoredAgain(t *testing.T) {
	store := newMemoryStore()
	saveFiles(t, newRepository(t, store), 20_000, numbers(0, 10)...)
	store.change(store.names(indexFolder)[0], flip(0))
	r := openRepository(t, store)
	w := newWriter(t, loadIndex(t, r), WriterOptions{PackSize: 20_000})
	saveTree(t, r, w, numbers(0, 10)...)
	must(t, w.Close())
	if n := w.Stats().NewBlobs; n <= 10 {
		t.Errorf("%d blobs were stored again, want all", n)
	}
}

// TestIndexIsReadAgainAfterDamageOnTheWay: the first answer for an index file is damaged, and the second
// answer is not: the index file counts as whole.
func TestIndexIsReadAgainAfterDamageOnTheWay(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFiles(t, r, 20_000, numbers(0, 10)...)
	name, n := store.names(indexFolder)[0], 0
	whole := store.objects[name].body
	store.before = func(operation, of string) error {
		if operation == "get" && of == name {
			body := slices.Clone(whole)
			if n++; n == 1 {
				body[0] ^= 1
			}
			store.change(name, func([]byte) []byte { return body })
		}
		return nil
	}
	damaged, err := openRepository(t, store).damagedIndexFiles(t.Context())
	if err != nil || len(damaged) > 0 || n != 2 {
		t.Errorf("index files %v are damaged after %d readings: %v", damaged, n, err)
	}
}

// TestRepairDeletesNothingWithoutPermission: the store permits no deletion. The packs of the damaged index file are
// named again, once; Check names the file.
func TestRepairDeletesNothingWithoutPermission(t *testing.T) {
	store := newMemoryStore()
	saveFiles(t, newRepository(t, store), 20_000, numbers(0, 10)...)
	name := store.names(indexFolder)[0]
	store.change(name, flip(0))
	store.before = func(operation, _ string) error {
		if operation == "delete" {
			return api.Errorf(api.Denied, "no deletions")
		}
		return nil
	}
	verifyAll(t, store)
	for range 2 {
		if d := check(t, store); len(d.Objects) != 1 || d.Objects[0] != name || len(d.Blobs) > 0 {
			t.Errorf("damage %+v, want index file %s", d, name)
		}
	}
	if names := store.names(indexFolder); len(names) != 2 {
		t.Errorf("index files %v, want the damaged one and a new one", names)
	}
	hasFiles(t, openRepository(t, store), numbers(0, 10)...)
}

// TestIndexRepairRunsBesideNoSweep: while a sweep may delete packs, a verification names none that no index file names.
// The packs that it read count, and the next step repairs the index.
func TestIndexRepairRunsBesideNoSweep(t *testing.T) {
	store := newMemoryStore()
	saveFiles(t, newRepository(t, store), 20_000, numbers(0, 10)...)
	store.change(store.names(indexFolder)[0], flip(0))
	before := store.names(indexFolder)
	lock, err := openRepository(t, store).Lock(t.Context(), Sweeping)
	must(t, err)
	stats, err := openRepository(t, store).Verify(t.Context(), VerifyOptions{Until: lastPack})
	if !IsLocked(err) || stats.Done || stats.Last != lastPack || stats.Packs == 0 ||
		!slices.Equal(store.names(indexFolder), before) {
		t.Errorf("beside a sweep: %+v, %v", stats, err)
	}
	must(t, lock.Close(t.Context()))
	stats, err = openRepository(t, store).Verify(t.Context(), VerifyOptions{After: stats.Last, Until: lastPack})
	if err != nil || !stats.Repaired || !stats.Done || stats.Packs > 0 {
		t.Errorf("after the sweep: %+v, %v", stats, err)
	}
}

// TestReturnedPackLosesItsMark: a pack is missing while a verification runs, and is there again. The next verification
// takes the mark back: no backup is damaged, and a backup stores nothing again.
func TestReturnedPackLosesItsMark(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFiles(t, r, 20_000, numbers(0, 40)...)
	l, _, err := loadIndex(t, r).Find(t.Context(), blob.Sum(content(7)), blob.Data)
	must(t, err)
	away := store.objects[packName(l.Pack)]
	must(t, store.Delete(t.Context(), packName(l.Pack)))
	if stats := verifyAll(t, store); len(stats.Damaged) != 1 {
		t.Fatalf("a pack is missing: %+v", stats)
	}
	if d := check(t, store); len(d.Snapshots) != 1 {
		t.Fatalf("a pack is missing: %+v", d)
	}
	store.objects[packName(l.Pack)] = away
	if stats := verifyAll(t, store); len(stats.Damaged) > 0 || stats.Repaired {
		t.Errorf("the pack is back: %+v", stats)
	}
	if d := check(t, store); !d.IsZero() || len(d.Snapshots) > 0 {
		t.Errorf("the pack is back: %+v", d)
	}
	again := openRepository(t, store)
	b := loadIndex(t, again)
	w := newWriter(t, b, WriterOptions{PackSize: 20_000})
	saveTree(t, again, w, numbers(0, 40)...)
	must(t, w.Close())
	if b.HasMarks() || w.Stats().NewBlobs > 0 {
		t.Errorf("marks: %v, stored again: %d blobs", b.HasMarks(), w.Stats().NewBlobs)
	}
	mustSweep(t, openRepository(t, store))
	hasFiles(t, openRepository(t, store), numbers(0, 40)...)
	mustCheck(t, store.save(t))
}

// TestKilledRepairLosesNothing: a verification that takes a mark back and repairs a damaged index file is killed at each
// operation. The next one ends the work, and no file is lost.
func TestKilledRepairLosesNothing(t *testing.T) {
	origin := newMemoryStore()
	r := newRepository(t, origin)
	saveFiles(t, r, 20_000, numbers(0, 10)...)
	broken := origin.names(indexFolder)[0]
	saveFiles(t, r, 20_000, numbers(10, 20)...)
	l, _, err := loadIndex(t, r).Find(t.Context(), blob.Sum(content(15)), blob.Data)
	must(t, err)
	away := origin.objects[packName(l.Pack)]
	must(t, origin.Delete(t.Context(), packName(l.Pack)))
	verifyAll(t, origin)
	origin.objects[packName(l.Pack)] = away
	origin.change(broken, flip(0))
	for kill := 0; ; kill++ {
		store, operations := origin.clone(), 0
		store.before = func(string, string) error {
			if operations++; operations > kill {
				return api.Errorf(api.Unavailable, "killed")
			}
			return nil
		}
		_, err := openRepository(t, store).Verify(t.Context(), VerifyOptions{Until: lastPack,
			Writer: WriterOptions{PackSize: 20_000}})
		store.before = nil
		must(t, store.Delete(t.Context(), store.names(locksFolder)...))
		verifyAll(t, store)
		if d := check(t, store); !d.IsZero() || loadIndex(t, openRepository(t, store)).HasMarks() {
			t.Errorf("killed after %d operations: %+v", kill, d)
		}
		hasFiles(t, openRepository(t, store), numbers(0, 20)...)
		if err == nil {
			return
		}
	}
}

// TestMissingPartOfAStoreGetsNoMarks: a part of the packs is missing while config answers. Verification and check say
// so and mark nothing; single lost packs get marks all the same.
func TestMissingPartOfAStoreGetsNoMarks(t *testing.T) {
	store := newMemoryStore()
	saveFiles(t, newRepository(t, store), 20_000, numbers(0, 150)...)
	packs, indexes := store.names(dataFolder), store.names(indexFolder)
	all := maps.Clone(store.objects)
	must(t, store.Delete(t.Context(), packs[:missingLeast]...))
	stats, err := openRepository(t, store).Verify(t.Context(), VerifyOptions{Until: lastPack,
		Writer: WriterOptions{PackSize: 20_000}})
	if !IsPartMissing(err) || stats.Done || len(stats.Damaged) > 0 {
		t.Errorf("the verification: %+v, %v", stats, err)
	}
	if _, err := openRepository(t, store).Check(t.Context(), WriterOptions{}); !IsPartMissing(err) {
		t.Errorf("the check: %v", err)
	}
	if now := store.names(indexFolder); !slices.Equal(now, indexes) {
		t.Errorf("index files %v, want %v", now, indexes)
	}
	store.objects = all
	if d := check(t, store); len(verifyAll(t, store).Damaged) > 0 || !d.IsZero() {
		t.Errorf("the packs are back: %+v", d)
	}
}

// TestRebuiltIndexForgetsLostPacks: a part of the packs is lost for good. After restic has rebuilt the index, the
// verification ends, and the check names the backup and the lost blobs.
func TestRebuiltIndexForgetsLostPacks(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	saved := saveFiles(t, newRepository(t, store), 20_000, numbers(0, 60)...)
	packs := store.names(dataFolder)
	must(t, store.Delete(t.Context(), packs[:2]...))
	folder := store.save(t)
	mustRestic(t, folder, "rebuild-index")
	store = newMemoryStore()
	store.load(t, folder)
	if stats := verifyAll(t, store); len(stats.Damaged) > 0 || stats.Packs != len(packs)-2 {
		t.Errorf("the verification: %+v", stats)
	}
	if d := check(t, store); len(d.Blobs) == 0 || len(d.Snapshots) != 1 || d.Snapshots[0] != saved.ID || d.Repaired {
		t.Errorf("the check: %+v", d)
	}
}

// TestVerificationKeepsWhatItRead: the store fails at a pack in the middle of a verification, behind a damaged pack. The
// packs before count, and the damaged one has its mark.
func TestVerificationKeepsWhatItRead(t *testing.T) {
	store := newMemoryStore()
	saveFiles(t, newRepository(t, store), 20_000, numbers(0, 150)...)
	packs := store.names(dataFolder)
	store.change(packs[1], flip(-1))
	failing := true
	store.before = func(operation, name string) error {
		if failing && operation == "get" && name == packs[3] {
			return api.Errorf(api.Unavailable, "the store does not answer")
		}
		return nil
	}
	stats, err := openRepository(t, store).Verify(t.Context(), VerifyOptions{Until: lastPack,
		Writer: WriterOptions{PackSize: 20_000}})
	if !api.Is(err, api.Unavailable) || stats.Packs != 3 || len(stats.Damaged) != 1 ||
		!strings.HasSuffix(packs[2], stats.Last.String()) {
		t.Errorf("%+v, %v", stats, err)
	}
	failing = false
	if !loadIndex(t, openRepository(t, store)).HasMarks() {
		t.Error("the damaged pack has no mark")
	}
}
