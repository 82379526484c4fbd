package mover

import (
	"context"
	"slices"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// damagedLimit bounds the damaged chunks that a restore lists: 2 TiB.
const damagedLimit = 1 << 20

// RestoreOptions describe a restore.
type RestoreOptions struct {
	// AllowDamaged leaves chunks that the repository lost or damaged as holes. Without AllowDamaged, the first one ends
	// the restore.
	AllowDamaged bool
	// Skip reports chunks that the sink has already; nil: none. Restore asks again right before the read of a chunk.
	Skip     func(chunk int64) bool
	Progress *Progress
}

// Restore writes all chunks of a backup but zeros into sink, whose other bytes read as zeros. Restore returns the
// damaged chunks, in ascending order. The content is durable when Restore returns. The caller loaded blobs under a
// lock that the caller still holds.
func Restore(ctx context.Context, blobs *repo.Blobs, m *manifest.Manifest, sink block.Sink, o RestoreOptions) (
	damaged []int64, err error) {
	if o.Progress == nil {
		o.Progress = &Progress{}
	}
	o.Progress.reset()
	d := &download{blobs: blobs, m: m, sink: sink, o: o, damaged: map[int64]struct{}{}, limit: damagedLimit}
	o.Progress.total.Store(m.Size)
	o.Progress.complete.Store(true)
	segments := manifest.Segments(m.Size)
	for first := int64(0); first < segments; first += manifest.GroupSegments {
		if err := d.restoreGroup(ctx, first, min(manifest.GroupSegments, segments-first)); err != nil {
			return nil, err
		}
	}
	for c := range d.damaged {
		damaged = append(damaged, c)
	}
	slices.Sort(damaged)
	return damaged, sink.Sync(ctx)
}

type download struct {
	blobs *repo.Blobs
	m     *manifest.Manifest
	sink  block.Sink
	o     RestoreOptions

	mu      sync.Mutex
	damaged map[int64]struct{}
	limit   int // of damaged; smaller in tests
}

// restoreGroup restores segments of a group, in the order of the repository's packs.
func (d *download) restoreGroup(ctx context.Context, first, count int64) error {
	list := make([]int64, count)
	for i := range list {
		list[i] = first + int64(i)
	}
	var mu sync.Mutex
	var wanted wantedParts
	err := d.m.Segments(ctx, list, func(segment int64, chunks []manifest.Chunk, err error) error {
		if err != nil {
			return d.damage(segment*manifest.SegmentChunks, manifest.SegmentChunks, err)
		}
		mu.Lock()
		defer mu.Unlock()
		for i := range chunks {
			d.want(segment*manifest.SegmentChunks+int64(i), &chunks[i], &wanted)
		}
		return nil
	})
	if err != nil {
		return err
	}
	lacks := func(i int) bool {
		if d.o.Skip == nil || !d.o.Skip(wanted.parts[i].Offset/block.ChunkSize) {
			return true
		}
		d.o.Progress.done.Add(wanted.parts[i].Length)
		return false
	}
	return d.blobs.ReadWanted(ctx, blob.Data, wanted.ids, lacks, func(i int, plain []byte, err error) error {
		part := wanted.parts[i]
		if err == nil && int64(len(plain)) != part.Length {
			err = api.Errorf(api.Corrupt, "data blob %s: %d bytes instead of %d", part.ID, len(plain), part.Length)
		}
		if err != nil {
			return d.damage(part.Offset/block.ChunkSize, 1, err)
		}
		if err := d.write(plain, part); err != nil {
			return err
		}
		d.o.Progress.done.Add(part.Length)
		return nil
	})
}

// write writes a part whose bytes ReadMany has just compared with the id.
func (d *download) write(plain []byte, part manifest.Part) error {
	to, takes := d.sink.(block.DigestSink)
	if takes && part.Offset%block.ChunkSize == 0 && part.Length == min(block.ChunkSize, d.m.Size-part.Offset) {
		return to.WriteChunk(plain, part.Offset, part.ID)
	}
	_, err := d.sink.WriteAt(plain, part.Offset)
	return err
}

// wantedParts are parts with their offsets in the backup, and their ids.
type wantedParts struct {
	ids   []blob.ID
	parts []manifest.Part
}

// want adds the parts of a chunk, unless the chunk is zeros.
func (d *download) want(number int64, c *manifest.Chunk, wanted *wantedParts) {
	off := number * block.ChunkSize
	n := manifest.ChunkLength(d.m.Size, number)
	if c.Digest == manifest.Zeros(n).Digest || d.o.Skip != nil && d.o.Skip(number) {
		d.o.Progress.done.Add(n)
		return
	}
	for p := range c.Parts(n) {
		p.Offset += off
		wanted.ids, wanted.parts = append(wanted.ids, p.ID), append(wanted.parts, p)
	}
}

// damage counts chunks as damaged, or returns err if the caller allows no damage.
func (d *download) damage(first, count int64, err error) error {
	if !d.o.AllowDamaged || !repo.IsDamage(err) {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := first; c < min(first+count, manifest.Chunks(d.m.Size)); c++ {
		d.damaged[c] = struct{}{}
	}
	if len(d.damaged) > d.limit {
		return api.Errorf(api.Corrupt, "more than %d chunks are damaged: %w", d.limit, err)
	}
	return nil
}
