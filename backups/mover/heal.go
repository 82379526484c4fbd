package mover

import (
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// FindChunk reads chunk number of a volume or image into b if some disk has a chunk of this digest there. Heal compares
// the bytes with the digest again.
type FindChunk func(ctx context.Context, d manifest.Description, number int64, digest blob.ID, b []byte) (bool, error)

// Heal stores the blobs of chunks again that backups need and that no pack has whole, as far as find finds the chunks,
// and returns the number of blobs. A fragment is cut out of its chunk. Heal leaves damaged lists of chunks as they are:
// a full backup of the same content writes them again. Heal skips snapshots of other programs.
func Heal(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions, find FindChunk) (
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
	h := &healing{w: w, find: find, missing: map[chunkPlace]bool{}, buffer: block.AlignedBuffer(block.ChunkSize)}
	for _, id := range snapshots {
		m, err := openSnapshot(lock.Context(), r, blobs, id)
		if repo.IsDamage(err) || api.Is(err, api.Unsupported) {
			continue
		} else if err != nil {
			return 0, err
		}
		if err := h.backup(lock.Context(), m); err != nil {
			return 0, err
		}
	}
	return h.healed, w.Flush(lock.Context())
}

// healing is the state of a Heal.
type healing struct {
	w       *repo.Writer
	find    FindChunk
	missing map[chunkPlace]bool // chunks that no disk has there
	buffer  []byte
	healed  int64
}

// chunkPlace is a chunk at a place of a volume or image. Two volumes may have the same chunk, and a disk only one of the
// volumes.
type chunkPlace struct {
	kind   manifest.Kind
	name   string
	number int64
	digest blob.ID
}

func (h *healing) backup(ctx context.Context, m *manifest.Manifest) error {
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
			if err := h.chunk(ctx, m, segment*manifest.SegmentChunks+int64(i), &chunks[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// chunk stores the lost blobs of a chunk.
func (h *healing) chunk(ctx context.Context, m *manifest.Manifest, number int64, c *manifest.Chunk) error {
	n := manifest.ChunkLength(m.Size, number)
	var lost []manifest.Part
	for p := range c.Parts(n) {
		if has, err := h.w.Has(ctx, p.ID, blob.Data); err != nil {
			return err
		} else if !has {
			lost = append(lost, p)
		}
	}
	place := chunkPlace{m.Kind, m.Name, number, c.Digest}
	if len(lost) == 0 || h.missing[place] {
		return nil
	}
	b := h.buffer[:n]
	if c.Digest == manifest.Zeros(n).Digest {
		clear(b)
	} else if found, err := h.find(ctx, m.Description, number, c.Digest, b); err != nil {
		return err
	} else if !found || blob.Sum(b) != c.Digest {
		h.missing[place] = true
		return nil
	}
	for _, p := range lost {
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
