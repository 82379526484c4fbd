package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/block/suite"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type handle struct {
	id   blob.ID
	kind blob.Kind
}

// randomPacks returns packs of blobs that often share the first eight bytes of the id, or the whole id.
func randomPacks(random *rand.Rand, packs, blobs int) (all []Pack) {
	for range packs {
		var p Pack
		binary.BigEndian.PutUint64(p.ID[:], random.Uint64())
		for range random.IntN(2 * blobs) {
			e := pack.Entry{Kind: blob.Kind(random.IntN(2)), Offset: random.Uint32N(1 << 20),
				Length: 100 + random.Uint32N(1<<20), Plain: random.Uint32N(2) * random.Uint32N(1<<20)}
			prefix := random.Uint64()
			if random.IntN(3) == 0 {
				prefix = uint64(random.IntN(3)) << 62
			}
			binary.BigEndian.PutUint64(e.ID[:], prefix)
			binary.BigEndian.PutUint64(e.ID[8:], random.Uint64N(200))
			p.Entries = append(p.Entries, e)
		}
		all = append(all, p)
	}
	return all
}

// indexFile is an index file of a test.
type indexFile struct {
	id    blob.ID
	packs []Pack
}

// oneFile has the packs in one index file.
func oneFile(packs []Pack) []indexFile { return []indexFile{{blob.ID{7}, packs}} }

// build builds a table of base, without the vanished index files, and of other files.
func build(t testing.TB, folder, name string, base *Table, vanished map[blob.ID]struct{}, runSize int,
	files []indexFile) *Table {
	t.Helper()
	b, err := NewTableBuilder(folder, blob.ID{1}, base, vanished)
	must(t, err)
	b.runSize = runSize
	for _, f := range files {
		add := b.AddFile(f.id)
		for _, p := range f.packs {
			must(t, add(p))
		}
	}
	table, err := b.Finish(name)
	must(t, err)
	must(t, b.Close())
	return table
}

// TestTableEqualsMap: a table that grew in steps, each from several runs and the table before without some of its index
// files, answers as a map of all entries does: every blob has a location from the map, in a pack without a mark if there is
// one, and no other blob is found. The same holds after the file is opened again.
func TestTableEqualsMap(t *testing.T) {
	for seed := range suite.Seeds(t, suite.Count(t, "DROVER_ROUNDS", 20, 300)) {
		random, folder := rand.New(rand.NewPCG(seed, 0)), t.TempDir()
		alive := map[blob.ID][]Pack{}
		var table *Table
		for range 1 + random.IntN(5) {
			vanished := map[blob.ID]struct{}{}
			for id := range alive {
				if random.IntN(3) == 0 {
					vanished[id] = struct{}{}
					delete(alive, id)
				}
			}
			var files []indexFile
			for range random.IntN(5) {
				f := indexFile{packs: randomPacks(random, random.IntN(6), 1+random.IntN(200))}
				binary.BigEndian.PutUint64(f.id[:], random.Uint64())
				for _, packs := range alive {
					if len(packs) > 0 && random.IntN(4) == 0 {
						f.packs = append(f.packs, Pack{ID: packs[0].ID, Damaged: true})
					}
				}
				files = append(files, f)
				alive[f.id] = f.packs
			}
			old := table
			table = build(t, folder, "index", old, vanished, 1+random.IntN(1000), files)
			if old != nil {
				must(t, old.Close())
			}
		}
		opened, err := OpenTable(filepath.Join(folder, "index"), blob.ID{1})
		must(t, err)
		for _, table := range []*Table{table, opened} {
			compareTable(t, random, table, alive)
			must(t, table.Close())
		}
	}
}

// TestVanishedIndexFileTakesOnlyItsPacksAlong: a blob that two packs have is found in the pack that stays, also if both
// index files name the same pack. A pack without an index file stays.
func TestVanishedIndexFileTakesOnlyItsPacksAlong(t *testing.T) {
	entry := func(id byte) pack.Entry { return pack.Entry{ID: blob.ID{id}, Length: 100} }
	folder := t.TempDir()
	first := build(t, folder, "", nil, nil, 10, []indexFile{
		{blob.ID{1}, []Pack{{ID: blob.ID{101}, Entries: []pack.Entry{entry(1), entry(2)}}, {ID: blob.ID{100},
			Entries: []pack.Entry{entry(9)}}}},
		{blob.ID{2}, []Pack{{ID: blob.ID{102}, Entries: []pack.Entry{entry(2), entry(3)}}, {ID: blob.ID{100},
			Entries: []pack.Entry{entry(9)}}}},
	})
	b, err := NewTableBuilder(folder, blob.ID{1}, first, nil)
	must(t, err)
	must(t, b.Add(Pack{ID: blob.ID{103}, Entries: []pack.Entry{entry(4)}}))
	second, err := b.Finish("")
	must(t, errors.Join(err, b.Close(), first.Close()))
	third := build(t, folder, "", second, map[blob.ID]struct{}{{1}: {}}, 10, nil)
	must(t, second.Close())
	for id, want := range map[byte]byte{1: 0, 2: 102, 3: 102, 4: 103, 9: 100} {
		l, ok, err := third.Find(blob.ID{id}, blob.Data)
		if err != nil || ok != (want != 0) || l.Pack != (blob.ID{want}) {
			t.Errorf("blob %d: found %v in pack %v: %v, want pack %d", id, ok, l.Pack, err, want)
		}
	}
	if files := third.Files(); len(files) != 1 || files[0] != (blob.ID{2}) {
		t.Errorf("the table covers %v, want the second index file alone", files)
	}
	names, err := third.Packs()
	must(t, err)
	if len(names) != 3 {
		t.Errorf("the table has the packs %v, want three", names)
	}
	must(t, third.Close())
}

// TestTableIsOpenUntilItsLastUserCloses: a shared table answers until the last Close, and nobody shares the table
// afterwards.
func TestTableIsOpenUntilItsLastUserCloses(t *testing.T) {
	table := build(t, t.TempDir(), "", nil, nil, 10, oneFile([]Pack{{ID: blob.ID{1},
		Entries: []pack.Entry{{ID: blob.ID{2}, Length: 100}}}}))
	if !table.Share() {
		t.Fatal("an open table is not shared")
	}
	must(t, table.Close())
	if ok, err := table.Has(blob.ID{2}, blob.Data); err != nil || !ok {
		t.Errorf("after the first Close: found %v, %v", ok, err)
	}
	must(t, table.Close())
	if table.Share() {
		t.Error("a closed table is shared")
	}
}

func compareTable(t *testing.T, random *rand.Rand, table *Table, files map[blob.ID][]Pack) {
	t.Helper()
	damaged := map[blob.ID]bool{}
	for _, packs := range files {
		for _, p := range packs {
			damaged[p.ID] = damaged[p.ID] || p.Damaged
		}
	}
	want, entries, good := map[handle]map[Location]bool{}, int64(0), map[handle]bool{}
	for _, packs := range files {
		for _, p := range packs {
			for _, e := range p.Entries {
				h := handle{e.ID, e.Kind}
				if want[h] == nil {
					want[h] = map[Location]bool{}
				}
				want[h][Location{p.ID, e}] = true
				good[h] = good[h] || !damaged[p.ID]
				entries++
			}
		}
	}
	if table.Len() != entries || len(table.Files()) != len(files) {
		t.Errorf("the table has %d entries of %d files, want %d of %d", table.Len(), len(table.Files()), entries, len(files))
	}
	for h, locations := range want {
		l, ok, err := table.Find(h.id, h.kind)
		if err != nil || !ok || !locations[l] || damaged[l.Pack] == good[h] {
			t.Fatalf("blob %v: found %v at %+v: %v", h, ok, l, err)
		}
		all, err := table.FindAll(h.id, h.kind)
		if err != nil || len(all) != min(len(locations), copiesLimit) || all[0] != l {
			t.Fatalf("blob %v: found at %+v, %v; want %d locations", h, all, err, len(locations))
		}
		for i := range all[1:] {
			if damaged[all[i].Pack] && !damaged[all[i+1].Pack] {
				t.Fatalf("blob %v: a damaged pack comes before another one", h)
			}
		}
		other := handle{h.id, 1 - h.kind}
		if random.IntN(2) == 0 {
			other.id[random.IntN(16)]++
		}
		if ok, err := table.Has(other.id, other.kind); err != nil || ok != good[other] {
			t.Fatalf("blob %v: found %v, %v, want %v", other, ok, err, good[other])
		}
	}
}

// TestDamagedTableNeverLies: a table with a changed byte anywhere either refuses to open, or returns errors of kind
// corrupt, or answers right.
func TestDamagedTableNeverLies(t *testing.T) {
	random, folder := rand.New(rand.NewPCG(suite.Seed(t), 0)), t.TempDir()
	packs := randomPacks(random, 10, 60)
	must(t, build(t, folder, "index", nil, nil, 100, oneFile(packs)).Close())
	path := filepath.Join(folder, "index")
	content, err := os.ReadFile(path)
	must(t, err)
	detected := 0
	for at := 0; at < len(content); at += 1 + random.IntN(150) {
		damaged := filepath.Join(folder, "damaged")
		content[at] ^= 1
		must(t, os.WriteFile(damaged, content, 0o600))
		content[at] ^= 1
		table, err := OpenTable(damaged, blob.ID{1})
		if err != nil {
			if !api.Is(err, api.Corrupt) {
				t.Fatalf("byte %d: %v, want an error of kind corrupt", at, err)
			}
			detected++
			continue
		}
		failed := false
		for _, p := range packs {
			for _, e := range p.Entries {
				_, ok, err := table.Find(e.ID, e.Kind)
				if failed = failed || err != nil; err != nil && !api.Is(err, api.Corrupt) || err == nil && !ok {
					t.Fatalf("byte %d: found %v, %v", at, ok, err)
				}
			}
		}
		if failed {
			detected++
		}
		must(t, table.Close())
	}
	if detected < len(content)/500 {
		t.Errorf("only %d damages were noticed", detected)
	}
	for n := 0; n < len(content); n += 1000 {
		must(t, os.WriteFile(path, content[:n], 0o600))
		if _, err := OpenTable(path, blob.ID{1}); !api.Is(err, api.Corrupt) {
			t.Errorf("cut to %d bytes: %v, want an error of kind corrupt", n, err)
		}
	}
}

// TestPageOfAnotherTableIsDamage: a page in its place, but of an older table of the repository, is damage. After a loss
// of power, a file system may return such a page.
func TestPageOfAnotherTableIsDamage(t *testing.T) {
	folder := t.TempDir()
	p := Pack{ID: blob.ID{1}, Entries: []pack.Entry{{ID: blob.ID{2}, Length: 100}}}
	must(t, build(t, folder, "old", nil, nil, 10, oneFile([]Pack{p})).Close())
	p.Entries[0].ID[31] = 1
	must(t, build(t, folder, "new", nil, nil, 10, oneFile([]Pack{p})).Close())
	old, err := os.ReadFile(filepath.Join(folder, "old"))
	must(t, err)
	content, err := os.ReadFile(filepath.Join(folder, "new"))
	must(t, err)
	copy(content[pageSize:2*pageSize], old[pageSize:])
	must(t, os.WriteFile(filepath.Join(folder, "new"), content, 0o600))
	table, err := OpenTable(filepath.Join(folder, "new"), blob.ID{1})
	must(t, err)
	if ok, err := table.Has(blob.ID{2}, blob.Data); ok || !api.Is(err, api.Corrupt) {
		t.Errorf("a blob of the old table: found %v, %v, want an error of kind corrupt", ok, err)
	}
	must(t, table.Close())
}

// TestTableOfAnotherRepositoryIsRefused: a cache folder that got mixed up leads to no answer.
func TestTableOfAnotherRepositoryIsRefused(t *testing.T) {
	folder := t.TempDir()
	must(t, build(t, folder, "index", nil, nil, 10, nil).Close())
	if _, err := OpenTable(filepath.Join(folder, "index"), blob.ID{2}); !api.Is(err, api.Corrupt) {
		t.Errorf("%v, want an error of kind corrupt", err)
	}
	if _, err := OpenTable(filepath.Join(folder, "none"), blob.ID{2}); !api.Is(err, api.NotFound) {
		t.Errorf("a missing file: %v, want an error of kind not found", err)
	}
}

// TestBuildersShareAFolder: while a builder makes the named table, a second builder makes a table without a name; both
// work, no temporary file is left, and a builder takes the file over that a dead process left.
func TestBuildersShareAFolder(t *testing.T) {
	folder := t.TempDir()
	must(t, os.WriteFile(filepath.Join(folder, "index.new"), []byte("left by a dead process"), 0o600))
	packs := randomPacks(rand.New(rand.NewPCG(suite.Seed(t), 0)), 3, 50)
	held, err := lockedFile(filepath.Join(folder, "index.new"))
	must(t, err)
	private := build(t, folder, "index", nil, nil, 10, oneFile(packs))
	if _, err := OpenTable(filepath.Join(folder, "index"), blob.ID{1}); !api.Is(err, api.NotFound) {
		t.Errorf("a builder without the lock made the named table: %v", err)
	}
	must(t, held.Close())
	renamed, err := os.Open(filepath.Join(folder, "index.new"))
	must(t, err)
	named := build(t, folder, "index", private, nil, 10, nil)
	if named.Len() != private.Len() || named.Len() == 0 {
		t.Errorf("the tables have %d and %d blobs", named.Len(), private.Len())
	}
	must(t, private.Close())
	must(t, named.Close())
	must(t, os.WriteFile(filepath.Join(folder, "index.new"), nil, 0o600)) // of a third builder
	if lockNamed(renamed, filepath.Join(folder, "index.new")) {
		t.Error("a builder locked a file that another builder had renamed to the table")
	}
	must(t, renamed.Close())
	must(t, os.Remove(filepath.Join(folder, "index.new")))
	left, err := os.ReadDir(folder)
	must(t, err)
	if len(left) != 1 || left[0].Name() != "index" {
		t.Errorf("the folder has %v, want the table alone", left)
	}
}

// BenchmarkTable: build from packs of 16 blobs, then lookups; half of the lookups find a blob. Five million blobs are
// those of a repository of 10 TiB.
func BenchmarkTable(b *testing.B) {
	for _, n := range []int{1_000_000, 5_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			if n > 1_000_000 && !suite.All() {
				b.Skip("only where DROVER_TEST=all")
			}
			random := rand.New(rand.NewPCG(1, 1))
			builder, err := NewTableBuilder(b.TempDir(), blob.ID{1}, nil, nil)
			must(b, err)
			start, ids := time.Now(), make([]blob.ID, 0, 4096)
			p := Pack{Entries: make([]pack.Entry, 16)}
			for i := range n / 16 {
				for j := range p.Entries {
					id := &p.Entries[j].ID
					for k := range 4 {
						binary.LittleEndian.PutUint64(id[8*k:], random.Uint64())
					}
					p.Entries[j].Length = 2 << 20
					if i%(n/16/4096) == 0 && j == 0 {
						ids = append(ids, *id)
					}
				}
				must(b, builder.Add(p))
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			table, err := builder.Finish("index")
			must(b, err)
			must(b, builder.Close())
			built := time.Since(start)
			runtime.GC()
			runtime.ReadMemStats(&after)
			i := 0
			for b.Loop() {
				id := ids[i/2%len(ids)]
				id[31] ^= byte(i % 2)
				if ok, err := table.Has(id, blob.Data); err != nil || ok != (i%2 == 0) {
					b.Fatal(ok, err)
				}
				i++
			}
			b.ReportMetric(built.Seconds(), "s/build")
			b.ReportMetric(float64(before.Sys)/(1<<20), "MiB-building")
			b.ReportMetric(float64(after.HeapAlloc)/(1<<20), "MiB-resident")
			must(b, table.Close())
		})
	}
}

// TestMarkedPackIsTheLastChoice: a blob of a marked pack counts as missing, unless another pack has it, which is the
// better choice then. The order of packs and marks does not matter: also an index file that is newer than the table
// marks a pack that the table has, and a table keeps the mark of a pack that comes later.
func TestMarkedPackIsTheLastChoice(t *testing.T) {
	entry := func(n byte) pack.Entry { return pack.Entry{ID: blob.ID{n}, Length: 100, Offset: uint32(n)} }
	damaged := Pack{ID: blob.ID{1}, Entries: []pack.Entry{entry(1), entry(2)}}
	good := Pack{ID: blob.ID{2}, Entries: []pack.Entry{entry(2)}}
	mark := Pack{ID: blob.ID{1}, Damaged: true}
	for i, steps := range [][][]Pack{{{damaged, good, mark}}, {{mark, good, damaged}}, {{damaged}, {mark}, {good}},
		{{good, damaged}, {mark}}, {{damaged, mark}, {good}}, {{mark}, {damaged}, {good}}} {
		table := buildSteps(t, steps)
		if has, err := table.Has(blob.ID{1}, blob.Data); has || err != nil {
			t.Errorf("case %d: the table has a blob of a marked pack: %v, %v", i, has, err)
		}
		if has, err := table.Has(blob.ID{2}, blob.Data); !has || err != nil {
			t.Errorf("case %d: the table lacks a blob of another pack: %v, %v", i, has, err)
		}
		all, err := table.FindAll(blob.ID{2}, blob.Data)
		if err != nil || len(all) != 2 || all[0].Pack != good.ID || all[1].Pack != damaged.ID {
			t.Errorf("case %d: found at %+v, %v; want the good pack first", i, all, err)
		}
		must(t, table.Close())
	}
}

// buildSteps builds a table of the index files 0, 1, 2 and so on, one after the other.
func buildSteps(t *testing.T, steps [][]Pack) (table *Table) {
	t.Helper()
	folder := t.TempDir()
	for i, packs := range steps {
		old := table
		table = build(t, folder, "index", old, nil, 1000, []indexFile{{blob.ID{byte(i)}, packs}})
		if old != nil {
			must(t, old.Close())
		}
	}
	return table
}

// TestMarkGoesWithItsLastIndexFile: a mark that two index files have stays until both vanished.
func TestMarkGoesWithItsLastIndexFile(t *testing.T) {
	mark := Pack{ID: blob.ID{1}, Damaged: true}
	table := buildSteps(t, [][]Pack{{{ID: mark.ID, Entries: []pack.Entry{{ID: blob.ID{9}, Length: 100}}}}, {mark}, {mark}})
	for _, vanished := range []byte{1, 2} {
		next := build(t, t.TempDir(), "", table, map[blob.ID]struct{}{{vanished}: {}}, 10, nil)
		must(t, table.Close())
		table = next
		if has, err := table.Has(blob.ID{9}, blob.Data); has != (vanished == 2) || err != nil {
			t.Errorf("without index file %d: the table has the blob: %v, %v", vanished, has, err)
		}
	}
	must(t, table.Close())
}
