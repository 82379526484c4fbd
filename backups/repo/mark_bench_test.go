package repo

import (
	"context"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/block/suite"
)

// listedPacks is a store whose list has packs without content, too.
type listedPacks struct {
	target.Store
	packs []blob.ID
}

func (s *listedPacks) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	if prefix == dataFolder {
		for _, id := range s.packs {
			if err := each(target.Object{Name: packName(id), Size: 16 << 20}); err != nil {
				return err
			}
		}
	}
	return s.Store.List(ctx, prefix, each)
}

// BenchmarkMark: a sweep marks what the snapshots of a repository need: 100 volumes, of DROVER_MARK GiB together (10
// TiB by default), in chunks of 2 MiB, with lists of 64 chunks in a folder with a latency of 1 ms. Metrics are the
// time and private memory until the sweep knows the use of each pack, by a node that has no list cached.
func BenchmarkMark(b *testing.B) {
	if !suite.All() {
		b.Skip("only where DROVER_TEST=all")
	}
	const volumes, listed, inPack = 100, 64, 8
	chunks := suite.Count(b, "DROVER_MARK", 10<<10, 10<<10) * 512
	inner, err := folder.Open(b.Context(), b.TempDir())
	must(b, err)
	store := &listedPacks{Store: slowStore{inner, time.Millisecond}}
	r := openRepository(b, store)
	blobs := loadIndex(b, r)
	w := newWriter(b, blobs, WriterOptions{})
	random := rand.NewChaCha8([32]byte{2})
	var file index.FileBuilder
	save := func() {
		_, err := r.saveFile(b.Context(), indexFolder, file.Bytes())
		must(b, err)
		file = index.FileBuilder{}
	}
	addTree := func(nodes []tree.Node) blob.ID {
		plain, err := tree.Encode(nodes)
		must(b, err)
		id, _, err := w.Add(b.Context(), blob.Tree, plain)
		must(b, err)
		return id
	}
	var p index.Pack
	endPack := func() {
		_, _ = random.Read(p.ID[:])
		store.packs = append(store.packs, p.ID)
		if file.Full(len(p.Entries)) {
			save()
		}
		file.Add(p)
		p = index.Pack{}
	}
	for v := range volumes {
		var lists, groups []tree.Node
		for range chunks / volumes / listed {
			node := tree.Node{Name: "data", Type: "file", Size: listed << 21}
			for range listed {
				e := pack.Entry{Kind: blob.Data, Offset: uint32(len(p.Entries)) << 21, Length: 2 << 20}
				_, _ = random.Read(e.ID[:])
				node.Content = append(node.Content, e.ID)
				if p.Entries = append(p.Entries, e); len(p.Entries) == inPack {
					endPack()
				}
			}
			list := addTree([]tree.Node{node})
			if lists = append(lists, tree.Node{Name: hex4(len(lists)), Type: "dir", Subtree: list}); len(lists) == listed {
				groups = append(groups, tree.Node{Name: hex4(len(groups)), Type: "dir", Subtree: addTree(lists)})
				lists = nil
			}
		}
		if len(lists) > 0 {
			groups = append(groups, tree.Node{Name: hex4(len(groups)), Type: "dir", Subtree: addTree(lists)})
		}
		root := addTree(groups)
		_, err := r.SaveSnapshot(b.Context(), Snapshot{Time: time.Unix(1_700_000_000, int64(v)), Tree: &root,
			Paths: []string{"/volumes/pvc-" + strconv.Itoa(v)}, Hostname: "node-1", Username: "drover"})
		must(b, err)
	}
	endPack()
	save()
	must(b, w.Flush(b.Context()))
	must(b, w.Close())
	must(b, blobs.Close())
	for b.Loop() {
		r.options.Cache = b.TempDir()
		r.openCache()
		must(b, r.withSession(b.Context(), func(lock *Lock) error {
			stop, begin, start := memoryPeak(b), processorSeconds(b), time.Now()
			s := &sweep{r: r, lock: lock}
			v, err := s.view(lock.Context())
			if err != nil {
				return err
			}
			b.ReportMetric(time.Since(start).Seconds(), "s-mark")
			b.ReportMetric(processorSeconds(b)-begin, "cpu-s-mark")
			b.ReportMetric(stop(), "MiB-mark")
			b.ReportMetric(float64(v.packs.countListed()), "packs")
			v.close(&err)
			return err
		}))
	}
}

// hex4 is a number of four hexadecimal digits.
func hex4(n int) string {
	digits := strconv.FormatInt(int64(n), 16)
	return strings.Repeat("0", 4-len(digits)) + digits
}
