package block

import "errors"

// LayerReader is the part of a disk that reads layers one by one, whatever stack or image they belong to. Methods are
// safe for concurrent use.
type LayerReader interface {
	// LayerNames lists the UIDs of the disk's layers. A layer of the list may be unfinished, or be removed meanwhile.
	LayerNames() ([]string, error)
	// ChunkDigests reads the SHA-256 of n chunks of a finished layer, from chunk first on: 32 bytes for each chunk, and
	// fewer chunks at the end of the layer. A layer that is being merged still has its digests. An error of kind not
	// found: the layer is not finished, does not exist any more, or has no digests.
	ChunkDigests(uid string, first, n int64) ([]byte, error)
	// Open is that of Layers. An error of kind busy: the layer is being cut or merged; try again later.
	Open(uid string) (Source, error)
}

// DigestLayers is a Layers that tells which layers the disk has, and the digests of their chunks.
type DigestLayers interface {
	Layers
	LayerReader
}

// DigestSize is the size of a digest of ChunkDigests in bytes.
const DigestSize = 32

// digestLayer is an open layer with the digests of its chunks.
type digestLayer struct {
	Source
	sums []byte
}

// OpenLayer opens a finished layer of a disk as a source that knows the digests of all chunks. The digests take 32
// bytes for each chunk.
func OpenLayer(disk LayerReader, uid string) (DigestSource, error) {
	src, err := disk.Open(uid)
	if err != nil {
		return nil, err
	}
	sums, err := disk.ChunkDigests(uid, 0, (src.Size()+ChunkSize-1)/ChunkSize)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	return digestLayer{src, sums}, nil
}

// Digest implements DigestSource.
func (l digestLayer) Digest(chunk int64) (sum [DigestSize]byte, known bool) {
	if chunk < 0 || chunk >= int64(len(l.sums)/DigestSize) {
		return sum, false
	}
	return [DigestSize]byte(l.sums[chunk*DigestSize:]), true
}
