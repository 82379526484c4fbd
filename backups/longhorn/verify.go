package longhorn

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/time/rate"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// verifyMemory bounds the buffers of a verification, in bytes; a single block of the largest takes as much.
const verifyMemory = 32 << 20

// VerifyOptions say which blocks Verify reads.
type VerifyOptions struct {
	// Mark is left at the chunks that were read. Chunks with the mark are not read; with mark 0, those with a known
	// digest.
	Mark uint64
	Rate *rate.Limiter // of bytes; nil: no limit. The burst is at least a block
	Most int64         // bytes, after which Verify ends early; 0: no bound
}

// VerifyStats tell the result of Verify.
type VerifyStats struct {
	Blocks  int64 // that were read, or chunks of the backing image
	Bytes   int64
	Damaged []string // names of blocks that the store damaged or lost
	Done    bool     // all blocks were read
}

// verification is one call of Verify.
type verification struct {
	*Opened
	options VerifyOptions

	mu    sync.Mutex
	stats VerifyStats
}

// Verify reads blocks and compares their bytes with the checksums, and notes the digests of their chunks. An error says
// nothing about the blocks.
func (o *Opened) Verify(ctx context.Context, options VerifyOptions) (VerifyStats, error) {
	ctx, cancel := o.withEnd(ctx)
	defer cancel()
	v := &verification{Opened: o, options: options}
	err := o.readParts(ctx, verifyMemory, options.Rate, v.skips, v.part)
	if err == nil && len(v.stats.Damaged) > 0 {
		err = o.confirm(ctx)
	}
	slices.Sort(v.stats.Damaged)
	v.stats.Damaged = slices.Compact(v.stats.Damaged)
	v.stats.Done = !v.isFull()
	return v.stats, err
}

func (v *verification) isFull() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.options.Most > 0 && v.stats.Bytes >= v.options.Most
}

// skips reports whether nothing of a range is to be read.
func (v *verification) skips(off, n int64) bool {
	if v.isFull() {
		return true
	}
	if v.digests == nil {
		return false
	}
	for c := off / block.ChunkSize; c*block.ChunkSize < off+n; c++ {
		k, zeros, err := v.keyOf(c)
		if err != nil {
			return false // the read tells why
		}
		e, known := v.digests.Find(k)
		if !known && v.options.Mark == 0 {
			_, known = v.digest(c) // of a local image
		}
		if !zeros && (!known || v.options.Mark != 0 && e.Mark != v.options.Mark) {
			return false
		}
	}
	return true
}

// part verifies a range.
func (v *verification) part(ctx context.Context, off int64, buffer []byte) error {
	zeros, err := v.readPart(ctx, off, buffer, v.options.Mark)
	if api.Is(err, api.Corrupt) { // a network may damage bytes, too
		zeros, err = v.readPart(ctx, off, buffer, v.options.Mark)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case api.Is(err, api.Corrupt):
		if len(v.stats.Damaged) == damagedLimit {
			return err
		}
		v.stats.Damaged = append(v.stats.Damaged, v.nameOf(off))
		return nil
	case err == nil && !zeros: // damaged blocks do not end the step, because the next one reads them again
		v.stats.Blocks++
		v.stats.Bytes += int64(len(buffer))
	}
	return err
}

// nameOf names a range of eachPart.
func (o *Opened) nameOf(off int64) string {
	if place := off / o.blocks.blockSize; o.blocks.has(place) {
		if sum, err := o.blocks.sum(place); err == nil {
			return sum
		}
	}
	return fmt.Sprintf("backing image at offset %d", off)
}
