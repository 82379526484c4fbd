package index

import (
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
)

// FuzzTable: whatever a file has, with right checksums or not, a table of the file answers or returns errors of kind
// corrupt, also as the base of another table.
func FuzzTable(f *testing.F) {
	folder := f.TempDir()
	must(f, build(f, folder, "index", nil, nil, 100,
		[]indexFile{{blob.ID{1}, randomPacks(rand.New(rand.NewPCG(1, 1)), 6, 60)}, {blob.ID{2}, nil}}).Close())
	content, err := os.ReadFile(filepath.Join(folder, "index"))
	must(f, err)
	f.Add(content, true)
	for _, at := range []int{0, 8, headerSize + len(tableMagic) + idSize, pageSize + 4, pageSize + headerSize + idSize} {
		damaged := append([]byte(nil), content...)
		damaged[at] ^= 0x41
		f.Add(damaged, true)
	}
	for section, at := range map[string]int{"packs": 5, "files": 3, "prefixes": 1} {
		damaged := append([]byte(nil), content...)
		for i := headerSize; i < headerSize+100; i++ {
			damaged[max(len(damaged)-at*pageSize, 0)+i] ^= byte(len(section))
		}
		f.Add(damaged, true)
	}
	f.Add(content[:2*pageSize], true)
	f.Add(content, false)
	f.Fuzz(func(t *testing.T, content []byte, repair bool) {
		if repair {
			for page := content; len(page) >= pageSize; page = page[pageSize:] {
				binary.LittleEndian.PutUint32(page, crc32.Checksum(page[4:pageSize], castagnoli))
			}
		}
		folder := t.TempDir()
		path := filepath.Join(folder, "index")
		must(t, os.WriteFile(path, content, 0o600))
		table, err := OpenTable(path, blob.ID{1})
		if err != nil {
			mustBeCorrupt(t, err)
			return
		}
		var ids []blob.ID
		mustBeCorrupt(t, table.Each(func(r Row) error {
			if len(ids) < 100 {
				ids = append(ids, r.ID)
			}
			return nil
		}))
		for _, id := range ids {
			for kind := range blob.Kinds {
				_, _, err := table.Find(id, kind)
				mustBeCorrupt(t, err)
			}
		}
		_, err = table.Packs()
		mustBeCorrupt(t, err)
		b, err := NewTableBuilder(folder, blob.ID{1}, table, map[blob.ID]struct{}{{1}: {}})
		if mustBeCorrupt(t, err); err == nil {
			must(t, b.Add(Pack{ID: blob.ID{9}, Entries: []pack.Entry{{ID: blob.ID{9}, Length: 100}}}))
			next, err := b.Finish("")
			if mustBeCorrupt(t, err); err == nil {
				must(t, next.Close())
			}
			must(t, b.Close())
		}
		must(t, table.Close())
	})
}

// mustBeCorrupt accepts no error but one of kind corrupt.
func mustBeCorrupt(t *testing.T, err error) {
	t.Helper()
	if err != nil && !api.Is(err, api.Corrupt) {
		t.Fatalf("%v, want an error of kind corrupt", err)
	}
}
