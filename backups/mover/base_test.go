package mover

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// process is another process on the repository, with hooks of its own.
func (w *world) process() *world {
	p := *w
	p.store = &hookedStore{Store: w.store.Store, counts: map[string]int{}}
	p.open()
	return &p
}

// TestBaseOfAKilledSessionIsDeleted: session A relied on hidden packs, and is killed between its snapshot and its
// second look. Session T takes A's backup as its base. Meanwhile the base is deleted, and A's lock becomes stale. The
// sweep does not wait for T, which began after the packs were hidden. T commits between the sweep's last list of
// snapshots and the deletion of the index file: T's backup lacks no chunk.
func TestBaseOfAKilledSessionIsDeleted(t *testing.T) {
	w := newWorld(t)
	keep := newDisk(chunkSize)
	keep.fill(77, 0)
	w.backup(keep, options("keep"))
	v := newDisk(10 * chunkSize)
	v.fill(1, 0, 5)
	must(t, w.r.DeleteSnapshots(t.Context(), w.backup(v, options("v")).Snapshot)) // garbage, still in the index
	v.fill(2, 6)

	sweeper, a := w.process(), w.process()
	waits, listed, goOn, swept := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	lockLists, deletes := 0, 0
	hiding := true
	sweeper.store.before = func(operation, name string) error {
		switch {
		case operation == "delete" && strings.HasPrefix(name, "index/"):
			if deletes++; deletes == 2 { // of step 2, after its view
				close(listed)
				<-goOn
			}
			hiding = deletes == 0
		case operation == "list" && name == "locks/" && !hiding:
			if lockLists++; lockLists == 3 { // the first look at the sessions is over
				close(waits)
			}
		}
		return nil
	}
	var killed atomic.Bool
	var aLocks []string
	a.store.before = func(operation, name string) error {
		switch {
		case killed.Load():
			return errors.New("killed")
		case operation == "put" && strings.HasPrefix(name, "locks/"):
			aLocks = append(aLocks, name)
		case operation == "put" && strings.HasPrefix(name, "snapshots/"):
			go func() {
				defer close(swept)
				if _, err := sweeper.r.Sweep(t.Context(), repo.SweepOptions{Poll: time.Millisecond, Empty: true}); err != nil {
					t.Error(err)
				}
			}()
			<-waits
			killed.Store(true) // after this Put
		}
		return nil
	}
	files := func() map[blob.ID]bool {
		list, err := w.r.ListSnapshots(t.Context())
		must(t, err)
		ids := map[blob.ID]bool{}
		for _, f := range list {
			ids[f.ID] = true
		}
		return ids
	}
	before := files()
	changed := options("v")
	changed.Description.Object = []byte(`{"size":2}`) // so that drover.json is not among the garbage
	_, err := Backup(t.Context(), a.r, v, changed)
	if err == nil {
		t.Fatal("A was not killed")
	}
	var base blob.ID
	for id := range files() {
		if !before[id] {
			base = id
		}
	}
	if base == (blob.ID{}) {
		t.Fatal("A left no snapshot")
	}

	v2 := v.copy(v.size)
	v2.fill(3, 6)
	once := false
	src := &hookedDisk{disk: v2}
	src.before = func() {
		if once {
			return
		}
		once = true
		must(t, w.r.DeleteSnapshots(t.Context(), base))
		for _, name := range aLocks { // 30 minutes later
			must(t, os.Remove(filepath.Join(w.folder, name)))
		}
		<-listed
	}
	o := options("v")
	o.Base, o.Changed, o.Workers = &base, []int64{6}, 1
	backupT := w.process()
	result, err := Backup(t.Context(), backupT.r, src, o)
	close(goOn)
	<-swept
	must(t, err)
	w.open()
	blobs, m := w.load(result.Snapshot)
	damaged, err := Restore(t.Context(), blobs, m, newDisk(m.Size), RestoreOptions{AllowDamaged: true})
	if err != nil || len(damaged) > 0 {
		t.Errorf("T succeeded, and its backup lacks chunks %v: %v", damaged, err)
	}
}

// TestDamagedBaseIsNoBase: the store has lost the trees of segments of the base, and restic took them out of the index.
// The backup is full.
func TestDamagedBaseIsNoBase(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(200 * chunkSize)
	o := options("v")
	v.fill(1, 0, 70)
	first := w.backup(v, o).Snapshot // its trees lie in one pack
	trees := w.packs()
	v2 := v.copy(v.size)
	v2.fill(2, 0)
	o.Base, o.Changed = &first, []int64{0}
	second := w.backup(v2, o).Snapshot // shares segments 1 to 3 with the first
	lost := 0
	for _, name := range trees {
		info, err := os.Stat(filepath.Join(w.folder, name))
		must(t, err)
		if info.Size() < 100_000 {
			must(t, os.Remove(filepath.Join(w.folder, name)))
			lost++
		}
	}
	w.restic("rebuild-index")
	w.open()
	v3 := v2.copy(v.size)
	v3.fill(3, 70)
	o.Base, o.Changed = &second, []int64{70}
	result := w.backup(v3, o)
	if lost == 0 || !result.Full {
		t.Errorf("%d packs are lost: %+v", lost, result)
	}
	w.compare(result.Snapshot, v3)
}

// baseLosses are how the store loses blobs of a base, after which a pack or index file of the first backup is needed by
// the second one, too.
var baseLosses = map[string]func(w *world, firstPacks, firstIndex []string){
	"a pack, and restic made a new index": func(w *world, firstPacks, _ []string) {
		w.losePacks(1, func(name string, size int64) bool { return slices.Contains(firstPacks, name) && size > 2*chunkSize })
		w.restic("rebuild-index")
		w.open()
	},
	"an index file": func(w *world, _, firstIndex []string) {
		for _, name := range firstIndex {
			must(w, os.Remove(filepath.Join(w.folder, name)))
		}
		w.open()
	},
	"a pack of trees, which the cache has": func(w *world, firstPacks, _ []string) {
		w.losePacks(1, func(name string, size int64) bool { return !slices.Contains(firstPacks, name) && size < 100_000 })
		_, err := w.r.Check(w.Context(), options("v").Writer) // marks the pack
		must(w, err)
	},
}

// losePacks removes n packs from the store.
func (w *world) losePacks(n int, which func(name string, size int64) bool) {
	w.Helper()
	for _, name := range w.packs() {
		info, err := os.Stat(filepath.Join(w.folder, name))
		must(w, err)
		if n > 0 && which(name, info.Size()) {
			must(w, os.Remove(filepath.Join(w.folder, name)))
			n--
		}
	}
	if n > 0 {
		w.Fatal("no such packs")
	}
}

// TestBaseThatLostChunksIsNoBase: the store lost blobs of the base. The backup has all of them, although no chunk of
// them has changed since the base.
func TestBaseThatLostChunksIsNoBase(t *testing.T) {
	suite.System(t)
	for name, lose := range baseLosses {
		for _, digests := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, digests %v", name, digests), func(t *testing.T) {
				w := newWorld(t)
				v := newDisk(200 * chunkSize)
				v.digests = digests
				v.fill(1, 0, 1, 2, 3, 5, 70, 71, 150)
				o := options("v")
				first := w.backup(v, o).Snapshot
				packs, files := w.packs(), w.objects("index/")
				v2 := v.copy(v.size)
				v2.fill(2, 10, 64, 128, 192) // new trees of all segments
				o.Base, o.Changed = &first, []int64{10, 64, 128, 192}
				o.Description.Object = []byte(`{"size":2}`) // a blob of its own
				second := w.backup(v2, o).Snapshot
				w.compare(second, v2) // caches the trees
				lose(w, packs, files)
				v3 := v2.copy(v.size)
				v3.fill(3, 70)
				o.Base, o.Changed = &second, []int64{70}
				result := w.backup(v3, o)
				if !result.Full {
					t.Errorf("the backup relies on a base without all blobs: %+v", result)
				}
				w.open()
				w.compare(result.Snapshot, v3)
			})
		}
	}
}

// TestIndexFileOfTheBaseIsLostDuringABackup: the store loses an index file of the base's chunks after the backup looked
// for them. The backup begins again without the base.
func TestIndexFileOfTheBaseIsLostDuringABackup(t *testing.T) {
	w := newWorld(t)
	v := newDisk(200 * chunkSize)
	v.fill(1, 0, 70)
	o := options("v")
	first := w.backup(v, o).Snapshot
	files := w.objects("index/")
	v2 := v.copy(v.size)
	v2.fill(2, 10, 64, 128, 192)
	o.Base, o.Changed = &first, []int64{10, 64, 128, 192}
	o.Description.Object = []byte(`{"size":2}`) // a blob of its own
	second := w.backup(v2, o).Snapshot
	v3 := v2.copy(v.size)
	v3.fill(3, 100)
	src := &hookedDisk{disk: v3}
	src.before = func() {
		for _, name := range files {
			must(t, os.RemoveAll(filepath.Join(w.folder, name)))
		}
	}
	o.Base, o.Changed = &second, []int64{100}
	result, err := Backup(t.Context(), w.r, src, o)
	must(t, err)
	if !result.Full {
		t.Errorf("the backup relies on a base without all blobs: %+v", result)
	}
	w.compare(result.Snapshot, v3)
}
