package format

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"drover.io/drover/block/suite"
)

// TestIndexModel compares an index with a plain array, through changes, growth, and runs.
func TestIndexModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 0))
		blocks := int64(2*PageBlocks + 1000)
		x := NewIndex(blocks, 0)
		model := make([]uint16, blocks)
		values := 2 + rng.IntN(300) // from 1 to 16 bits per block
		for i := range 4000 {
			b := rng.Int64N(blocks)
			n := min(1+rng.Int64N(60), blocks-b)
			if i%500 == 0 {
				b, n = 0, blocks
			}
			v := uint16(rng.IntN(values))
			x.Set(b, b+n, v)
			for j := b; j < b+n; j++ {
				model[j] = v
			}
			if i == 2000 {
				grown := blocks + 3000 + rng.Int64N(PageBlocks)
				x.Grow(grown, 7)
				for range grown - blocks {
					model = append(model, 7)
				}
				blocks = grown
			}
		}
		for b := int64(0); b < blocks; {
			v, n := x.Run(b, blocks)
			for j := b; j < b+n; j++ {
				if model[j] != v {
					t.Fatalf("seed %d: block %d is %d, want %d", seed, j, v, model[j])
				}
			}
			if b+n < blocks && model[b+n] == v && (b+n)&(PageBlocks-1) != 0 {
				t.Fatalf("seed %d: the run at %d is too short", seed, b)
			}
			b += n
		}
	}
}

// simulate fills an index of 1 TiB like a guest with writes of 128 KiB at random places, until upTo is written.
func simulate(x *Index, upTo float64, rng *rand.Rand) {
	const run = 32
	order := rng.Perm(PageBlocks / run)
	for p := range x.Packed {
		for _, i := range order[:int(upTo*PageBlocks/run)] {
			x.setInPage(p, i*run, (i+1)*run, FromHead)
		}
	}
}

// TestIndexMemory simulates volumes of 1 TiB and bounds the measured heap and the result of Index.Memory.
func TestIndexMemory(t *testing.T) {
	suite.Slow(t)
	const blocks = int64(1) << 40 >> BlockBits
	for _, c := range []struct {
		name  string
		base  uint16
		upTo  float64
		limit int64
	}{
		{"blank, fully written at random", FromNowhere, 1, 1 << 20},
		{"blank, half written at random", FromNowhere, 0.5, 40 << 20},
		{"image, half written at random", FromLayer, 0.5, 40 << 20},
		{"image, fully written at random", FromLayer, 1, 1 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			before := heap()
			x := NewIndex(blocks, c.base)
			simulate(&x, c.upTo, rng)
			used := heap() - before
			t.Logf("%.2f MiB of heap, %.2f MiB by its own account", float64(used)/(1<<20), float64(x.Memory())/(1<<20))
			if used > c.limit || x.Memory() > c.limit {
				t.Errorf("%d bytes of heap, %d by its own account, limit %d", used, x.Memory(), c.limit)
			}
			runtime.KeepAlive(&x)
		})
	}
	t.Run("three layers and a head, mixed block by block", func(t *testing.T) {
		// The worst case of three snapshots: no two neighbours come from the same layer.
		before := heap()
		x := NewIndex(blocks, FromLayer)
		vals := make([]uint16, PageBlocks)
		for i := range vals {
			vals[i] = FromHead + uint16(i%4)
		}
		x.Load(0, vals)
		for p := 1; p < len(x.Packed); p++ {
			q := *x.Packed[0]
			q.pal, q.cnt, q.words = slices.Clone(q.pal), slices.Clone(q.cnt), slices.Clone(q.words)
			x.Packed[p] = &q
		}
		used := heap() - before
		t.Logf("%.2f MiB of heap", float64(used)/(1<<20))
		if used > 68<<20 {
			t.Errorf("%d bytes of heap", used)
		}
		runtime.KeepAlive(&x)
	})
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func BenchmarkIndexRun(b *testing.B) {
	x := NewIndex(int64(1)<<40>>BlockBits, FromLayer)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1 << 20 {
		at := rng.Int64N(x.Blocks)
		x.Set(at, at+1, FromHead)
	}
	b.ReportAllocs()
	for b.Loop() {
		at := rng.Int64N(x.Blocks - 256)
		for end := at + 256; at < end; {
			_, n := x.Run(at, end)
			at += n
		}
	}
}
