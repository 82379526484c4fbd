package repo

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// writeBlobs adds blobs in a session of their own.
func writeBlobs(t testing.TB, r *Repository, from, to int) {
	t.Helper()
	b, err := r.LoadIndex(t.Context())
	must(t, err)
	w := newWriter(t, b, WriterOptions{PackSize: 20_000})
	addBlobs(t, w, from, to)
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	must(t, b.Close())
}

// TestDamagedBlobIsNamed: a changed, short or missing pack is an error that names the blob and the pack; other packs
// are still readable, and a blob that nobody wrote is not found.
func TestDamagedBlobIsNamed(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 100)
	b := loadIndex(t, r)
	id := blob.Sum(content(0))
	l, ok, err := b.Find(t.Context(), id, kindOf(0))
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	name := packName(l.Pack)
	whole := store.objects[name]
	for _, damage := range []func(){
		func() { store.change(name, func(body []byte) []byte { body[l.Offset] ^= 1; return body }) },
		func() { store.change(name, func(body []byte) []byte { return body[:l.Offset+l.Length-1] }) },
		func() { delete(store.objects, name) },
	} {
		damage()
		_, err := b.Read(t.Context(), id, kindOf(0), nil)
		var damaged *DamagedError
		if !errors.As(err, &damaged) || damaged.Blob != id || damaged.Pack != l.Pack || !api.Is(err, api.Corrupt) ||
			!strings.Contains(err.Error(), id.String()) || !strings.Contains(err.Error(), l.Pack.String()) {
			t.Errorf("%v, want a DamagedError with blob and pack", err)
		}
		store.objects[name] = whole
	}
	compareBlobs(t, b, 0, 100)
	if _, err := b.Read(t.Context(), blob.Sum([]byte("never written")), blob.Data, nil); !api.Is(err, api.NotFound) {
		t.Errorf("an unknown blob: %v, want an error of kind not found", err)
	}
	store.before = func(string, string) error { return api.Errorf(api.Unavailable, "the store is away") }
	var damaged *DamagedError
	if _, err := b.Read(t.Context(), id, kindOf(0), nil); !api.Is(err, api.Unavailable) || errors.As(err, &damaged) {
		t.Errorf("an unreachable store: %v, want an error of kind unavailable", err)
	}
	store.before = nil
}

// TestLyingIndexIsDamage: entries of a well sealed index file that name wrong lengths are damage, without memory for
// more than the entry's length.
func TestLyingIndexIsDamage(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 2) // blob 1 is compressed
	b := loadIndex(t, r)
	l, ok, err := b.Find(t.Context(), blob.Sum(content(1)), kindOf(1))
	if err != nil || !ok || l.Plain == 0 {
		t.Fatal(l, ok, err)
	}
	for _, change := range []func(l *index.Location){
		func(l *index.Location) { l.Plain-- },
		func(l *index.Location) { l.Plain++ },
		func(l *index.Location) { l.Plain = 1 },
		func(l *index.Location) { l.Plain = 0 },
		func(l *index.Location) { l.Plain = blob.Limit },
		func(l *index.Location) { l.ID[0]++ },
	} {
		lie := l
		change(&lie)
		sealed, err := readRange(t.Context(), store, packName(l.Pack), int64(l.Offset), int64(l.Length))
		must(t, err)
		if _, err := r.openBlob(lie, sealed, nil); !api.Is(err, api.Corrupt) {
			t.Errorf("%+v: %v, want an error of kind corrupt", lie, err)
		}
	}
}

// TestCachedTableIsUsed: a second session reads only the index files that are new, also after a sweep removed index
// files, and forgets the blobs that are in none.
func TestCachedTableIsUsed(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	var reads atomic.Int64
	store.before = func(operation, name string) error {
		if operation == "get" && strings.HasPrefix(name, indexFolder) {
			reads.Add(1)
		}
		return nil
	}
	expect := func(want int64, what string) *Blobs {
		t.Helper()
		reads.Store(0)
		b := loadIndex(t, r)
		if reads.Load() != want {
			t.Errorf("%s: %d index files were read, want %d", what, reads.Load(), want)
		}
		return b
	}
	expect(0, "empty repository")
	writeBlobs(t, r, 0, 10)
	first := store.names(indexFolder)[0]
	compareBlobs(t, expect(1, "new index file"), 0, 10)
	writeBlobs(t, r, 10, 20)
	writeBlobs(t, r, 20, 30)
	compareBlobs(t, expect(1, "two more, one read by the last session"), 0, 30)
	compareBlobs(t, expect(0, "nothing new"), 0, 30)
	must(t, store.Delete(t.Context(), first))
	b := expect(0, "an index file was removed")
	compareBlobs(t, b, 10, 30)
	if ok, err := b.Has(t.Context(), blob.Sum(content(0)), kindOf(0)); ok || err != nil {
		t.Errorf("a blob of the removed index file: %v, %v", ok, err)
	}
}

// TestDamagedTableIsRebuilt: damage of the local table, before or while it is open, costs a new table and no blob.
func TestDamagedTableIsRebuilt(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 300)
	path := filepath.Join(r.options.Cache, r.ID(), tableName)
	damage := func(at int64) {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		must(t, err)
		var b [1]byte
		_, err = f.ReadAt(b[:], at)
		must(t, err)
		b[0] ^= 1
		_, err = f.WriteAt(b[:], at)
		must(t, err)
		must(t, f.Close())
	}
	for _, at := range []int64{20, 5000, 9000} {
		must(t, loadIndex(t, r).Close())
		damage(at)
		compareBlobs(t, loadIndex(t, r), 0, 300) // damaged before
		damage(at)
		writeBlobs(t, openRepository(t, store), 400+int(at), 401+int(at)) // on another node
		compareBlobs(t, loadIndex(t, r), 0, 300)                          // damaged before the table grows
		b := loadIndex(t, r)
		b.limit = 10
		damage(at)
		w := newWriter(t, b, WriterOptions{PackSize: 5000})
		addBlobs(t, w, 290, 330) // damaged while open: the lookups or the merge find the damage
		must(t, w.Flush(t.Context()))
		must(t, w.Close())
		compareBlobs(t, b, 0, 330)
	}
}

// TestHiddenPackIsUnknown: a Writer stores blobs again that only a hidden pack has.
func TestHiddenPackIsUnknown(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 3)
	name := store.names(indexFolder)[0]
	id, err := blob.Parse(name[len(indexFolder):])
	must(t, err)
	var hidden index.FileBuilder
	must(t, scanIndexFile(r, store, id, func(p index.Pack) error {
		p.Hidden = true
		hidden.Add(p)
		return nil
	}))
	must(t, store.Delete(t.Context(), name))
	_, err = r.saveFile(t.Context(), indexFolder, hidden.Bytes())
	must(t, err)
	w := newWriter(t, loadIndex(t, r), WriterOptions{})
	addBlobs(t, w, 0, 3)
	must(t, w.Flush(t.Context()))
	if n := w.Stats().NewBlobs; n != 3 {
		t.Errorf("%d blobs were stored, want 3", n)
	}
	must(t, w.Close())
}

// TestVanishedIndexFileIsNoError: a sweep that replaces index files while LoadIndex reads makes LoadIndex list again.
func TestVanishedIndexFileIsNoError(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 10)
	old := store.names(indexFolder)[0]
	body := store.objects[old].body
	store.before = func(operation, name string) error {
		if operation == "get" && name == old {
			plain, err := r.key.Open(body)
			must(t, err)
			sealed := r.key.Seal(nil, plain)
			must(t, store.Put(t.Context(), indexFolder+blob.Sum(sealed).String(), sealed))
			return store.Delete(t.Context(), old)
		}
		return nil
	}
	compareBlobs(t, loadIndex(t, openRepository(t, store)), 0, 10)
}

// TestIndexIsCurrentUntilAFileVanishes: an index file of another session more changes nothing; a file that the session
// read or wrote and that no longer exists is noticed, also after the table was built again without the file.
func TestIndexIsCurrentUntilAFileVanishes(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	isCurrent := func(b *Blobs, want bool, when string) {
		t.Helper()
		if current, err := b.IsCurrent(t.Context()); err != nil || current != want {
			t.Errorf("%s: the index is current: %v, %v", when, current, err)
		}
	}
	b := loadIndex(t, r)
	isCurrent(b, true, "an empty repository")
	writeBlobs(t, openRepository(t, store), 0, 10)
	isCurrent(b, true, "a file more")
	read := store.names(indexFolder)
	b = loadIndex(t, r)
	w := newWriter(t, b, WriterOptions{})
	addBlobs(t, w, 10, 20)
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	isCurrent(b, true, "a file written")
	files := store.names(indexFolder) // the written one first: a new table has all files
	slices.SortFunc(files, func(a, _ string) int {
		if slices.Contains(read, a) {
			return 1
		}
		return -1
	})
	for _, name := range files {
		o := store.objects[name]
		must(t, store.Delete(t.Context(), name))
		isCurrent(b, false, "a file less")
		if slices.Contains(read, name) {
			must(t, b.replaceDamaged(t.Context(), b.table))
			isCurrent(b, false, "after the table was built again")
		}
		must(t, store.Put(t.Context(), name, o.body))
		isCurrent(b, true, "the file is back")
	}
	store.before = func(string, string) error { return api.Errorf(api.Unavailable, "no answer") }
	if _, err := b.IsCurrent(t.Context()); !api.Is(err, api.Unavailable) {
		t.Errorf("%v, want an error of kind unavailable", err)
	}
	store.before = nil
}
