package index

import (
	"encoding/binary"
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

func build(t testing.TB, folder, name string, base *Table, runSize int, packs []Pack) *Table {
	b, err := NewTableBuilder(folder, blob.ID{1}, base)
	must(t, err)
	b.runSize = runSize
	for _, p := range packs {
		must(t, b.Add(p))
		b.AddFile(p.ID)
	}
	table, err := b.Finish(name)
	must(t, err)
	must(t, b.Close())
	return table
}

// TestTableEqualsMap: a table that grew in steps, each from several runs and the table before, answers as a map of all
// entries does: every blob has a location from the map, and no other blob is found. The same holds after the file is
// opened again.
func TestTableEqualsMap(t *testing.T) {
	for seed := range suite.Seeds(t, suite.Count(t, "DROVER_ROUNDS", 20, 300)) {
		random, folder := rand.New(rand.NewPCG(seed, 0)), t.TempDir()
		want := map[handle]map[Location]bool{}
		var table *Table
		for range 1 + random.IntN(4) {
			packs := randomPacks(random, random.IntN(20), 1+random.IntN(200))
			for _, p := range packs {
				for _, e := range p.Entries {
					h := handle{e.ID, e.Kind}
					if want[h] == nil {
						want[h] = map[Location]bool{}
					}
					want[h][Location{p.ID, e}] = true
				}
			}
			old := table
			table = build(t, folder, "index", old, 1+random.IntN(1000), packs)
			if old != nil {
				must(t, old.Close())
			}
		}
		opened, err := OpenTable(filepath.Join(folder, "index"), blob.ID{1})
		must(t, err)
		if len(opened.Files()) != len(table.Files()) {
			t.Errorf("the opened table covers %d files, want %d", len(opened.Files()), len(table.Files()))
		}
		for _, table := range []*Table{table, opened} {
			compareTable(t, random, table, want)
			must(t, table.Close())
		}
	}
}

func compareTable(t *testing.T, random *rand.Rand, table *Table, want map[handle]map[Location]bool) {
	t.Helper()
	entries := 0
	for _, locations := range want {
		entries += min(len(locations), copiesLimit)
	}
	if table.Len() != int64(entries) {
		t.Errorf("the table has %d entries, want %d", table.Len(), entries)
	}
	for h, locations := range want {
		l, ok, err := table.Find(h.id, h.kind)
		if err != nil || !ok || !locations[l] {
			t.Fatalf("blob %v: found %v at %+v: %v", h, ok, l, err)
		}
		all, err := table.FindAll(h.id, h.kind)
		if err != nil || len(all) != min(len(locations), copiesLimit) || all[0] != l {
			t.Fatalf("blob %v: found at %+v, %v; want %d locations", h, all, err, len(locations))
		}
		other := handle{h.id, 1 - h.kind}
		if random.IntN(2) == 0 {
			other.id[random.IntN(16)]++
		}
		if ok, err := table.Has(other.id, other.kind); err != nil || ok != (want[other] != nil) {
			t.Fatalf("blob %v: found %v, %v, want %v", other, ok, err, want[other] != nil)
		}
	}
}

// TestDamagedTableNeverLies: a table with a changed byte anywhere either refuses to open, or returns errors of kind
// corrupt, or answers right.
func TestDamagedTableNeverLies(t *testing.T) {
	random, folder := rand.New(rand.NewPCG(suite.Seed(t), 0)), t.TempDir()
	packs := randomPacks(random, 10, 60)
	must(t, build(t, folder, "index", nil, 100, packs).Close())
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

// TestTableOfAnotherRepositoryIsRefused: a cache folder that got mixed up leads to no answer.
func TestTableOfAnotherRepositoryIsRefused(t *testing.T) {
	folder := t.TempDir()
	must(t, build(t, folder, "index", nil, 10, nil).Close())
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
	private := build(t, folder, "index", nil, 10, packs)
	if _, err := OpenTable(filepath.Join(folder, "index"), blob.ID{1}); !api.Is(err, api.NotFound) {
		t.Errorf("a builder without the lock made the named table: %v", err)
	}
	must(t, held.Close())
	renamed, err := os.Open(filepath.Join(folder, "index.new"))
	must(t, err)
	named := build(t, folder, "index", private, 10, nil)
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
			builder, err := NewTableBuilder(b.TempDir(), blob.ID{1}, nil)
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
// better choice then. The order of packs and marks does not matter, and a table keeps its marks.
func TestMarkedPackIsTheLastChoice(t *testing.T) {
	entry := func(n byte) pack.Entry { return pack.Entry{ID: blob.ID{n}, Length: 100, Offset: uint32(n)} }
	damaged := Pack{ID: blob.ID{1}, Entries: []pack.Entry{entry(1), entry(2)}}
	good := Pack{ID: blob.ID{2}, Entries: []pack.Entry{entry(2)}}
	mark := Pack{ID: blob.ID{1}, Damaged: true}
	for i, steps := range [][][]Pack{{{damaged, good, mark}}, {{mark, good, damaged}}, {{damaged}, {mark}, {good}},
		{{good, damaged}, {mark}}, {{damaged, mark}, {good}}} {
		folder := t.TempDir()
		var table *Table
		for _, packs := range steps {
			old := table
			table = build(t, folder, "index", old, 1000, packs)
			if old != nil {
				must(t, old.Close())
			}
		}
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
