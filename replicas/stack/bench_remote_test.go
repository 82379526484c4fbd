package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// BenchmarkReadOfAnotherDisk reads 4 KiB of each chunk of a layer on another disk of the node, for the first time and
// again.
func BenchmarkReadOfAnotherDisk(b *testing.B) {
	const size = 64 * chunkSize
	ctx := context.Background()
	loop := startLoop(b)
	content := make([]byte, size)
	randomBytes(rand.New(rand.NewPCG(1, 1)), content)
	var open, first, again time.Duration
	for range b.N {
		from, d := newDisk(b), newDisk(b)
		fromDisk(d, from)
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
			Layers: []string{wholeLayer(b, from, content)}}
		if err := d.CreateReplica(ctx, spec); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			b.Fatal(err)
		}
		open += time.Since(began)
		fetched, buf := make(chan struct{}, 64), block.AlignedBuffer(int(blockSize))
		r.OnFetched(func() {
			select {
			case fetched <- struct{}{}:
			default:
			}
		})
		pass := func() time.Duration {
			began := time.Now()
			for c := range size / chunkSize {
				for {
					done := make(chan error, 1)
					q := &block.Request{Op: block.OpRead, Off: c*chunkSize + 17*blockSize, Len: blockSize, Buf: buf,
						Done: func(q *block.Request) { done <- q.Err }}
					loop.Post(func() { r.Submit(q) })
					if err := <-done; errors.Is(err, ErrNotFetched) {
						<-fetched
						continue
					} else if err != nil {
						b.Fatal(err)
					}
					break
				}
			}
			return time.Since(began)
		}
		first += pass()
		again += pass()
		if err := errors.Join(r.Close(), d.Close()); err != nil {
			b.Fatal(err)
		}
	}
	per := func(d time.Duration, n int) float64 { return float64(d.Microseconds()) / float64(b.N*n) }
	b.ReportMetric(per(open, 1), "µs/open")
	b.ReportMetric(per(first, int(size/chunkSize)), "µs/first-read")
	b.ReportMetric(per(again, int(size/chunkSize)), "µs/read-again")
}
