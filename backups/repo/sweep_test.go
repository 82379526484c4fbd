package repo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/suite"
)

// saveFiles saves a snapshot of files, whose bodies are the numbers of content, in packs of packSize bytes.
func saveFiles(t testing.TB, r *Repository, packSize int, numbers ...int) Snapshot {
	t.Helper()
	lock, err := r.Lock(t.Context(), Shared)
	must(t, err)
	b := loadIndex(t, r)
	w := newWriter(t, b, WriterOptions{PackSize: packSize, Lock: lock})
	s := saveTree(t, r, w, numbers...)
	must(t, w.Close())
	must(t, lock.Close(t.Context()))
	return s
}

func saveTree(t testing.TB, r *Repository, w *Writer, numbers ...int) Snapshot {
	t.Helper()
	var folders []tree.Node
	for some := range slices.Chunk(numbers, 20) {
		nodes := make([]tree.Node, 0, len(some))
		for _, i := range some {
			id, _, err := w.Add(t.Context(), blob.Data, content(i))
			must(t, err)
			nodes = append(nodes, tree.Node{Name: fmt.Sprintf("%06d", i), Type: tree.File, Size: int64(len(content(i))),
				Content: []blob.ID{id}})
		}
		id, err := w.AddTree(t.Context(), nodes)
		must(t, err)
		folders = append(folders, tree.Node{Name: nodes[0].Name, Type: tree.Folder, Subtree: id})
	}
	root, err := w.AddTree(t.Context(), folders)
	must(t, err)
	must(t, w.Flush(t.Context()))
	s := Snapshot{Time: time.Unix(1_700_000_000, 0), Tree: &root, Paths: []string{"/files"}}
	s.ID, err = r.SaveSnapshot(t.Context(), s)
	must(t, err)
	return s
}

// hasFiles demands that a new session reads all files of a snapshot.
func hasFiles(t testing.TB, r *Repository, numbers ...int) {
	t.Helper()
	b := loadIndex(t, r)
	for _, i := range numbers {
		plain, err := b.Read(t.Context(), blob.Sum(content(i)), blob.Data, nil)
		if err != nil || string(plain) != string(content(i)) {
			t.Fatalf("file %d: %d bytes, %v", i, len(plain), err)
		}
	}
}

func numbers(from, to int) (all []int) {
	for i := from; i < to; i++ {
		all = append(all, i)
	}
	return all
}

func sweepOptions() SweepOptions {
	return SweepOptions{Poll: time.Millisecond, Empty: true, Writer: WriterOptions{PackSize: 20_000}}
}

func mustSweep(t testing.TB, r *Repository) SweepStats {
	t.Helper()
	stats, err := r.Sweep(t.Context(), sweepOptions())
	must(t, err)
	return stats
}

// bytesOf is the size of all objects of a folder.
func (s *memoryStore) bytesOf(folder string) (n int64) {
	for _, name := range s.names(folder) {
		n += int64(len(s.objects[name].body))
	}
	return n
}

// TestSweepFreesTheSpaceOfDeletedSnapshots: a sweep without garbage changes nothing. After a deletion, a sweep deletes
// the packs of that snapshot alone, copies the shared blobs of packs that are mostly garbage, and frees the space; a
// second sweep has nothing to do. restic finds no error.
func TestSweepFreesTheSpaceOfDeletedSnapshots(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	r := newRepository(t, store)
	shared := numbers(0, 10)
	first := saveFiles(t, r, 20_000, numbers(0, 200)...)
	saveFiles(t, r, 20_000, append(shared, numbers(300, 350)...)...)
	before := store.names("")
	if stats := mustSweep(t, r); stats != (SweepStats{Snapshots: 2}) || !slices.Equal(store.names(""), before) {
		t.Errorf("a sweep without garbage: %+v", stats)
	}
	size := store.bytesOf(dataFolder)
	must(t, r.DeleteSnapshots(t.Context(), first.ID))
	stats := mustSweep(t, r)
	after := store.bytesOf(dataFolder)
	if stats.HiddenPacks < 5 || stats.DeletedPacks != stats.HiddenPacks || stats.CopiedBlobs == 0 ||
		stats.ReturnedPacks > 0 ||
		stats.FreedBytes < size-after || after > size/2 {
		t.Errorf("%+v; %d bytes of packs, before %d", stats, after, size)
	}
	hasFiles(t, openRepository(t, store), append(shared, numbers(300, 350)...)...)
	hasFiles(t, r, append(shared, numbers(300, 350)...)...)
	mustCheck(t, store.save(t))
	if stats := mustSweep(t, r); stats != (SweepStats{Snapshots: 1}) {
		t.Errorf("a second sweep: %+v", stats)
	}
	must(t, r.DeleteSnapshots(t.Context(), listed(t, r)...))
	mustSweep(t, r)
	if left := store.names(dataFolder); len(left) > 0 || len(store.names(locksFolder)) > 0 {
		t.Errorf("without snapshots the packs %v are left", left)
	}
}

func listed(t testing.TB, r *Repository) (ids []blob.ID) {
	files, err := r.ListSnapshots(t.Context())
	must(t, err)
	for _, f := range files {
		ids = append(ids, f.ID)
	}
	return ids
}

// TestUsageFollowsTheIndex: the usage of a repository is the size of its blobs, without those of hidden packs, and a
// blob that two packs have is unique once.
func TestUsageFollowsTheIndex(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	usage := func(what string) Usage {
		t.Helper()
		u, err := r.Usage(t.Context())
		must(t, err)
		if packs := store.bytesOf(dataFolder); u.StoredBytes > packs || u.StoredBytes < packs*9/10 {
			t.Errorf("%s: %+v, and the packs have %d bytes", what, u, packs)
		}
		return u
	}
	if u := usage("empty"); u != (Usage{}) {
		t.Errorf("an empty repository: %+v", u)
	}
	first := saveFiles(t, r, 20_000, numbers(0, 100)...)
	one := usage("one backup")
	// Two sessions that do not see each other's blobs store the same ones.
	other := openRepository(t, store)
	blobs := loadIndex(t, other)
	saveFiles(t, r, 20_000, numbers(100, 150)...)
	w := newWriter(t, blobs, WriterOptions{PackSize: 20_000})
	addBlobs(t, w, 100, 150)
	must(t, w.Flush(t.Context()))
	if u := usage("repeated"); u.UniqueBytes >= u.StoredBytes || u.UniqueBytes <= one.UniqueBytes {
		t.Errorf("repeated blobs: %+v, before %+v", u, one)
	}
	must(t, w.Close())
	must(t, r.DeleteSnapshots(t.Context(), first.ID))
	mustSweep(t, r)
	if u := usage("swept"); u.UniqueBytes >= one.UniqueBytes {
		t.Errorf("swept: %+v, before %+v", u, one)
	}
}

// TestSweepLeavesARunningSessionAlone: the packs of a session that runs, indexed or not, stay, although no snapshot
// needs them; the sweep deletes garbage after the session has ended, and the session's snapshot is whole.
func TestSweepLeavesARunningSessionAlone(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	deleted := saveFiles(t, r, 20_000, numbers(0, 100)...)
	must(t, r.DeleteSnapshots(t.Context(), deleted.ID))
	lock, err := r.Lock(t.Context(), Shared)
	must(t, err)
	b := loadIndex(t, r)
	w := newWriter(t, b, WriterOptions{PackSize: 20_000, Lock: lock})
	addBlobs(t, w, 500, 550)
	must(t, w.Flush(t.Context()))
	mine := store.names(indexFolder)
	addBlobs(t, w, 550, 600) // in packs without an index file
	hidden, swept := make(chan struct{}), make(chan SweepStats, 1)
	store.after = func(operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, indexFolder) {
			select {
			case <-hidden:
			default:
				close(hidden)
			}
		}
		return nil
	}
	go func() {
		stats, err := openRepository(t, store).Sweep(t.Context(), sweepOptions())
		if err != nil {
			t.Error(err)
		}
		swept <- stats
	}()
	select {
	case <-hidden:
	case stats := <-swept:
		t.Fatalf("the sweep ended early: %+v", stats)
	}
	saveTree(t, r, w, numbers(500, 600)...)
	must(t, w.Close())
	current := store.names(indexFolder)
	if !slices.ContainsFunc(mine, func(n string) bool { return slices.Contains(current, n) }) {
		t.Error("the sweep replaced the index file of the running session")
	}
	select {
	case stats := <-swept:
		t.Errorf("the sweep does not wait for the session: %+v", stats)
		swept <- stats
	case <-time.After(50 * time.Millisecond):
	}
	must(t, lock.Close(t.Context()))
	if stats := <-swept; stats.DeletedPacks == 0 || stats.ReturnedPacks > 0 {
		t.Errorf("%+v, want deleted packs", stats)
	}
	hasFiles(t, openRepository(t, store), numbers(500, 600)...)
	if b := loadIndex(t, openRepository(t, store)); mustHave(t, b, 1) {
		t.Error("the garbage is in the index")
	}
}

func mustHave(t testing.TB, b *Blobs, i int) bool {
	ok, err := b.Has(t.Context(), blob.Sum(content(i)), kindOf(i))
	must(t, err)
	return ok
}

// TestSweepReturnsPacksThatASnapshotNeeds: a session that does not look whether index files vanished, as of another
// program, relies on packs that the sweep hides, and saves its snapshot before or after the sweep replaced the index.
// The sweep gives up, or returns the packs, at once if the sweep can see the snapshot, although another session still
// runs; nothing is lost.
func TestSweepReturnsPacksThatASnapshotNeeds(t *testing.T) {
	suite.System(t)
	for _, place := range []string{"put", "delete", "wait"} {
		t.Run(place, func(t *testing.T) {
			store := newMemoryStore()
			r := newRepository(t, store)
			deleted := saveFiles(t, r, 20_000, numbers(0, 100)...)
			must(t, r.DeleteSnapshots(t.Context(), deleted.ID))
			lock, err := r.Lock(t.Context(), Shared)
			must(t, err)
			other, err := r.Lock(t.Context(), Shared)
			must(t, err)
			b := loadIndex(t, r)
			w := newWriter(t, b, WriterOptions{PackSize: 20_000, Lock: lock})
			saved, lists := false, 0 // of the sweep's goroutine
			save := func() {
				saved = true
				saveTree(t, r, w, numbers(0, 100)...)
				must(t, w.Close())
				must(t, lock.Close(t.Context()))
			}
			inner := openRepository(t, store)
			inner.store = &hookedStore{memoryStore: store, before: func(operation, name string) {
				switch {
				case operation == "list" && name == locksFolder && saved:
					// The look that returns the packs lists the locks twice. Then the sweep waits for other.
					if lists++; lists == 3 && place != "wait" {
						hasFiles(t, openRepository(t, store), numbers(0, 100)...)
					}
					if lists == 5 {
						must(t, other.Close(t.Context()))
					}
				case saved:
				case place == "wait" && operation == "list" && name == locksFolder:
					if lists++; lists > 6 { // after the first look at the sessions of step 2
						lists = 0
						save()
					}
				case operation == place && strings.HasPrefix(name, indexFolder):
					save()
				}
			}}
			stats, err := inner.Sweep(t.Context(), sweepOptions())
			if place == "put" {
				if !api.Is(err, api.Busy) || stats.DeletedPacks > 0 {
					t.Errorf("%+v, %v, want an error of kind busy", stats, err)
				}
				must(t, other.Close(t.Context()))
			} else if must(t, err); stats.HiddenPacks == 0 || stats.ReturnedPacks != stats.HiddenPacks {
				t.Errorf("saved %v: %+v", saved, stats)
			}
			hasFiles(t, openRepository(t, store), numbers(0, 100)...)
			mustCheck(t, store.save(t))
		})
	}
}

// hookedStore is a memoryStore as a single process uses the store.
type hookedStore struct {
	*memoryStore
	before func(operation, name string)
}

func (s *hookedStore) Put(ctx context.Context, name string, body []byte) error {
	s.before("put", name)
	return s.memoryStore.Put(ctx, name, body)
}

func (s *hookedStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	s.before("list", prefix)
	return s.memoryStore.List(ctx, prefix, each)
}

func (s *hookedStore) Delete(ctx context.Context, names ...string) error {
	s.before("delete", strings.Join(names, " "))
	return s.memoryStore.Delete(ctx, names...)
}

// TestDamageEndsTheSweep: a snapshot or tree that cannot be read, or a blob that no index file names, ends the sweep
// with an error of kind corrupt, and no object is deleted.
func TestDamageEndsTheSweep(t *testing.T) {
	for _, damage := range []string{snapshotsFolder, dataFolder, indexFolder} {
		store := newMemoryStore()
		r := newRepository(t, store)
		deleted := saveFiles(t, r, 20_000, numbers(0, 50)...)
		must(t, r.DeleteSnapshots(t.Context(), deleted.ID))
		before := store.names("")
		saveFiles(t, r, 20_000, numbers(100, 101)...)
		for _, name := range store.names(damage) {
			if slices.Contains(before, name) {
				continue
			}
			if damage == indexFolder {
				must(t, store.Delete(t.Context(), name))
			} else {
				store.change(name, func(b []byte) []byte { b[40] ^= 1; return b })
			}
		}
		before = store.names("")
		stats, err := r.Sweep(t.Context(), sweepOptions())
		if !api.Is(err, api.Corrupt) || stats.DeletedPacks > 0 || !slices.Equal(store.names(""), before) {
			t.Errorf("%s is damaged: %+v, %v, want an error of kind corrupt", damage, stats, err)
		}
	}
}

// TestWrongListEndsTheSweep: a list without a known snapshot, or without any snapshot, ends the sweep with an error of
// kind unavailable, and no object is deleted.
func TestWrongListEndsTheSweep(t *testing.T) {
	for _, known := range []bool{true, false} {
		store := newMemoryStore()
		r := newRepository(t, store)
		first := saveFiles(t, r, 20_000, numbers(0, 50)...)
		second := saveFiles(t, r, 20_000, numbers(50, 60)...)
		o := sweepOptions()
		o.Empty = false
		must(t, r.DeleteSnapshots(t.Context(), first.ID))
		if known {
			o.Known = []blob.ID{second.ID, first.ID}
		} else {
			must(t, r.DeleteSnapshots(t.Context(), second.ID))
		}
		before := store.names("")
		stats, err := r.Sweep(t.Context(), o)
		if !api.Is(err, api.Unavailable) || stats.DeletedPacks > 0 || !slices.Equal(store.names(""), before) {
			t.Errorf("known snapshots %v: %+v, %v, want an error of kind unavailable", known, stats, err)
		}
	}
}

// TestInterruptedSweepLosesNothing: the store fails at each write and deletion of a sweep in turn. No file is lost, and
// the next sweep ends the work.
func TestInterruptedSweepLosesNothing(t *testing.T) {
	suite.System(t)
	killed := errors.New("killed")
	// Most packs have garbage, or a single file that is needed; some have no garbage.
	keep := append(append([]int{5}, numbers(20, 60)...), 120)
	for step := 1; ; step++ {
		store := newMemoryStore()
		r := newRepository(t, store)
		first := saveFiles(t, r, 20_000, numbers(0, 200)...)
		saveFiles(t, r, 20_000, keep...)
		must(t, r.DeleteSnapshots(t.Context(), first.ID))
		var count atomic.Int64
		store.before = func(operation, _ string) error {
			if (operation == "put" || operation == "delete") && int(count.Add(1)) >= step {
				return killed
			}
			return nil
		}
		_, err := r.Sweep(t.Context(), sweepOptions())
		store.before = nil
		must(t, store.Delete(t.Context(), store.names(locksFolder)...)) // of the killed process, after 30 minutes
		hasFiles(t, openRepository(t, store), keep...)
		if step%4 == 0 {
			mustCheck(t, store.save(t))
		}
		if err == nil {
			if step < 8 {
				t.Errorf("the sweep ends after %d steps", step)
			}
			return
		}
		mustSweep(t, openRepository(t, store))
		hasFiles(t, openRepository(t, store), keep...)
		want := newMemoryStore()
		saveFiles(t, newRepository(t, want), 20_000, keep...)
		if n, most := len(store.names(dataFolder)), len(want.names(dataFolder))+2; n > most {
			t.Errorf("step %d: %d packs are left, at most %d are needed", step, n, most)
		}
		if step > 100 {
			t.Fatal("the sweep does not end")
		}
	}
}

// TestSweepRefusesCompany: a second sweep, and a program without Drover's sessions, are errors of kind busy that name
// the holder; credentials without the permission to delete are an error of kind denied. No object changes.
func TestSweepRefusesCompany(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	deleted := saveFiles(t, r, 20_000, numbers(0, 50)...)
	must(t, r.DeleteSnapshots(t.Context(), deleted.ID))
	before := store.names("")
	refused := func(want api.Kind, name string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		stats, err := openRepository(t, store).Sweep(ctx, sweepOptions())
		if !api.Is(err, want) || !strings.Contains(err.Error(), name) || stats.HiddenPacks > 0 {
			t.Errorf("%v, %+v, want an error of kind %v with %s", err, stats, want, name)
		}
	}
	lock, err := r.Lock(t.Context(), Sweeping)
	must(t, err)
	refused(api.Busy, "node-1")
	must(t, lock.Close(t.Context()))
	other := *r
	other.options.Hostname = "laptop"
	foreign := &Lock{r: &other}
	_, err = foreign.save(t.Context())
	must(t, err)
	refused(api.Busy, "laptop")
	must(t, store.Delete(t.Context(), store.names(locksFolder)...))
	store.before = func(operation, name string) error {
		if operation == "delete" {
			return api.Errorf(api.Denied, "no permission")
		}
		return nil
	}
	refused(api.Denied, "no permission")
	store.before = nil
	must(t, store.Delete(t.Context(), store.names(locksFolder)...))
	if !slices.Equal(store.names(""), before) {
		t.Error("a refused sweep changes the store")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Sweep(ctx, sweepOptions()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the error of the context", err)
	}
}

// TestSweepMergesSmallIndexFiles: many small index files become one, with all blobs.
func TestSweepMergesSmallIndexFiles(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	var ids []blob.ID
	for i := range manySmall + 1 {
		ids = append(ids, saveFiles(t, r, 20_000, i).ID)
	}
	mustSweep(t, r)
	if n := len(store.names(indexFolder)); n != 1 {
		t.Errorf("%d index files after the sweep, want one", n)
	}
	hasFiles(t, openRepository(t, store), numbers(0, manySmall+1)...)
	must(t, r.DeleteSnapshots(t.Context(), ids[3]))
	mustSweep(t, r)
	hasFiles(t, openRepository(t, store), append(numbers(0, 3), numbers(4, manySmall+1)...)...)
}

// TestSweepPrefersPacksThatExist: of a blob in two packs, one of which the store has lost, the other pack stays.
func TestSweepPrefersPacksThatExist(t *testing.T) {
	for range 4 { // the order of the packs is random
		store := newMemoryStore()
		r := newRepository(t, store)
		b := loadIndex(t, r)
		w := newWriter(t, b, WriterOptions{})
		saveFiles(t, r, 20_000, 1)
		saveTree(t, r, w, 1) // a Writer that knows nothing of the first pack
		must(t, w.Close())
		l, ok, err := loadIndex(t, r).Find(t.Context(), blob.Sum(content(1)), blob.Data)
		must(t, err)
		if !ok {
			t.Fatal("the blob is not in the index")
		}
		must(t, store.Delete(t.Context(), packName(l.Pack)))
		mustSweep(t, r)
		hasFiles(t, openRepository(t, store), 1)
	}
}

// TestHiddenPacksOfOthersAreDeleted: a pack that an earlier sweep hid is deleted, unless a snapshot needs the pack.
func TestHiddenPacksOfOthersAreDeleted(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFiles(t, r, 20_000, numbers(0, 20)...)
	writeBlobs(t, r, 500, 520)
	hideAll := func() {
		var file index.FileBuilder
		for _, name := range store.names(indexFolder) {
			id, err := blob.Parse(strings.TrimPrefix(name, indexFolder))
			must(t, err)
			o, err := store.Stat(t.Context(), name)
			must(t, err)
			_, err = r.scanIndexFile(t.Context(), namedFile{o, id}, func(p index.Pack) error {
				p.Hidden = true
				file.Add(p)
				return nil
			})
			must(t, err)
			must(t, store.Delete(t.Context(), name))
		}
		_, err := r.saveFile(t.Context(), indexFolder, file.Bytes())
		must(t, err)
	}
	hideAll()
	stats := mustSweep(t, r)
	if stats.ReturnedPacks == 0 || stats.DeletedPacks == 0 {
		t.Errorf("%+v, want returned and deleted packs", stats)
	}
	hasFiles(t, openRepository(t, store), numbers(0, 20)...)
	if mustHave(t, loadIndex(t, r), 510) {
		t.Error("the garbage is in the index")
	}
}
