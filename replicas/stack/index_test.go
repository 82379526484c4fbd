package stack

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
)

// TestIndexModel compares an index with a plain array, through changes, growth, and runs.
func TestIndexModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 0))
		blocks := int64(2*pageBlocks + 1000)
		x := newIndex(blocks, 0)
		model := make([]uint16, blocks)
		values := 2 + rng.IntN(300) // from 1 to 16 bits per block
		for i := range 4000 {
			b := rng.Int64N(blocks)
			n := min(1+rng.Int64N(60), blocks-b)
			if i%500 == 0 {
				b, n = 0, blocks
			}
			v := uint16(rng.IntN(values))
			x.set(b, b+n, v)
			for j := b; j < b+n; j++ {
				model[j] = v
			}
			if i == 2000 {
				grown := blocks + 3000 + rng.Int64N(pageBlocks)
				x.grow(grown, 7)
				for range grown - blocks {
					model = append(model, 7)
				}
				blocks = grown
			}
		}
		for b := int64(0); b < blocks; {
			v, n := x.run(b, blocks)
			for j := b; j < b+n; j++ {
				if model[j] != v {
					t.Fatalf("seed %d: block %d is %d, want %d", seed, j, v, model[j])
				}
			}
			if b+n < blocks && model[b+n] == v && (b+n)&(pageBlocks-1) != 0 {
				t.Fatalf("seed %d: the run at %d is too short", seed, b)
			}
			b += n
		}
	}
}

// simulate fills an index of 1 TiB as a guest does that writes 128 KiB at random places, until upTo is written.
func simulate(x *index, upTo float64, rng *rand.Rand) {
	const run = 32
	order := rng.Perm(pageBlocks / run)
	for p := range x.packed {
		for _, i := range order[:int(upTo*pageBlocks/run)] {
			x.setInPage(p, i*run, (i+1)*run, fromHead)
		}
	}
}

// TestIndexMemory simulates volumes of 1 TiB. It measures the heap, and holds index.memory against it.
func TestIndexMemory(t *testing.T) {
	const blocks = int64(1) << 40 >> blockBits
	for _, c := range []struct {
		name  string
		base  uint16
		upTo  float64
		limit int64
	}{
		{"blank, fully written at random", fromNowhere, 1, 1 << 20},
		{"blank, half written at random", fromNowhere, 0.5, 40 << 20},
		{"image, half written at random", fromLayer, 0.5, 40 << 20},
		{"image, fully written at random", fromLayer, 1, 1 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			before := heap()
			x := newIndex(blocks, c.base)
			simulate(&x, c.upTo, rng)
			used := heap() - before
			t.Logf("%.2f MiB of heap, %.2f MiB by its own account", float64(used)/(1<<20), float64(x.memory())/(1<<20))
			if used > c.limit || x.memory() > c.limit {
				t.Errorf("%d bytes of heap, %d by its own account, limit %d", used, x.memory(), c.limit)
			}
			runtime.KeepAlive(&x)
		})
	}
	t.Run("three layers and a head, mixed block by block", func(t *testing.T) {
		// The worst that a chain of three snapshots can do: no two neighbours from the same layer.
		before := heap()
		x := newIndex(blocks, fromLayer)
		vals := make([]uint16, pageBlocks)
		for i := range vals {
			vals[i] = fromHead + uint16(i%4)
		}
		x.load(0, vals)
		for p := 1; p < len(x.packed); p++ {
			q := *x.packed[0]
			q.pal, q.cnt, q.words = slices.Clone(q.pal), slices.Clone(q.cnt), slices.Clone(q.words)
			x.packed[p] = &q
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
	x := newIndex(int64(1)<<40>>blockBits, fromLayer)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1 << 20 {
		at := rng.Int64N(x.blocks)
		x.set(at, at+1, fromHead)
	}
	b.ReportAllocs()
	for b.Loop() {
		at := rng.Int64N(x.blocks - 256)
		for end := at + 256; at < end; {
			_, n := x.run(at, end)
			at += n
		}
	}
}
