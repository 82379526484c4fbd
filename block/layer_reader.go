package block

// LayerReader is the part of a disk that reads layers one by one, whatever stack or image they belong to. Methods are
// safe for concurrent use.
type LayerReader interface {
	// LayerNames lists the UIDs of the disk's layers. A layer of the list may be unfinished, or be removed meanwhile.
	LayerNames() ([]string, error)
	// Sums reads the file of digests of a finished layer: it ends with the SHA-256 of each chunk, in ascending order.
	// An error of kind not found: the layer is not finished, or has no digests.
	Sums(uid string) ([]byte, error)
	// Open is that of Layers. An error of kind busy: the layer is being cut or merged; try again later.
	Open(uid string) (Source, error)
}

// DigestLayers is a Layers that tells which layers the disk has, and the digests of their chunks.
type DigestLayers interface {
	Layers
	LayerReader
}

const sumSize = 32 // bytes of a SHA-256

// digestLayer is an open layer with its file of digests.
type digestLayer struct {
	Source
	sums []byte
}

// OpenLayer opens a finished layer of a disk as a source that knows the digests of all chunks. The digests take 32
// bytes for each chunk.
func OpenLayer(disk LayerReader, uid string) (DigestSource, error) {
	sums, err := disk.Sums(uid)
	if err != nil {
		return nil, err
	}
	src, err := disk.Open(uid)
	if err != nil {
		return nil, err
	}
	header := int64(len(sums)) - (src.Size()+ChunkSize-1)/ChunkSize*sumSize
	if header < 0 {
		return digestLayer{src, nil}, nil // damage, which the layer's scrub reports
	}
	return digestLayer{src, sums[header:]}, nil
}

// Digest implements DigestSource.
func (l digestLayer) Digest(chunk int64) (sum [sumSize]byte, known bool) {
	if chunk < 0 || chunk >= int64(len(l.sums)/sumSize) {
		return sum, false
	}
	return [sumSize]byte(l.sums[chunk*sumSize:]), true
}
