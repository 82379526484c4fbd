package format

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/suite"
)

// patchwork makes an index of kinds with so many pages, some of them uniform.
func patchwork(rng *rand.Rand, pages int, uniform float64) Index {
	x := NewIndex(int64(pages)<<PageBits-int64(rng.IntN(PageBlocks)), uint16(block.Hole))
	vals := make([]uint16, PageBlocks)
	for p := range pages {
		same := rng.Float64() < uniform
		vals := vals[:x.PageLen(p)]
		for i := range vals {
			if i == 0 || !same {
				vals[i] = uint16(rng.IntN(int(block.Data) + 1))
			} else {
				vals[i] = vals[0]
			}
		}
		x.Load(p, vals)
	}
	return x
}

// TestMapFile: the file of a map equals the index, with fewer pages than a single write takes, with as many, and with
// more.
func TestMapFile(t *testing.T) {
	t.Parallel()
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	name := filepath.Join(t.TempDir(), "map")
	for _, pages := range []int{1, 2, 63, 64, 65, 129, 200} {
		for _, uniform := range []float64{0, 0.5, 1} {
			x := patchwork(rng, pages, uniform)
			if err := WriteMap(file.OS, name, &x); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(name)
			if err != nil || !bytes.Equal(b, EncodeMap(&x)) {
				t.Fatalf("%d pages: the file and what is in memory differ: %v", pages, err)
			}
			m, err := OpenMap(bytes.NewReader(b), int64(len(b)), x.Blocks<<BlockBits)
			if err != nil {
				t.Fatal(err)
			}
			var kinds [PageBlocks]block.Kind
			for p := range pages {
				if err := m.Load(p, &kinds); err != nil {
					t.Fatal(err)
				}
				for i := range x.PageLen(p) {
					v, _ := x.RunInPage(p, i, i+1)
					if block.Kind(v) != kinds[i] {
						t.Fatalf("%d pages: block %d of page %d is of kind %d, not %d", pages, i, p, kinds[i], v)
					}
				}
			}
		}
	}
}

// BenchmarkMapFile measures the memory to write the map of a fragmented TiB, beside the memory of the index.
func BenchmarkMapFile(b *testing.B) {
	x := patchwork(rand.New(rand.NewPCG(1, 1)), 1<<40/PageSize, 0)
	b.ReportMetric(float64(x.Memory()), "index-bytes")
	b.ReportAllocs()
	for b.Loop() {
		if err := PutMap(nowhere{}, &x); err != nil {
			b.Fatal(err)
		}
	}
}

// nowhere discards writes.
type nowhere struct{ io.WriterAt }

func (nowhere) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
