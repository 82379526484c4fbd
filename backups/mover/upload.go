package mover

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// upload stores the chunks of a backup, and writes the manifest.
type upload struct {
	src     Source
	o       BackupOptions
	w       *repo.Writer
	base    *manifest.Manifest // nil: none
	builder *manifest.Builder
	buffers chan []byte // one for each worker
	read    atomic.Int64
	added   atomic.Int64
}

// segmentWork is a segment with chunks to store.
type segmentWork struct {
	segment int64
	todo    []int64 // chunks of the source
	chunks  []manifest.Chunk
	left    atomic.Int64 // of todo
}

// run returns the tree of the backup. A group of segments at a time bounds the memory.
func (u *upload) run(ctx context.Context) (root blob.ID, err error) {
	if u.builder, err = manifest.NewBuilder(u.w, u.base, u.src.Size()); err != nil {
		return root, err
	}
	u.buffers = make(chan []byte, u.o.Workers)
	for range u.o.Workers {
		u.buffers <- nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A failed call of group.Go's functions ends workers; the error of the iteration comes after theirs.
	group, workers := errgroup.WithContext(ctx)
	group.SetLimit(u.o.Workers)
	counted := make(chan error, 1)
	go func() { counted <- u.count(ctx) }()
	err = u.storeAll(workers, group)
	if err := errors.Join(group.Wait(), err); err != nil {
		cancel()
		<-counted //nolint:errcheck // the error of the workers counts
		return root, err
	}
	if err := <-counted; err != nil {
		return root, err
	}
	return u.builder.Finish(ctx, u.o.Description)
}

// count counts the bytes to store for the progress, while the workers store.
func (u *upload) count(ctx context.Context) error {
	size := u.src.Size()
	for chunk, err := range u.chunks() {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		u.o.Progress.total.Add(manifest.ChunkLength(size, chunk))
	}
	u.o.Progress.complete.Store(true)
	return nil
}

// storeAll starts the work of all segments.
func (u *upload) storeAll(ctx context.Context, group *errgroup.Group) error {
	var batch []*segmentWork
	for chunk, err := range u.chunks() {
		if err != nil {
			return err
		}
		segment := chunk / manifest.SegmentChunks
		last := len(batch) - 1
		if last >= 0 && batch[last].segment/manifest.GroupSegments != segment/manifest.GroupSegments {
			if err := u.storeBatch(ctx, group, batch); err != nil {
				return err
			}
			batch, last = nil, -1
		}
		if last < 0 || batch[last].segment != segment {
			batch = append(batch, &segmentWork{segment: segment})
			last++
		}
		batch[last].todo = append(batch[last].todo, chunk)
	}
	return u.storeBatch(ctx, group, batch)
}

// chunks are the chunks to store, in ascending order.
func (u *upload) chunks() iter.Seq2[int64, error] {
	return func(yield func(int64, error) bool) {
		first := int64(0) // chunk that the base does not have
		if u.base != nil {
			first = manifest.Chunks(u.base.Size)
			last := int64(-1)
			for _, c := range u.o.Changed {
				if c <= last {
					yield(0, api.Errorf(api.Invalid, "backup: the changed chunks are not in ascending order"))
					return
				}
				if last = c; c < first && !yield(c, nil) {
					return
				}
			}
		}
		u.dataChunks(first, yield)
	}
}

// dataChunks yields the chunks with data, from first on.
func (u *upload) dataChunks(first int64, yield func(int64, error) bool) {
	for off := first * block.ChunkSize; off < u.src.Size(); {
		e, err := u.src.Next(off)
		if err == nil && e.End() <= off {
			err = api.Errorf(api.Other, "backup: the source has an empty extent at %d", off)
		}
		if err != nil {
			yield(0, err)
			return
		}
		off = e.End()
		if e.Kind != block.Data {
			continue
		}
		for c := max(first, e.Off/block.ChunkSize); c*block.ChunkSize < min(off, u.src.Size()); c++ {
			if !yield(c, nil) {
				return
			}
			first = c + 1
		}
	}
}

// storeBatch starts the work of segments of one group, and waits until a worker is free for each chunk.
func (u *upload) storeBatch(ctx context.Context, group *errgroup.Group, batch []*segmentWork) error {
	if err := u.readBase(ctx, batch); err != nil {
		return err
	}
	size := u.src.Size()
	for _, s := range batch {
		s.chunks = manifest.Extend(s.chunks, manifest.SegmentLength(size, s.segment))
		s.left.Store(int64(len(s.todo)))
		for _, c := range s.todo {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			group.Go(func() error { return u.storeChunk(ctx, s, c) })
		}
	}
	return nil
}

// readBase reads the base's chunks of segments.
func (u *upload) readBase(ctx context.Context, batch []*segmentWork) error {
	if u.base == nil {
		return nil
	}
	works := map[int64]*segmentWork{}
	var list []int64
	for _, s := range batch {
		if s.segment < manifest.Segments(u.base.Size) {
			works[s.segment] = s
			list = append(list, s.segment)
		}
	}
	return u.base.Segments(ctx, list, func(segment int64, chunks []manifest.Chunk, err error) error {
		if repo.IsDamage(err) {
			return &manifest.BaseError{Err: err}
		}
		works[segment].chunks = chunks
		return err
	})
}

// storeChunk stores a chunk, and after the last one of a segment writes the segment.
func (u *upload) storeChunk(ctx context.Context, s *segmentWork, c int64) error {
	n := manifest.ChunkLength(u.src.Size(), c)
	place := &s.chunks[c%manifest.SegmentChunks]
	stored, err := u.store(ctx, c, n, *place)
	if err != nil {
		return err
	}
	*place = stored
	u.o.Progress.done.Add(n)
	if s.left.Add(-1) > 0 {
		return nil
	}
	return u.builder.Put(ctx, s.segment, s.chunks)
}

// store returns how chunk c of n bytes is stored now; old is how the base stores the chunk.
func (u *upload) store(ctx context.Context, c, n int64, old manifest.Chunk) (manifest.Chunk, error) {
	sum, known := u.src.Digest(c)
	digest := blob.ID(sum)
	known = known && !u.o.Reread
	if known {
		if digest == old.Digest {
			return old, nil
		}
		if has, err := u.w.Has(ctx, digest, blob.Data); err != nil || has {
			return manifest.Chunk{Digest: digest}, err
		}
	}
	buffer := <-u.buffers // a worker has one, so none waits
	defer func() { u.buffers <- buffer }()
	if buffer == nil {
		buffer = block.AlignedBuffer(block.ChunkSize)
	}
	b := buffer[:n]
	read, err := u.readChunk(ctx, c, b, known)
	if err != nil {
		buffer = nil // a disk that hangs may still write to the memory
		return old, err
	}
	if !known {
		digest = read
	}
	switch zeros := manifest.Zeros(n); {
	case digest == old.Digest:
		return old, nil
	case digest == zeros.Digest:
		return zeros, nil // the builder stores zeros
	case u.o.FragmentSize > 0 && u.base != nil && old.Digest != zeros.Digest:
		return u.storeFragments(ctx, digest, b)
	}
	added, err := u.w.AddKnown(ctx, blob.Data, digest, b)
	u.countAdded(added, len(b))
	return manifest.Chunk{Digest: digest}, err
}

// readChunk reads chunk c into b, and returns its digest unless known.
func (u *upload) readChunk(ctx context.Context, c int64, b []byte, known bool) (digest blob.ID, err error) {
	leave, err := u.o.Writer.Pacer.Enter(ctx)
	if err != nil {
		return digest, err
	}
	defer leave()
	if n, err := u.src.ReadAt(b, c*block.ChunkSize); n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return digest, api.Errorf(api.KindOf(err), "chunk %d: cannot be read: %w", c, err)
	}
	u.read.Add(int64(len(b)))
	if !known {
		digest = blob.Sum(b)
	}
	return digest, nil
}

// storeFragments stores a chunk that has changed, and may change again, in fragments.
func (u *upload) storeFragments(ctx context.Context, digest blob.ID, b []byte) (manifest.Chunk, error) {
	c := manifest.Chunk{Digest: digest, FragmentSize: u.o.FragmentSize}
	for len(b) > 0 {
		n := min(u.o.FragmentSize, len(b))
		id, added, err := u.w.Add(ctx, blob.Data, b[:n])
		if err != nil {
			return c, err
		}
		u.countAdded(added, n)
		c.Fragments = append(c.Fragments, id)
		b = b[n:]
	}
	return c, nil
}

// countAdded counts the n bytes of a blob if the blob is new in the repository.
func (u *upload) countAdded(added bool, n int) {
	if added {
		u.added.Add(int64(n))
	}
}
