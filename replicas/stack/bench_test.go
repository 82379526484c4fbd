package stack

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

// keep runs total requests on the loop, at most depth at a time. start begins the request of a slot and calls next on
// its completion.
func keep(loop ring, depth, total int, start func(slot int, next func())) {
	done := make(chan struct{})
	left, begun := total, 0
	var nexts []func()
	for i := range depth {
		nexts = append(nexts, func() {
			left--
			if left == 0 {
				close(done)
			}
			if begun < total {
				begun++
				start(i, nexts[i])
			}
		})
	}
	loop.Post(func() {
		for i := range min(depth, total) {
			begun++
			start(i, nexts[i])
		}
	})
	<-done
}

// BenchmarkSubmit compares a replica with the plain file below, on the same loop: 4 KiB at random offsets.
func BenchmarkSubmit(b *testing.B) {
	const size = int64(1) << 30
	ctx := context.Background()
	loop := startLoop(b)
	for _, depth := range []int{1, 32} {
		for _, op := range []block.Op{block.OpRead, block.OpWrite} {
			name := fmt.Sprintf("%s-qd%d", map[block.Op]string{block.OpRead: "read", block.OpWrite: "write"}[op], depth)
			d := newDisk(b)
			spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
			if err := d.CreateReplica(ctx, spec); err != nil {
				b.Fatal(err)
			}
			r, err := d.OpenReplica(ctx, spec.UID, loop)
			if err != nil {
				b.Fatal(err)
			}
			big := block.AlignedBuffer(1 << 20)
			fill(big, 7)
			for off := int64(0); off < size; off += 1 << 20 {
				mustIssue(b, loop, r, block.OpWrite, off, 1<<20, big)
			}
			mustIssue(b, loop, r, block.OpFlush, 0, 0, nil)
			rng := rand.New(rand.NewPCG(1, 2))
			bufs := make([][]byte, depth)
			for i := range bufs {
				bufs[i] = block.AlignedBuffer(4096)
			}
			b.Run(name+"/file", func(b *testing.B) {
				fd := int(r.head.Fd())
				ops := make([]uring.Op, depth)
				b.ReportAllocs()
				b.ResetTimer()
				keep(loop, depth, b.N, func(i int, next func()) {
					ops[i].Done = func(*uring.Op, int32) { next() }
					off := rng.Int64N(size>>12) << 12
					if op == block.OpRead {
						loop.Read(&ops[i], fd, bufs[i], off)
					} else {
						loop.Write(&ops[i], fd, bufs[i], off)
					}
				})
			})
			b.Run(name+"/replica", func(b *testing.B) {
				reqs := make([]block.Request, depth)
				b.ReportAllocs()
				b.ResetTimer()
				keep(loop, depth, b.N, func(i int, next func()) {
					reqs[i] = block.Request{Op: op, Off: rng.Int64N(size>>12) << 12, Len: 4096, Buf: bufs[i],
						Done: func(q *block.Request) {
							if q.Err != nil {
								b.Error(q.Err)
							}
							next()
						}}
					r.Submit(&reqs[i])
				})
			})
			if err := r.Close(); err != nil {
				b.Fatal(err)
			}
			os.RemoveAll(d.Root)
		}
	}
}

// TestNoAllocationPerIO counts the allocations of the steady data path: reads and writes over a layer, whole and split.
func TestNoAllocationPerIO(t *testing.T) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	e := make(expect)
	var blocks []int64
	for b := range int64(1024) {
		blocks = append(blocks, b*2)
	}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20,
		Layers: []string{filledLayer(t, d, 8<<20, blocks, 9<<32, e)}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	const depth = 8
	rng := rand.New(rand.NewPCG(1, 2))
	reqs := make([]block.Request, depth)
	nexts := make([]func(), depth)
	for i := range reqs {
		buf := block.AlignedBuffer(32 << 10)
		fill(buf, 5)
		reqs[i].Buf = buf
		reqs[i].Done = func(*block.Request) { nexts[i]() }
	}
	round := func(n int) {
		keep(loop, depth, n, func(i int, next func()) {
			nexts[i] = next
			q := &reqs[i]
			q.Op, q.FUA = []block.Op{block.OpRead, block.OpRead, block.OpWrite}[rng.IntN(3)], rng.IntN(50) == 0
			q.Len = int64(1+rng.IntN(8)) << blockBits
			q.Off = rng.Int64N((8<<20-q.Len)>>blockBits) << blockBits
			q.Buf = q.Buf[:q.Len]
			r.Submit(q)
		})
	}
	round(3000) // fills pools and loads pages
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	round(5000)
	runtime.ReadMemStats(&after)
	// The rounds and the runtime allocate a little, too.
	if n := after.Mallocs - before.Mallocs; n > 1000 {
		t.Errorf("%d allocations in 5000 requests", n)
	}
}
