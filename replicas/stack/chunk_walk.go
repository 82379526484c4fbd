package stack

import (
	"context"
	"runtime"
	"sync"

	"drover.io/drover/replicas/stack/format"
)

// eachChunk calls fn for every chunk that is not all holes, from as many goroutines as there are processors. Each gets
// an aligned buffer of a chunk.
func eachChunk(ctx context.Context, kinds *format.Index, fn func(c int64, buf []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int64)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			buf := alignedBuffer(int(chunkSize))
			for c := range work {
				if ctx.Err() != nil {
					continue
				}
				if err := fn(c, buf); err != nil {
					cancel(err)
				}
			}
		})
	}
	for c := range kinds.Chunks() {
		if ctx.Err() != nil {
			break
		}
		work <- c
	}
	close(work)
	wg.Wait()
	return context.Cause(ctx)
}
