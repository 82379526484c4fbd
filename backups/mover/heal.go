package mover

import (
	"cmp"
	"context"
	"errors"
	"io"
	"iter"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
)

// Sources are where Heal looks for chunks. An error of an iteration stands for sources that may have chunks.
type Sources struct {
	// AtPlaces yields the sources that may have chunks of a volume or image at the places of a backup.
	AtPlaces func(ctx context.Context, d manifest.Description) iter.Seq2[OpenSource, error]
	// Disks yields the disks whose layers may have chunks at any place; nil: none.
	Disks func(ctx context.Context) iter.Seq2[block.LayerReader, error]
}

// OpenSource opens a source for some moments; Heal opens a source several times. An error of kind not found or corrupt:
// the source has no chunks. An error of kind busy: layers of the source are being cut or merged.
type OpenSource func(ctx context.Context) (block.Source, error)

// Bounds of Heal.
const (
	lostAtOnce  = 1024    // chunks that Heal looks for in each source at their places
	wantedLimit = 8192    // chunks that Heal looks for in one pass over the digests of all layers
	knownLimit  = 1 << 16 // chunks that Heal remembers as missing
	digestsRead = 1 << 15 // digests in one read: 1 MiB
	// Merges wait for open layers. While openTime lasts, a source stays open; when sources were open for openTime
	// together without a pause of closedTime, Heal makes this pause.
	openTime   = time.Second
	closedTime = time.Second
)

// Heal stores lost blobs of chunks again, as far as sources have the chunks, and returns the number of durable blobs,
// also with an error: a chunk or a source could not be read, or the repository did not answer, and a later Heal may
// store more. An error of kind busy is no failure: layers that may have chunks are being cut or merged, and a later
// Heal finds the chunks in the results. A fragment is cut out of the chunk. Heal leaves damaged lists of chunks as
// they are: a full backup of the same content writes these lists again. Heal skips snapshots of other programs.
// Guests go first.
//
// No source is open while Heal stores chunks, so a slow store delays no merge: Heal reads as many chunks at once as
// o.Beside has room for, at least one.
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
	h := &healing{w: w, pacer: o.Pacer, sources: sources, missing: map[chunkPlace]bool{},
		wanted: map[blob.ID]*lostChunk{}, nowhere: map[blob.ID]bool{},
		buffers: make([][]byte, max(o.Beside/block.ChunkSize, 1))}
	for _, id := range snapshots {
		if err = h.healSnapshot(lock.Context(), r, blobs, id); err != nil {
			break
		}
	}
	if err == nil {
		err = h.searchLayers(lock.Context())
	}
	if flushErr := w.Flush(lock.Context()); flushErr != nil {
		return 0, errors.Join(err, flushErr)
	}
	if err = errors.Join(err, h.unread); err == nil && h.left > 0 {
		err = h.busy
	}
	return h.healed, err
}

// healing is the state of a Heal.
type healing struct {
	w       *repo.Writer
	pacer   *pace.Pacer
	sources Sources
	missing map[chunkPlace]bool    // chunks that no source has there, or can read
	wanted  map[blob.ID]*lostChunk // missing chunks to look for at other places, by digest
	tails   []*lostChunk           // of wanted, with an end within a block
	nowhere map[blob.ID]bool       // chunks that no layer has
	left    int                    // how many chunks stayed missing
	unread  error                  // of the first chunk or source that could not be read
	busy    error                  // of the first source that was busy
	buffers [][]byte               // of a batch; nil: not allocated
	healed  int64
	opened  time.Duration // how long sources were open since the last pause
	closed  time.Time     // of the last source
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
	at     int64           // number of the chunk in the source to read
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
			c := lostChunk{place: chunkPlace{m.Kind, m.Name, number, chunks[i].Digest},
				length: manifest.ChunkLength(m.Size, number), at: number}
			if c.parts, err = h.lostParts(ctx, &chunks[i], c.length); err != nil {
				return err
			}
			switch {
			case len(c.parts) == 0:
			case h.missing[c.place]:
				h.want(&c)
			case c.place.digest == manifest.Zeros(c.length).Digest:
				if err := h.storeLost(ctx, &c, make([]byte, c.length)); err != nil {
					return err
				}
			default:
				lost = append(lost, c)
			}
		}
		if len(lost) >= lostAtOnce {
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

// healLost looks for chunks of one volume or image in its sources, at the places of the chunks. A chunk is missing if
// each source lacks the chunk or has a bad sector there. Busy sources come last: a cut has ended then.
func (h *healing) healLost(ctx context.Context, d manifest.Description, lost []lostChunk) (err error) {
	if len(lost) == 0 {
		return nil
	}
	answered := true
	var busy []OpenSource
	for open, failure := range h.sources.AtPlaces(ctx, d) {
		if failure == nil {
			lost, failure, err = h.takeFrom(ctx, open, lost)
		}
		switch {
		case err != nil || len(lost) == 0:
			return err
		case api.Is(failure, api.Busy) && open != nil:
			busy = append(busy, open)
		case failure != nil:
			answered = false
			h.noteUnread(failure)
		}
	}
	for _, open := range busy {
		var failure error
		if lost, failure, err = h.takeFrom(ctx, open, lost); err != nil || len(lost) == 0 {
			return err
		}
		if failure != nil {
			answered = false
			h.noteUnread(failure)
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(h.missing)+len(lost) > knownLimit {
		clear(h.missing) // costs repeated searches
	}
	for i := range lost {
		if answered {
			h.missing[lost[i].place] = true
		}
		h.want(&lost[i])
	}
	if len(h.wanted) >= wantedLimit {
		return h.searchLayers(ctx)
	}
	return nil
}

// noteUnread notes the failure of a source.
func (h *healing) noteUnread(failure error) {
	if api.Is(failure, api.Busy) {
		h.busy = cmp.Or(h.busy, failure)
	} else {
		h.unread = cmp.Or(h.unread, failure)
	}
}

// takeFrom stores the chunks that a source has, and returns the other chunks. A bad sector costs the chunk there alone.
// A failure of the source says nothing of the returned chunks.
func (h *healing) takeFrom(ctx context.Context, open OpenSource, lost []lostChunk) (left []lostChunk, failure,
	err error) {
	for len(lost) > 0 && failure == nil {
		if err = h.letMergesBegin(ctx); err != nil {
			return nil, nil, err
		}
		var batch [][]byte
		batch, failure, err = h.readBatch(ctx, open, lost)
		for i := 0; i < len(batch) && err == nil; i++ {
			if batch[i] == nil {
				left = append(left, lost[i])
			} else {
				err = h.storeLost(ctx, &lost[i], batch[i])
			}
		}
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return nil, nil, err
		}
		lost = lost[len(batch):]
	}
	return append(left, lost...), failure, nil
}

// letMergesBegin pauses if sources were open for openTime since the last pause. The time in the store counts as pause.
func (h *healing) letMergesBegin(ctx context.Context) error {
	pause := closedTime - time.Since(h.closed)
	if pause > 0 && h.opened < openTime {
		return nil
	}
	h.opened = 0
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// readBatch opens a source, looks for the first of the lost chunks, at most for openTime and as many as the buffers
// have room for, and closes the source. read has an entry for each chunk that was looked at; nil: not there.
func (h *healing) readBatch(ctx context.Context, open OpenSource, lost []lostChunk) (read [][]byte, failure,
	err error) {
	began := time.Now()
	defer func() {
		h.closed = time.Now()
		h.opened += h.closed.Sub(began)
	}()
	src, failure := h.openPaced(ctx, open)
	switch {
	case api.Is(failure, api.NotFound), api.Is(failure, api.Corrupt): // damage of the disk, which the scrub reports
		return make([][]byte, len(lost)), nil, nil
	case failure != nil:
		return nil, failure, nil
	}
	defer func() {
		if closeErr := src.Close(); failure == nil {
			failure = closeErr
		}
	}()
	used := 0
	for i := range lost {
		if used == len(h.buffers) || i > 0 && time.Since(began) >= openTime {
			break
		}
		var b []byte
		b, failure, err = h.readLost(ctx, src, &lost[i], &h.buffers[used])
		switch {
		case err != nil:
			return nil, nil, err
		case isBadSector(failure):
			h.noteUnread(failure)
			failure = nil
		case failure != nil:
			return read, failure, nil
		case b != nil:
			used++
		}
		read = append(read, b)
	}
	return read, nil, nil
}

// openPaced opens a source within a step of work.
func (h *healing) openPaced(ctx context.Context, open OpenSource) (block.Source, error) {
	leave, err := h.pacer.Enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return open(ctx)
}

// isBadSector reports whether the failure of a read says nothing about other places of the disk. A disk that hangs
// returns no EIO: its calls end with an error of package watched.
func isBadSector(failure error) bool { return errors.Is(failure, syscall.EIO) }

// readLost reads a chunk into a buffer; nil without a failure: the source has no such chunk.
func (h *healing) readLost(ctx context.Context, src block.Source, c *lostChunk, buffer *[]byte) (b []byte, failure,
	err error) {
	off := c.at * block.ChunkSize
	if off+c.length > src.Size() {
		return nil, nil, nil
	}
	leave, err := h.pacer.Enter(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer leave()
	// The last chunk of an image is shorter than the last chunk of the image's layers.
	if digests, is := src.(block.DigestSource); is && c.length == block.ChunkSize {
		if sum, known := digests.Digest(c.at); known && blob.ID(sum) != c.place.digest {
			return nil, nil, nil
		}
	}
	if *buffer == nil {
		*buffer = block.AlignedBuffer(block.ChunkSize)
	}
	b = (*buffer)[:c.length]
	n, failure := src.ReadAt(b, off)
	switch {
	case int64(n) == c.length && (failure == nil || errors.Is(failure, io.EOF)):
	case api.Is(failure, api.Corrupt): // damage of the disk, which the scrub reports
		return nil, nil, nil
	default:
		if !isBadSector(failure) {
			*buffer = nil // a disk that hangs may still write to the memory
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
