package block

import (
	"context"
	"iter"
)

// IntactBackup is a Backup that restores the chunks that it can.
type IntactBackup interface {
	Backup
	// RestoreIntact is Restore without the chunks that skip, if set, reports, and without those that the store damaged or
	// lost: RestoreIntact returns them in ascending order, and writes nothing, or a part, of each.
	RestoreIntact(ctx context.Context, sink Sink, skip func(chunk int64) bool) (damaged []int64, err error)
}

// ChunkedBackup is a Backup that knows the digests of its chunks, so that the layer of a restore is known before its
// data, and that reads single chunks. Methods are safe for concurrent use.
type ChunkedBackup interface {
	IntactBackup
	// Digests calls each, in ascending order, with the SHA-256 of the bytes of every chunk that is not zeros (ChunkSize
	// bytes; the last chunk may be short). A part of the list that the store lost or damaged is an error of kind corrupt;
	// a list that is not known before the bytes, one of kind unsupported.
	Digests(ctx context.Context, each func(chunk int64, sum [32]byte)) error
	// ReadChunk fills buf with a chunk, and compares the bytes with the digest. buf has the length of the chunk. Errors of
	// kind corrupt or not found: the store damaged or lost the chunk.
	ReadChunk(ctx context.Context, chunk int64, buf []byte) error
}

// LayerPlanner is a Layers that knows a layer before its data.
type LayerPlanner interface {
	// PlanLayer returns the root digest and the file of digests of a layer of size bytes (rounded up to Size). sums has
	// the chunks with data, all of whose blocks are data, in ascending order, with their digests; other chunks are
	// holes.
	PlanLayer(size int64, sums iter.Seq2[int64, [32]byte]) (root string, file []byte, err error)
}
