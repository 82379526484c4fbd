package repo

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"drover.io/drover/backups/repo/blob"
)

// cacheFiles are the files with parts of objects in the cache.
func cacheFiles(t testing.TB, r *Repository) (paths []string) {
	for _, folder := range []string{"trees", "snapshots"} {
		some, err := filepath.Glob(filepath.Join(r.cacheFolder(), folder, "*"))
		must(t, err)
		paths = append(paths, some...)
	}
	return paths
}

// TestSweepReadsTreesAndSnapshotsOnce: a second sweep of the node reads no tree and no snapshot from the store, except
// those that are new. Damage of the cache costs reads, and changes no result.
func TestSweepReadsTreesAndSnapshotsOnce(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	for i := range 3 {
		saveFiles(t, r, 20_000, numbers(100*i, 100*i+50)...)
	}
	sweep := func(what string, want int64) {
		t.Helper()
		var packs, snapshots atomic.Int64
		store.before = func(operation, name string) error {
			switch {
			case operation == "get" && strings.HasPrefix(name, dataFolder):
				packs.Add(1)
			case operation == "get" && strings.HasPrefix(name, snapshotsFolder):
				snapshots.Add(1)
			}
			return nil
		}
		stats := mustSweep(t, sameCache(t, r))
		if stats.DeletedPacks != 0 || stats.CopiedBlobs != 0 {
			t.Fatalf("%s: the sweep changed a repository without garbage: %+v", what, stats)
		}
		if snapshots.Load() != want || (packs.Load() == 0) != (want == 0) {
			t.Errorf("%s: %d snapshots and %d parts of packs were read, want %d snapshots", what, snapshots.Load(), packs.Load(),
				want)
		}
	}
	sweep("first sweep", 3)
	sweep("second sweep", 0)
	saveFiles(t, openRepository(t, store), 20_000, numbers(900, 930)...) // on another node
	sweep("one snapshot more", 1)
	for what, damage := range map[string]func(path string) error{
		"removed": os.Remove,
		"cut":     func(path string) error { return os.Truncate(path, 50) },
		"zeros":   func(path string) error { return os.WriteFile(path, make([]byte, 100_000), 0o600) },
		"changed": func(path string) error {
			body, err := os.ReadFile(path)
			for i := 0; i < len(body); i += 20 {
				body[i] ^= 1
			}
			must(t, err)
			return os.WriteFile(path, body, 0o600)
		},
	} {
		files := cacheFiles(t, r)
		if len(files) < 8 {
			t.Fatalf("the cache has only the files %v", files)
		}
		for _, path := range files {
			must(t, damage(path))
		}
		sweep(what, 4)
		sweep("after: "+what, 0)
	}
	for i := range 3 {
		hasFiles(t, r, numbers(100*i, 100*i+50)...)
	}
}

// TestCacheHasNoPlainText: no file of the cache has a word of a tree or of a snapshot.
func TestCacheHasNoPlainText(t *testing.T) {
	r := newRepository(t, newMemoryStore())
	s := saveFiles(t, r, 20_000, numbers(0, 50)...)
	mustSweep(t, r)
	if nodes, err := loadIndex(t, r).ReadTree(t.Context(), *s.Tree); err != nil || nodes[0].Name != "000000" {
		t.Fatal(nodes, err)
	}
	for _, path := range cacheFiles(t, r) {
		body, err := os.ReadFile(path)
		must(t, err)
		for _, word := range []string{"000000", "content", "tree", "/files"} {
			if strings.Contains(string(body), word) {
				t.Errorf("%s has the word %q", path, word)
			}
		}
	}
}

// TestTreesOfTheCacheAreReadWithoutTheStore: ReadMany and Read take trees that are in the cache from there, and other
// trees from the store.
func TestTreesOfTheCacheAreReadWithoutTheStore(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	s := saveFiles(t, r, 100_000, numbers(0, 200)...)
	b := loadIndex(t, r)
	nodes, err := b.ReadTree(t.Context(), *s.Tree)
	must(t, err)
	reads := countReads(store, dataFolder)
	var ids []blob.ID
	for _, n := range nodes {
		ids = append(ids, n.Subtree)
	}
	read := func() {
		t.Helper()
		got := make([]blob.ID, len(ids))
		must(t, b.ReadMany(t.Context(), blob.Tree, ids, func(place int, plain []byte, err error) error {
			if err == nil {
				got[place] = blob.Sum(plain)
			}
			return err
		}))
		for i := range ids {
			if got[i] != ids[i] {
				t.Errorf("tree %d was not read", i)
			}
		}
	}
	_, err = b.ReadTree(t.Context(), ids[4])
	must(t, err)
	reads.Store(0)
	read()
	if reads.Load() == 0 {
		t.Error("trees were read that no session had read before")
	}
	reads.Store(0)
	read()
	_, err = b.ReadTree(t.Context(), ids[5])
	must(t, err)
	if reads.Load() != 0 {
		t.Errorf("trees were read from the store %d times although the cache has them", reads.Load())
	}
}

// TestCacheHidesNoDamage: the store damages a tree and a snapshot that the cache has whole. Readers do not notice;
// verification and check do. The tree of the cache heals the repository.
func TestCacheHidesNoDamage(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	s := saveFiles(t, r, 20_000, numbers(0, 30)...)
	file, err := r.FindSnapshot(t.Context(), s.ID)
	must(t, err)
	read := func(r *Repository) error {
		_, err := r.LoadSnapshot(t.Context(), file)
		if err == nil {
			_, err = loadIndex(t, r).ReadTree(t.Context(), *s.Tree)
		}
		return err
	}
	must(t, read(r))
	l, ok, err := loadIndex(t, r).Find(t.Context(), *s.Tree, blob.Tree)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	store.change(packName(l.Pack), flip(int(l.Offset)+20))
	whole := store.objects[file.file.Name]
	store.change(file.file.Name, flip(20))
	must(t, read(sameCache(t, r)))

	d, err := sameCache(t, r).Check(t.Context(), WriterOptions{PackSize: 20_000})
	must(t, err)
	if !slices.Contains(d.Objects, file.file.Name) || !slices.Contains(d.Snapshots, s.ID) {
		t.Errorf("a damaged snapshot that the cache has: %+v", d)
	}
	store.objects[file.file.Name] = whole
	d, err = sameCache(t, r).Check(t.Context(), WriterOptions{PackSize: 20_000})
	must(t, err)
	if _, found := d.Blobs[*s.Tree]; !found || !slices.Contains(d.Snapshots, s.ID) {
		t.Errorf("a damaged tree that the cache has: %+v", d)
	}
	stats, err := sameCache(t, r).Verify(t.Context(), VerifyOptions{Until: lastPack, Writer: WriterOptions{PackSize: 20_000}})
	must(t, err)
	if len(stats.Damaged) != 1 || stats.Damaged[0].ID != l.Pack || stats.Copied == 0 {
		t.Errorf("verified: %+v, want damage of pack %s", stats, l.Pack)
	}
	if d := check(t, store); !d.IsZero() {
		t.Errorf("after the verification copied the tree of the cache: %+v", d)
	}
}
