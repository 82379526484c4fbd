package longhorn

import (
	"context"
	"crypto/sha256"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Bounds of what a restore reads at once.
const (
	restoreMemory = 128 << 20 // bytes; a block needs room for its object and for its bytes
	mostReaders   = 16
	damagedLimit  = 1 << 20 // chunks that a restore lists
)

// restore is one restore of an open backup.
type restore struct {
	o      *Opened
	sink   block.Sink
	skip   func(chunk int64) bool // nil: no chunk
	intact bool                   // damaged chunks are left out

	mu      sync.Mutex
	damaged []int64 // chunks
}

// Restore implements block.Backup.
func (o *Opened) Restore(ctx context.Context, sink block.Sink) error {
	return (&restore{o: o, sink: sink}).run(ctx)
}

// RestoreIntact implements block.IntactBackup.
func (o *Opened) RestoreIntact(ctx context.Context, sink block.Sink, skip func(chunk int64) bool) ([]int64, error) {
	r := &restore{o: o, sink: sink, skip: skip, intact: true}
	if err := r.run(ctx); err != nil {
		return nil, err
	}
	slices.Sort(r.damaged)
	return r.damaged, nil
}

// run reads several blocks at once.
func (r *restore) run(ctx context.Context) error {
	o := r.o
	o.done.Store(0)
	o.total.Store(0)
	if err := o.eachPart(func(_, n int64) error { o.total.Add(n); return nil }); err != nil {
		return err
	}
	ctx, cancel := o.withEnd(ctx)
	defer cancel()
	err := o.readParts(ctx, restoreMemory, nil, func(off, n int64) bool {
		if r.skips(off, n) {
			o.done.Add(n)
			return true
		}
		return false
	}, r.part)
	if len(r.damaged) > 0 && err == nil {
		err = o.confirm(ctx)
	}
	if err != nil {
		return err
	}
	return r.sink.Sync(ctx)
}

// withEnd returns a context that ends with ctx, and with the use of the backup.
func (o *Opened) withEnd(ctx context.Context) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.ctx, func() { end(context.Cause(o.ctx)) })
	return ctx, func() {
		stop()
		end(nil)
	}
}

// readParts calls read for the ranges of eachPart that skip does not report, several at once, each with a buffer for
// the bytes. memory bounds the buffers; limit the bytes for each second, unless nil.
func (o *Opened) readParts(ctx context.Context, memory int64, limit *rate.Limiter,
	skip func(off, n int64) bool,
	read func(ctx context.Context, off int64, buffer []byte) error) error {
	blockSize := o.blocks.blockSize
	readers := int(min(max(memory/(2*blockSize), 1), mostReaders))
	group, work := errgroup.WithContext(ctx)
	group.SetLimit(readers)
	walked := o.eachPart(func(off, n int64) error {
		if skip(off, n) {
			return work.Err()
		}
		group.Go(func() error {
			if limit != nil { // before the memory, which others wait for
				if err := limit.WaitN(work, int(n)); err != nil {
					return err
				}
			}
			release, err := o.reads.Reserve(work, 2*blockSize)
			if err != nil {
				return err
			}
			defer release()
			return read(work, off, block.AlignedBuffer(int(blockSize))[:n])
		})
		return work.Err()
	})
	err := group.Wait()
	if o.ctx.Err() != nil { // AfterFunc of withEnd may be late
		return context.Cause(o.ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		err = walked
	}
	return err
}

// skips reports whether no chunk of a range is wanted.
func (r *restore) skips(off, n int64) bool {
	for c := off / block.ChunkSize; c*block.ChunkSize < off+n; c++ {
		if r.skip == nil || !r.skip(c) {
			return false
		}
	}
	return true
}

// part restores a range of eachPart.
func (r *restore) part(ctx context.Context, off int64, buffer []byte) (err error) {
	o := r.o
	zeros, err := o.readPart(ctx, off, buffer, 0)
	switch {
	case api.Is(err, api.Corrupt) && r.intact:
		return r.leaveOut(off, int64(len(buffer)), err)
	case api.Is(err, api.Corrupt):
		if gone := o.confirm(ctx); gone != nil {
			return gone
		}
		return err
	case err != nil:
		return err
	}
	if !zeros { // other bytes of the sink read as zeros
		if err := r.write(buffer, off); err != nil {
			return err
		}
	}
	o.done.Add(int64(len(buffer)))
	return nil
}

// leaveOut counts the chunks of a range as damaged, because of err.
func (r *restore) leaveOut(off, n int64, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := off / block.ChunkSize; c*block.ChunkSize < off+n; c++ {
		r.damaged = append(r.damaged, c)
	}
	if len(r.damaged) > damagedLimit {
		return api.Errorf(api.Corrupt, "%s: has more than %d damaged chunks: %w", r.o.object, damagedLimit, err)
	}
	return nil
}

// write writes the chunks of a range that are not zeros, so that the layer of the restore is the one that Digests
// tells.
func (r *restore) write(b []byte, off int64) (err error) {
	to, takes := r.sink.(block.DigestSink)
	for chunk := range slices.Chunk(b, block.ChunkSize) {
		switch {
		case isZero(chunk):
		case takes:
			err = to.WriteChunk(chunk, off, sha256.Sum256(chunk))
		default:
			_, err = r.sink.WriteAt(chunk, off)
		}
		if api.Is(err, api.Corrupt) && r.intact { // the sink wants other bytes
			err = r.leaveOut(off, int64(len(chunk)), err)
		}
		if err != nil {
			return err
		}
		off += int64(len(chunk))
	}
	return nil
}

// confirm returns an error of kind Unavailable if the store lacks the description of the backup, too: the folder of a
// share that was unmounted has neither, and a store without the blocks alone has damage.
func (o *Opened) confirm(ctx context.Context) error {
	_, err := o.store.Stat(ctx, o.cfg)
	if api.Is(err, api.NotFound) {
		return api.Errorf(api.Unavailable, "%s: the store has the backup no more, or cannot be read: %w", o.object, err)
	}
	return err
}
