package longhorn

import (
	"context"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

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
	o, blockSize := r.o, r.o.blocks.blockSize
	o.done.Store(0)
	o.total.Store(0)
	if err := o.eachPart(func(_, n int64) error { o.total.Add(n); return nil }); err != nil {
		return err
	}
	readers := int(min(max(restoreMemory/(2*blockSize), 1), mostReaders))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(o.ctx, func() { cancel(context.Cause(o.ctx)) })()
	group, work := errgroup.WithContext(ctx)
	group.SetLimit(readers)
	walked := o.eachPart(func(off, n int64) error {
		if r.skips(off, n) {
			o.done.Add(n)
			return work.Err()
		}
		group.Go(func() error {
			release, err := o.reads.Reserve(work, 2*blockSize)
			if err != nil {
				return err
			}
			defer release()
			return r.part(work, off, block.AlignedBuffer(int(blockSize))[:n])
		})
		return work.Err()
	})
	err := group.Wait()
	if o.ctx.Err() != nil { // AfterFunc may be late
		return context.Cause(o.ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		err = walked
	}
	if len(r.damaged) > 0 && err == nil {
		err = o.confirm(ctx)
	}
	if err != nil {
		return err
	}
	return r.sink.Sync(ctx)
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
	o, zeros := r.o, false
	if place := off / o.blocks.blockSize; o.blocks.has(place) {
		zeros, err = o.read(ctx, place, buffer)
	} else {
		err = o.readBase(buffer, off)
	}
	switch {
	case api.Is(err, api.Corrupt) && r.intact:
		r.mu.Lock()
		defer r.mu.Unlock()
		for c := off / block.ChunkSize; c*block.ChunkSize < off+int64(len(buffer)); c++ {
			r.damaged = append(r.damaged, c)
		}
		if len(r.damaged) > damagedLimit {
			return api.Errorf(api.Corrupt, "%s: has more than %d damaged chunks: %w", o.object, damagedLimit, err)
		}
		return nil
	case api.Is(err, api.Corrupt):
		if gone := o.confirm(ctx); gone != nil {
			return gone
		}
		return err
	case err != nil:
		return err
	}
	if !zeros { // other bytes of the sink read as zeros
		if _, err := r.sink.WriteAt(buffer, off); err != nil {
			return err
		}
	}
	o.done.Add(int64(len(buffer)))
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
