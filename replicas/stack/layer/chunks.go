package layer

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// EachChunk calls fn for every chunk that is not all holes, from as many goroutines as the machine has processors, and
// waits for the goroutines. Each call gets an aligned buffer of a chunk.
func EachChunk(ctx context.Context, kinds *format.Index, fn func(c int64, buf []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int64)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			buf := block.AlignedBuffer(int(chunkSize))
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

// ReadRuns fills buf, all of chunk c, with the blocks of a kind; the other blocks become zeros.
func ReadRuns(h file.Handle, x *format.Index, c int64, buf []byte, value block.Kind) error {
	first := c * chunkBlks
	for b, end := first, first+int64(len(buf))>>blockBits; b < end; {
		v, n := x.Run(b, end)
		part := buf[(b-first)<<blockBits:][:n<<blockBits]
		if block.Kind(v) != value {
			clear(part)
		} else if k, err := h.ReadAt(part, b<<blockBits); k < len(part) {
			return fmt.Errorf("read %d bytes at %d: %w", len(part), b<<blockBits, err)
		}
		b += n
	}
	return nil
}

// VerifyChunk computes the digest of chunk c and compares the digest with sums.
func VerifyChunk(sums file.Handle, c int64, buf []byte) (sum [sumSize]byte, err error) {
	sum = sha256.Sum256(buf)
	var want [sumSize]byte
	if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
		return sum, err
	}
	if sum != want {
		return sum, api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
	}
	return sum, nil
}

// Walk calls fn for every chunk of a layer that is not all holes.
type Walk func(ctx context.Context, kinds *format.Index, fn func(c int64, buf []byte) error) error

// hurryFile, in the folder of a frozen layer, asks the process that computes the digests to skip its pauses.
const hurryFile = "hurry"

// walkGently is EachChunk on the caller's goroutine alone, with long pauses unless a caller waits for the layer.
func (d *Store) walkGently(uid string) Walk {
	return func(ctx context.Context, kinds *format.Index, fn func(c int64, buf []byte) error) error {
		return eachChunkGently(ctx, kinds, func() bool {
			there, err := d.Exists(d.Join(Dir, uid, hurryFile))
			return there && err == nil
		}, fn)
	}
}

// Hurry ends the pauses between the digests of a frozen layer.
func (d *Store) Hurry(uid string) {
	if h, err := d.FS.Open(d.Join(Dir, uid, hurryFile), os.O_RDWR|os.O_CREATE, 0o600); err == nil {
		_ = h.Close() // best effort
	}
}

func eachChunkGently(ctx context.Context, kinds *format.Index, hurry func() bool,
	fn func(c int64, buf []byte) error) error {
	const rest = 2 // pause in multiples of the work
	buf := block.AlignedBuffer(int(chunkSize))
	for c := range kinds.Chunks() {
		began := time.Now()
		if err := fn(c, buf); err != nil {
			return err
		}
		if hurry() {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			continue
		}
		pause := time.NewTimer(rest * time.Since(began))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return context.Cause(ctx)
		}
	}
	return nil
}

// Throttle waits until rate, in bytes per second, allows done bytes since began, or until ctx ends. Zero is no bound.
func Throttle(ctx context.Context, began time.Time, done, rate int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if rate <= 0 {
		return nil
	}
	ahead := time.Duration(float64(done)/float64(rate)*float64(time.Second)) - time.Since(began)
	if ahead <= 0 {
		return nil
	}
	t := time.NewTimer(ahead)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
