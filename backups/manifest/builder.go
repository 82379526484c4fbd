package manifest

import (
	"context"
	"encoding/json"
	"slices"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/block"
)

// Builder writes the folder of a new backup. Methods are safe for concurrent use, except that Finish is the last call.
type Builder struct {
	w    *repo.Writer
	base *Manifest
	size int64

	mu    sync.Mutex
	trees map[int64]blob.ID  // of the segments so far
	zeros map[int64]struct{} // lengths of the chunks of zeros that the Writer knows

	zeroTree *blob.ID // the tree of a whole segment of zeros; Finish's alone
}

// NewBuilder begins a backup of size bytes. With a base, which may be nil, the segments that the caller does not put
// are those of the base; without, they are zeros. A base that is larger, or that is smaller and ends within a chunk,
// is an error of kind Invalid: the caller makes a full backup.
func NewBuilder(w *repo.Writer, base *Manifest, size int64) (*Builder, error) {
	if err := checkSize(size); err != nil {
		return nil, err
	}
	if base != nil && !Fits(base.Size, size) {
		return nil, api.Errorf(api.Invalid, "backup %.8s of %d bytes is no base for a backup of %d bytes", base.Snapshot,
			base.Size, size)
	}
	return &Builder{w: w, base: base, size: size, trees: map[int64]blob.ID{}, zeros: map[int64]struct{}{}}, nil
}

// BaseError says that the base is damaged, so that a backup needs another base, or none.
type BaseError struct{ Err error }

func (e *BaseError) Error() string { return "the base is damaged: " + e.Err.Error() }
func (e *BaseError) Unwrap() error { return e.Err }

func baseError(err error) error {
	if repo.IsDamage(err) {
		return &BaseError{err}
	}
	return err
}

// Fits reports whether a backup of base bytes can be the base of one of size bytes.
func Fits(base, size int64) bool { return base == size || base < size && base%block.ChunkSize == 0 }

// Put writes a segment whose chunks are all given. Their blobs are stored already, except for chunks of zeros.
func (b *Builder) Put(ctx context.Context, segment int64, chunks []Chunk) error {
	length := SegmentLength(b.size, segment)
	if segment < 0 || length <= 0 || int64(len(chunks)) != Chunks(length) {
		return api.Errorf(api.Invalid, "segment %d with %d chunks does not fit a backup of %d bytes", segment, len(chunks),
			b.size)
	}
	id, err := b.write(ctx, length, chunks)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.trees[segment] = id
	b.mu.Unlock()
	return nil
}

// write writes the folder of a segment of length bytes.
func (b *Builder) write(ctx context.Context, length int64, chunks []Chunk) (id blob.ID, err error) {
	for i := range chunks {
		n := ChunkLength(length, int64(i))
		if err := chunks[i].check(n); err != nil {
			return id, err
		}
		if chunks[i].FragmentSize == 0 && chunks[i].Digest == Zeros(n).Digest {
			if err := b.addZeros(ctx, n); err != nil {
				return id, err
			}
		}
	}
	var sums *blob.ID
	if content := encodeSums(chunks); content != nil {
		id, _, err := b.w.Add(ctx, blob.Data, content)
		if err != nil {
			return id, err
		}
		sums = &id
	}
	return b.w.AddTree(ctx, segmentNodes(chunks, length, sums))
}

// addZeros stores a chunk of n zeros once.
func (b *Builder) addZeros(ctx context.Context, n int64) error {
	b.mu.Lock()
	_, known := b.zeros[n]
	b.mu.Unlock()
	if known {
		return nil
	}
	if _, err := b.w.AddKnown(ctx, blob.Data, Zeros(n).Digest, zeroBytes()[:n]); err != nil {
		return err
	}
	b.mu.Lock()
	b.zeros[n] = struct{}{}
	b.mu.Unlock()
	return nil
}

// Finish writes the rest of the folder, and returns the tree of a snapshot whose path is Path. The caller flushes the
// Writer before the caller saves the snapshot.
func (b *Builder) Finish(ctx context.Context, d Description) (root blob.ID, err error) {
	d.Format, d.Size = format, b.size
	d.ChunkSize, d.SegmentChunks, d.GroupSegments = block.ChunkSize, SegmentChunks, GroupSegments
	if err := d.check(); err != nil {
		return root, err
	}
	description, err := json.Marshal(d)
	if err != nil {
		return root, err
	}
	if len(description) > descriptionLimit {
		return root, api.Errorf(api.Invalid, "%s %s: the description has %d bytes, at most %d are allowed", d.Kind, d.Name,
			len(description), descriptionLimit)
	}
	disk, err := b.finishDisk(ctx)
	if err != nil {
		return root, err
	}
	file, _, err := b.w.Add(ctx, blob.Data, description)
	if err != nil {
		return root, err
	}
	root, err = b.w.AddTree(ctx, []tree.Node{
		{Name: diskName, Type: tree.Folder, Subtree: disk},
		{Name: descriptionName, Type: tree.File, Size: int64(len(description)), Content: []blob.ID{file}},
	})
	for _, name := range []string{d.Name, d.Kind.folder()} {
		if err == nil {
			root, err = b.w.AddTree(ctx, []tree.Node{{Name: name, Type: tree.Folder, Subtree: root}})
		}
	}
	return root, err
}

// finishDisk writes the trees of the groups, and of the folder of all groups.
func (b *Builder) finishDisk(ctx context.Context) (id blob.ID, err error) {
	if err := b.growBase(ctx); err != nil {
		return id, err
	}
	ids := make([]blob.ID, groups(b.size))
	for g := range ids {
		if ids[g], err = b.finishGroup(ctx, int64(g)); err != nil {
			return id, err
		}
	}
	return b.w.AddTree(ctx, folders(ids, groupName))
}

// growBase writes the last segment of a smaller base again: in the new backup the segment has more chunks.
func (b *Builder) growBase(ctx context.Context) error {
	if b.base == nil || b.base.Size == b.size {
		return nil
	}
	last := Segments(b.base.Size) - 1
	if _, ok := b.trees[last]; ok || SegmentLength(b.base.Size, last) == SegmentLength(b.size, last) {
		return nil
	}
	return b.base.Segments(ctx, []int64{last}, func(_ int64, chunks []Chunk, err error) error {
		if err != nil {
			return baseError(err)
		}
		return b.Put(ctx, last, Extend(chunks, SegmentLength(b.size, last)))
	})
}

// Extend returns the chunks of a segment that grew to length bytes by whole chunks: zeros follow.
func Extend(chunks []Chunk, length int64) []Chunk {
	chunks = slices.Clip(chunks)
	for c := int64(len(chunks)); c < Chunks(length); c++ {
		chunks = append(chunks, Zeros(ChunkLength(length, c)))
	}
	return chunks
}

// finishGroup returns the base's tree of a group, or writes a new one.
func (b *Builder) finishGroup(ctx context.Context, group int64) (id blob.ID, err error) {
	first := group * GroupSegments
	count := min(GroupSegments, Segments(b.size)-first)
	var old []blob.ID // the base's segments
	if b.base != nil && group < int64(len(b.base.groups)) {
		if !b.changes(first, count) && count == min(GroupSegments, Segments(b.base.Size)-first) {
			return b.base.groups[group], nil
		}
		if old, err = b.base.segmentTrees(ctx, group); err != nil {
			return id, baseError(err)
		}
	}
	ids := make([]blob.ID, count)
	for i := range ids {
		segment := first + int64(i)
		if tree, ok := b.trees[segment]; ok {
			ids[i] = tree
		} else if i < len(old) {
			ids[i] = old[i]
		} else if ids[i], err = b.zeroSegment(ctx, segment); err != nil {
			return id, err
		}
	}
	return b.w.AddTree(ctx, folders(ids, segmentName))
}

// changes reports whether any of count segments was put.
func (b *Builder) changes(first, count int64) bool {
	for s := first; s < first+count; s++ {
		if _, ok := b.trees[s]; ok {
			return true
		}
	}
	return false
}

// zeroSegment writes a segment of zeros. All whole ones are one tree.
func (b *Builder) zeroSegment(ctx context.Context, segment int64) (blob.ID, error) {
	length := SegmentLength(b.size, segment)
	if length == SegmentSize && b.zeroTree != nil {
		return *b.zeroTree, nil
	}
	id, err := b.write(ctx, length, Extend(nil, length))
	if err == nil && length == SegmentSize {
		b.zeroTree = &id
	}
	return id, err
}
