package manifest

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// checkedGroups is how many groups CheckBlobs checks at a time: few, to bound the memory, and many, because neighbours
// in a pack are read with one request.
const checkedGroups = 64

// CheckBlobs returns nil if the index has every blob of the disk outside of damaged packs, and an error of kind
// NotFound for a missing blob. CheckBlobs reads trees alone, most of them from the cache.
func (m *Manifest) CheckBlobs(ctx context.Context) error {
	groups := int64(len(m.groups))
	for first := int64(0); first < groups; first += checkedGroups {
		if err := m.checkGroups(ctx, first, min(first+checkedGroups, groups)); err != nil {
			return api.Errorf(api.KindOf(err), "backup %.8s: %w", m.Snapshot, err)
		}
	}
	return nil
}

// checkGroups checks the groups from first to before end, and equal segments among them once.
func (m *Manifest) checkGroups(ctx context.Context, first, end int64) error {
	if err := m.findBlobs(ctx, blob.Tree, m.groups[first:end]); err != nil {
		return err
	}
	if err := m.readGroups(ctx, first, end); err != nil {
		return err
	}
	var trees []blob.ID
	var lengths []int64 // of the segments, in bytes
	seen := map[blob.ID]int64{}
	for group := first; group < end; group++ {
		ids, err := m.segmentTrees(ctx, group)
		if err != nil {
			return err
		}
		for i, id := range ids {
			length := SegmentLength(m.Size, group*GroupSegments+int64(i))
			if seen[id] != length {
				seen[id] = length
				trees, lengths = append(trees, id), append(lengths, length)
			}
		}
	}
	if err := m.findBlobs(ctx, blob.Tree, trees); err != nil {
		return err
	}
	return m.blobs.ReadMany(ctx, blob.Tree, trees, func(i int, plain []byte, err error) error {
		var content []blob.ID
		var sums *blob.ID
		if err == nil {
			content, sums, err = decodeFolder(plain, lengths[i])
		}
		if err != nil {
			return err
		}
		if sums != nil {
			content = append(content, *sums)
		}
		return m.findBlobs(ctx, blob.Data, content)
	})
}

// findBlobs returns nil if the index has all blobs of a kind, outside of damaged packs.
func (m *Manifest) findBlobs(ctx context.Context, kind blob.Kind, ids []blob.ID) error {
	for i, id := range ids {
		if i > 0 && id == ids[i-1] { // chunks of zeros
			continue
		}
		if has, err := m.blobs.Has(ctx, id, kind); err != nil {
			return err
		} else if !has {
			return api.Errorf(api.NotFound, "%v blob %s: not in the index", kind, id)
		}
	}
	return nil
}
