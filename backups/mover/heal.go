package mover

import (
	"cmp"
	"context"
	"errors"
	"io"
	"iter"
	"syscall"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
)

// Sources yields the sources that may have chunks of a volume or image, at the places of a backup. Each source is open
// until the loop continues. An error stands for a source that may have chunks and cannot be opened.
type Sources func(ctx context.Context, d manifest.Description) iter.Seq2[block.DigestSource, error]

// healedAtOnce is how many chunks Heal looks for in each source, before it opens the sources again.
const healedAtOnce = 1024

// Heal stores lost blobs of chunks again, as far as sources have the chunks, and returns the number of durable blobs,
// also with an error: a chunk or a source could not be read, or the repository did not answer, and a later Heal may
// store more. A fragment is cut out of the chunk. Heal leaves damaged lists of chunks as they are: a full backup of the
// same content writes these lists again. Heal skips snapshots of other programs. Guests go first.
func Heal(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions, sources Sources) (
	healed int64, err error) {
	lock, err := r.Lock(ctx, repo.Shared)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, closeLock(ctx, lock)) }()
	blobs, err := r.LoadIndex(lock.Context())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, blobs.Close()) }()
	o.Lock = lock
	w, err := repo.NewWriter(lock.Context(), blobs, o)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	defer o.Pacer.Begin()()
	h := &healing{w: w, pacer: o.Pacer, sources: sources, missing: map[chunkPlace]bool{}}
	for _, id := range snapshots {
		if err = h.healSnapshot(lock.Context(), r, blobs, id); err != nil {
			break
		}
	}
	if flushErr := w.Flush(lock.Context()); flushErr != nil {
		return 0, errors.Join(err, flushErr)
	}
	return h.healed, errors.Join(err, h.unread)
}

// healing is the state of a Heal.
type healing struct {
	w       *repo.Writer
	pacer   *pace.Pacer
	sources Sources
	missing map[chunkPlace]bool // chunks that no source has there, or can read
	unread  error               // of the first chunk or source that could not be read
	buffer  []byte
	healed  int64
}

// chunkPlace is a chunk at a place of a volume or image. Two volumes may have the same chunk, and a disk may have only
// one of the volumes.
type chunkPlace struct {
	kind   manifest.Kind
	name   string
	number int64
	digest blob.ID
}

// lostChunk is a chunk of which the repository lacks blobs.
type lostChunk struct {
	place  chunkPlace
	length int64
	parts  []manifest.Part // the lost ones
}

// healSnapshot heals a backup.
func (h *healing) healSnapshot(ctx context.Context, r *repo.Repository, blobs *repo.Blobs, id blob.ID) error {
	m, err := openSnapshot(ctx, r, blobs, id)
	if repo.IsDamage(err) || api.Is(err, api.Unsupported) {
		return nil
	} else if err != nil {
		return err
	}
	return h.healBackup(ctx, m)
}

func (h *healing) healBackup(ctx context.Context, m *manifest.Manifest) error {
	var lost []lostChunk
	for segment := range manifest.Segments(m.Size) {
		var chunks []manifest.Chunk
		err := m.Segments(ctx, []int64{segment}, func(_ int64, read []manifest.Chunk, err error) error {
			if repo.IsDamage(err) {
				return nil
			}
			chunks = read
			return err
		})
		if err != nil {
			return err
		}
		for i := range chunks {
			number := segment*manifest.SegmentChunks + int64(i)
			c := lostChunk{chunkPlace{m.Kind, m.Name, number, chunks[i].Digest}, manifest.ChunkLength(m.Size, number), nil}
			if c.parts, err = h.lostParts(ctx, &chunks[i], c.length); err != nil {
				return err
			}
			switch {
			case len(c.parts) == 0 || h.missing[c.place]:
			case c.place.digest == manifest.Zeros(c.length).Digest:
				if err := h.storeLost(ctx, &c, make([]byte, c.length)); err != nil {
					return err
				}
			default:
				lost = append(lost, c)
			}
		}
		if len(lost) >= healedAtOnce {
			if err := h.healLost(ctx, m.Description, lost); err != nil {
				return err
			}
			lost = nil
		}
	}
	return h.healLost(ctx, m.Description, lost)
}

// lostParts are the parts of a chunk that the repository lacks.
func (h *healing) lostParts(ctx context.Context, c *manifest.Chunk, length int64) (lost []manifest.Part, err error) {
	for p := range c.Parts(length) {
		if has, err := h.w.Has(ctx, p.ID, blob.Data); err != nil {
			return nil, err
		} else if !has {
			lost = append(lost, p)
		}
	}
	return lost, nil
}

// healLost looks for chunks of one volume or image in its sources. A chunk is missing if each source lacks the chunk or
// has a bad sector there.
func (h *healing) healLost(ctx context.Context, d manifest.Description, lost []lostChunk) (err error) {
	if len(lost) == 0 {
		return nil
	}
	answered := true
	for src, failure := range h.sources(ctx, d) {
		if failure == nil {
			lost, failure, err = h.takeFrom(ctx, src, lost)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil || len(lost) == 0 {
			return err
		}
		if failure != nil {
			answered = false
			h.noteUnread(failure)
		}
	}
	if answered {
		for i := range lost {
			h.missing[lost[i].place] = true
		}
	}
	return nil
}

func (h *healing) noteUnread(err error) {
	if h.unread == nil {
		h.unread = err
	}
}

// takeFrom stores the chunks that a source has, and returns the other chunks. A bad sector costs the chunk there alone.
// A failure of the source says nothing of the returned chunks.
func (h *healing) takeFrom(ctx context.Context, src block.DigestSource, lost []lostChunk) (left []lostChunk, failure,
	err error) {
	for i := range lost {
		c := &lost[i]
		var b []byte
		b, failure, err = h.readLost(ctx, src, c)
		switch {
		case err != nil:
			return nil, nil, err
		case isBadSector(failure):
			h.noteUnread(failure)
			left = append(left, *c)
		case failure != nil:
			return append(left, lost[i:]...), failure, nil
		case b == nil:
			left = append(left, *c)
		default:
			if err = h.storeLost(ctx, c, b); err != nil {
				return nil, nil, err
			}
		}
	}
	return left, nil, nil
}

// isBadSector reports whether the failure of a read says nothing about other places of the disk. A disk that hangs
// returns no EIO: its calls end with an error of package watched.
func isBadSector(failure error) bool { return errors.Is(failure, syscall.EIO) }

// readLost reads a chunk; nil without a failure: the source has no such chunk.
func (h *healing) readLost(ctx context.Context, src block.DigestSource, c *lostChunk) (b []byte, failure, err error) {
	off := c.place.number * block.ChunkSize
	if off+c.length > src.Size() {
		return nil, nil, nil
	}
	leave, err := h.pacer.Enter(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer leave()
	// The last chunk of an image is shorter than the last chunk of the image's layers.
	sum, known := src.Digest(c.place.number)
	if known && c.length == block.ChunkSize && blob.ID(sum) != c.place.digest {
		return nil, nil, nil
	}
	if h.buffer == nil {
		h.buffer = block.AlignedBuffer(block.ChunkSize)
	}
	b = h.buffer[:c.length]
	n, failure := src.ReadAt(b, off)
	switch {
	case int64(n) == c.length && (failure == nil || errors.Is(failure, io.EOF)):
	case api.Is(failure, api.Corrupt): // damage of the disk, which the scrub reports
		return nil, nil, nil
	default:
		if !isBadSector(failure) {
			h.buffer = nil // a disk that hangs may still write to the memory
		}
		return nil, api.Errorf(api.KindOf(failure), "chunk %d of %s: cannot be read from its disk: %w", c.place.number,
			c.place.name, cmp.Or(failure, io.ErrUnexpectedEOF)), nil
	}
	if blob.Sum(b) != c.place.digest {
		return nil, nil, nil
	}
	return b, nil, nil
}

// storeLost stores the lost parts of a chunk.
func (h *healing) storeLost(ctx context.Context, c *lostChunk, b []byte) error {
	for _, p := range c.parts {
		part := b[p.Offset : p.Offset+p.Length]
		if blob.Sum(part) != p.ID { // the manifest contradicts itself
			continue
		}
		added, err := h.w.AddKnown(ctx, blob.Data, p.ID, part)
		if err != nil {
			return err
		}
		if added {
			h.healed++
		}
	}
	return nil
}
