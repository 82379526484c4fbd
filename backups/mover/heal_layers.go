package mover

import (
	"context"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// want notes a missing chunk, with its lost parts, for the search in layers.
func (h *healing) want(c *lostChunk) {
	digest := c.place.digest
	if h.nowhere[digest] {
		return
	}
	w := h.wanted[digest]
	if w == nil {
		w = &lostChunk{place: c.place, length: c.length}
		h.wanted[digest] = w
		if c.length%block.Size != 0 {
			h.tails = append(h.tails, w)
		}
	}
	for _, p := range c.parts {
		if !slices.Contains(w.parts, p) {
			w.parts = append(w.parts, p)
		}
	}
}

// searchLayers looks for the wanted chunks in the layers of all disks, at any place, and begins a new list of wanted
// chunks. The digests of a layer tell which chunks the layer has: a layer without a wanted chunk is not opened.
func (h *healing) searchLayers(ctx context.Context) error {
	if len(h.wanted) == 0 {
		return nil
	}
	answered := true
	if h.sources.Disks != nil {
		for disk, failure := range h.sources.Disks(ctx) {
			all := false
			if failure == nil {
				var err error
				if all, err = h.searchDisk(ctx, disk); err != nil {
					return err
				}
			} else {
				h.noteUnread(failure)
			}
			answered = answered && all
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	h.left += len(h.wanted)
	if len(h.nowhere)+len(h.wanted) > knownLimit {
		clear(h.nowhere) // costs repeated searches
	}
	for digest := range h.wanted {
		if answered {
			h.nowhere[digest] = true
		}
	}
	clear(h.wanted)
	h.tails = nil
	return nil
}

// searchDisk searches each layer of a disk, and reports whether all layers answered. A busy layer has a second turn
// after the others. New layers are searched, too, because a merge may replace layers meanwhile.
func (h *healing) searchDisk(ctx context.Context, disk block.LayerReader) (answered bool, err error) {
	answered = true
	turns := map[string]int{} // that a layer had; 2: no more
	for len(h.wanted) > 0 {
		layers, failure := disk.LayerNames()
		if failure != nil {
			h.noteUnread(failure)
			return false, nil
		}
		layers = slices.DeleteFunc(layers, func(uid string) bool { return turns[uid] == 2 })
		if len(layers) == 0 {
			break
		}
		for _, uid := range layers {
			failure, err := h.searchLayer(ctx, disk, uid)
			if err != nil {
				return false, err
			}
			if turns[uid]++; failure == nil || !api.Is(failure, api.Busy) {
				turns[uid] = 2
			}
			if failure != nil && turns[uid] == 2 {
				answered = false
				h.noteUnread(failure)
			}
		}
	}
	return answered, nil
}

// searchLayer stores the wanted chunks that a layer has. A layer that was merged or deleted has none.
func (h *healing) searchLayer(ctx context.Context, disk block.LayerReader, uid string) (failure, err error) {
	for first := int64(0); len(h.wanted) > 0; first += digestsRead {
		leave, err := h.pacer.Enter(ctx)
		if err != nil {
			return nil, err
		}
		sums, failure := disk.ChunkDigests(uid, first, digestsRead)
		leave()
		if api.Is(failure, api.NotFound) || api.Is(failure, api.Corrupt) {
			return nil, nil
		}
		if failure != nil {
			return failure, nil
		}
		found, last := h.findWanted(sums, first), len(sums) < digestsRead*block.DigestSize
		if last {
			found = append(found, h.findTails(first+int64(len(sums))/block.DigestSize)...)
		}
		if failure, err = h.takeFound(ctx, disk, uid, found); failure != nil || err != nil || last {
			return failure, err
		}
	}
	return nil, nil
}

// findWanted finds wanted chunks by the digests of a layer's chunks from first on.
func (h *healing) findWanted(sums []byte, first int64) (found []lostChunk) {
	for i := range int64(len(sums)) / block.DigestSize {
		if w := h.wanted[blob.ID(sums[i*block.DigestSize:][:block.DigestSize])]; w != nil {
			c := *w
			c.at = first + i
			found = append(found, c)
		}
	}
	return found
}

// findTails finds wanted chunks that end within a block, and may be the begin of the last chunk of a layer with a
// number of chunks: the layer ends with a whole block, so its digest tells nothing.
func (h *healing) findTails(chunks int64) (found []lostChunk) {
	for _, w := range h.tails {
		if c := *w; c.place.number == chunks-1 && h.wanted[c.place.digest] != nil {
			c.at = c.place.number
			found = append(found, c)
		}
	}
	return found
}

// takeFound stores the chunks that were found in a layer, each digest once.
func (h *healing) takeFound(ctx context.Context, disk block.LayerReader, uid string, found []lostChunk) (failure,
	err error) {
	open := func(context.Context) (block.Source, error) { return disk.Open(uid) }
	for len(found) > 0 && failure == nil {
		var batch, left []lostChunk
		for len(found) > 0 && len(batch) < len(h.buffers) {
			if c := found[0]; h.wanted[c.place.digest] != nil && !hasDigest(batch, c.place.digest) {
				batch = append(batch, c)
			}
			found = found[1:]
		}
		if left, failure, err = h.takeFrom(ctx, open, batch); err != nil {
			return nil, err
		}
		for i := range batch {
			if digest := batch[i].place.digest; !hasDigest(left, digest) {
				delete(h.wanted, digest)
			}
		}
	}
	return failure, nil
}

func hasDigest(chunks []lostChunk, digest blob.ID) bool {
	return slices.ContainsFunc(chunks, func(c lostChunk) bool { return c.place.digest == digest })
}
