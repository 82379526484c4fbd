package restore

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// keptSegments bounds the segments in memory, of 8 KiB each, or 64 KiB if all chunks have fragments.
const keptSegments = 64

// segmentCache keeps the segments that were read last.
type segmentCache struct {
	mu    sync.Mutex
	known map[int64][]manifest.Chunk
	order []int64 // of the additions
}

func (s *segmentCache) get(segment int64) []manifest.Chunk {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[segment]
}

func (s *segmentCache) add(segment int64, chunks []manifest.Chunk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil {
		s.known = map[int64][]manifest.Chunk{}
	}
	if s.known[segment] != nil {
		return
	}
	if len(s.order) == keptSegments {
		delete(s.known, s.order[0])
		s.order = s.order[1:]
	}
	s.known[segment], s.order = chunks, append(s.order, segment)
}

// groupsAtOnce are read at once, because the time until a restoring volume can be read is mostly that of requests.
const groupsAtOnce = 8

// Digests implements block.ChunkedBackup.
func (o *backup) Digests(ctx context.Context, each func(chunk int64, sum [32]byte)) error {
	return o.inSession(repo.UrgentContext(ctx), func(ctx context.Context) error {
		const step = groupsAtOnce * manifest.GroupSegments
		segments := manifest.Segments(o.manifest.Size)
		for first := int64(0); first < segments; first += step {
			if err := o.someDigests(ctx, first, min(step, segments-first), each); err != nil {
				return api.Errorf(api.KindOf(err), "backup %s: %w", o.name, err)
			}
		}
		return nil
	})
}

// someDigests is Digests for count segments from the first one of a group on.
func (o *backup) someDigests(ctx context.Context, first, count int64, each func(int64, [32]byte)) error {
	var mu sync.Mutex
	read := make([][]manifest.Chunk, count)
	group, ctx := errgroup.WithContext(ctx)
	for from := first; from < first+count; from += manifest.GroupSegments {
		var list []int64
		for s := from; s < min(from+manifest.GroupSegments, first+count); s++ {
			list = append(list, s)
		}
		group.Go(func() error {
			return o.manifest.Segments(ctx, list, func(segment int64, chunks []manifest.Chunk, err error) error {
				if err != nil {
					return lost(err)
				}
				mu.Lock()
				defer mu.Unlock()
				read[segment-first] = chunks
				return nil
			})
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for i, chunks := range read {
		for k := range chunks {
			number := (first+int64(i))*manifest.SegmentChunks + int64(k)
			if n := manifest.ChunkLength(o.manifest.Size, number); chunks[k].Digest != manifest.Zeros(n).Digest {
				each(number, chunks[k].Digest)
			}
		}
	}
	return nil
}

// lost gives the loss of a blob the kind corrupt: the backup exists, and is not whole.
func lost(err error) error {
	if repo.IsDamage(err) {
		return api.Errorf(api.Corrupt, "%w", err)
	}
	return err
}

// ReadChunk implements block.ChunkedBackup.
func (o *backup) ReadChunk(ctx context.Context, chunk int64, buf []byte) error {
	if n := manifest.Chunks(o.manifest.Size); chunk < 0 || chunk >= n {
		return api.Errorf(api.OutOfRange, "backup %s: chunk %d of %d does not exist", o.name, chunk, n)
	}
	err := o.inSession(repo.UrgentContext(ctx), func(ctx context.Context) error { return o.readChunk(ctx, chunk, buf) })
	if err != nil {
		return api.Errorf(api.KindOf(err), "backup %s: chunk %d at offset %d: %w", o.name, chunk, chunk*block.ChunkSize,
			lost(err))
	}
	return nil
}

func (o *backup) readChunk(ctx context.Context, number int64, buf []byte) error {
	n := manifest.ChunkLength(o.manifest.Size, number)
	if int64(len(buf)) != n {
		return api.Errorf(api.Invalid, "%d bytes are asked for, and the chunk has %d", len(buf), n)
	}
	segment := number / manifest.SegmentChunks
	chunks := o.segments.get(segment)
	if chunks == nil {
		err := o.manifest.Segments(ctx, []int64{segment}, func(_ int64, read []manifest.Chunk, err error) error {
			chunks = read
			return err
		})
		if err != nil {
			return err
		}
		o.segments.add(segment, chunks)
	}
	c := &chunks[number%manifest.SegmentChunks]
	if c.Digest == manifest.Zeros(n).Digest {
		clear(buf)
		return nil
	}
	var ids []blob.ID
	var parts []manifest.Part
	for p := range c.Parts(n) {
		ids, parts = append(ids, p.ID), append(parts, p)
	}
	err := o.blobs.ReadMany(ctx, blob.Data, ids, func(i int, plain []byte, err error) error {
		if err == nil && int64(len(plain)) != parts[i].Length {
			err = api.Errorf(api.Corrupt, "data blob %s: %d bytes instead of %d", ids[i], len(plain), parts[i].Length)
		}
		if err == nil {
			copy(buf[parts[i].Offset:], plain)
		}
		return err
	})
	// The id of a single blob is the digest, and was compared.
	if err == nil && len(parts) > 1 && blob.Sum(buf) != c.Digest {
		err = api.Errorf(api.Corrupt, "the fragments do not match the digest of the chunk")
	}
	return err
}

// RestoreIntact implements block.IntactBackup.
func (o *backup) RestoreIntact(ctx context.Context, sink block.Sink, skip func(chunk int64) bool) ([]int64, error) {
	return o.restore(ctx, sink, mover.RestoreOptions{AllowDamaged: true, Skip: skip})
}
