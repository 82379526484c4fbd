// Package manifest owns the layout of a backup: the folder, in a snapshot of the repository, that names all bytes of a
// volume or image.
//
//	/volumes/NAME/drover.json        the description
//	/volumes/NAME/disk/GGGG/SS/data  a segment of 64 chunks; a group GGGG has 64 segments
//	/volumes/NAME/disk/GGGG/SS/sums  in segments with fragments: how each chunk is stored (see segment.go)
//
// A chunk is 2 MiB, the unit of digests. It is one blob, named by the chunk's digest, or it is stored in fragments,
// small blobs, because it changes often. All files of disk, one after the other, are the bytes of the volume, so a
// user restores the backup with restic alone. Zeros and holes are chunks of zeros: one blob in the repository.
//
// A backup with a base writes only the segments that changed, and the folders above them. Equal segments are one blob.
//
// Invariants: the Builder's Writer knows every blob of a segment that the Builder wrote; Segments returns only chunks
// whose number and sizes fit the volume, whatever the repository has.
//
// The package starts no goroutine of its own; Blobs.ReadMany calls back from several. Builder.mu and Manifest.mu
// are leaves: no call runs with one of them held.
package manifest

import (
	"encoding/json"
	"iter"
	"math/bits"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/block"
)

// Shape of a disk's folder.
const (
	SegmentChunks = 64
	SegmentSize   = SegmentChunks * block.ChunkSize
	GroupSegments = 64

	// MaxSize is the largest volume or image, in bytes.
	MaxSize = api.MaxVolumeSize
	// MinFragment is the size of the smallest fragments, in bytes.
	MinFragment = 16 << 10
)

// Chunk tells how a chunk is stored.
type Chunk struct {
	Digest       blob.ID   // SHA-256 of the chunk's bytes
	FragmentSize int       // bytes of each fragment but the last; 0: the chunk is a single blob, whose id is Digest
	Fragments    []blob.ID // in the order of the bytes
}

// blobs are the ids of the chunk's blobs in the order of the bytes.
func (c *Chunk) blobs() []blob.ID {
	if c.FragmentSize == 0 {
		return []blob.ID{c.Digest}
	}
	return c.Fragments
}

// Part is one of a chunk's blobs.
type Part struct {
	ID             blob.ID
	Offset, Length int64 // bytes, from the chunk's first byte on
}

// Parts are the blobs of a chunk of n bytes, in the order of the bytes.
func (c *Chunk) Parts(n int64) iter.Seq[Part] {
	step := n
	if c.FragmentSize > 0 {
		step = int64(c.FragmentSize)
	}
	return func(yield func(Part) bool) {
		for i, id := range c.blobs() {
			off := int64(i) * step
			if !yield(Part{id, off, min(step, n-off)}) {
				return
			}
		}
	}
}

// check refuses a chunk of n bytes that no Builder writes.
func (c *Chunk) check(n int64) error {
	size := int64(c.FragmentSize)
	switch {
	case size == 0 && len(c.Fragments) == 0:
		return nil
	case checkFragment(size) != nil:
		return checkFragment(size)
	case int64(len(c.Fragments)) != (n+size-1)/size:
		return api.Errorf(api.Invalid, "%d fragments of %d bytes do not fit a chunk of %d bytes", len(c.Fragments), size, n)
	}
	return nil
}

func checkFragment(size int64) error {
	if size < MinFragment || size >= block.ChunkSize || bits.OnesCount64(uint64(size)) != 1 {
		return api.Errorf(api.Invalid, "fragments of %d bytes are not allowed; only powers of 2 from %d to %d are", size,
			MinFragment, block.ChunkSize/2)
	}
	return nil
}

// Kind is the kind of a backup's content.
type Kind string

// Kinds.
const (
	Volume Kind = "volume"
	Image  Kind = "image"
)

// folder is the folder of all backups of a kind.
func (k Kind) folder() string { return string(k) + "s" }

// Description is drover.json. Builder and Open own the fields from Format to Size; Object is the caller's.
type Description struct {
	Format        int    `json:"format"`
	Kind          Kind   `json:"kind"`
	Name          string `json:"name"` // of the volume or image
	ChunkSize     int64  `json:"chunkSize"`
	SegmentChunks int64  `json:"segmentChunks"`
	GroupSegments int64  `json:"groupSegments"`
	Size          int64  `json:"size"` // bytes
	// Object is JSON of the caller, from which a restore makes the object of the volume or image again.
	Object json.RawMessage `json:"object,omitempty"`
}

// format is the only format that this package reads and writes.
const format = 1

// descriptionLimit bounds drover.json, in bytes.
const descriptionLimit = 1 << 20

func (d *Description) check() error {
	switch {
	case d.Format != format, d.ChunkSize != block.ChunkSize, d.SegmentChunks != SegmentChunks,
		d.GroupSegments != GroupSegments:
		return api.Errorf(api.Unsupported, "format %d with chunks of %d bytes is not supported; only format %d is: "+
			"use a newer Drover, or restore with restic", d.Format, d.ChunkSize, format)
	case d.Kind != Volume && d.Kind != Image:
		return api.Errorf(api.Unsupported, "kind %.16q is not supported; volume and image are", d.Kind)
	}
	return checkSize(d.Size)
}

func checkSize(size int64) error {
	if size <= 0 || size > MaxSize {
		return api.Errorf(api.Invalid, "a size of %d bytes is not allowed; 1 to %d are", size, MaxSize)
	}
	return nil
}

// Check refuses a kind, a name or a size of fragments (0: none) that no backup has.
func Check(kind Kind, name string, fragmentSize int) error {
	if kind != Volume && kind != Image {
		return api.Errorf(api.Invalid, "backup: kind %.16q is not supported; volume and image are", kind)
	}
	if _, err := tree.Encode([]tree.Node{{Name: name, Type: tree.Folder}}); err != nil {
		return api.Errorf(api.Invalid, "backup of %s %.64q: not a name: %w", kind, name, err)
	}
	if fragmentSize == 0 {
		return nil
	}
	return checkFragment(int64(fragmentSize))
}

// Chunks is the number of chunks of size bytes.
func Chunks(size int64) int64 { return (size + block.ChunkSize - 1) / block.ChunkSize }

// Segments is the number of segments of size bytes.
func Segments(size int64) int64 { return (size + SegmentSize - 1) / SegmentSize }

func groups(size int64) int64 { return (Segments(size) + GroupSegments - 1) / GroupSegments }

// ChunkLength is the length of chunk c of size bytes: the last one may be short.
func ChunkLength(size, c int64) int64 { return min(block.ChunkSize, size-c*block.ChunkSize) }

// SegmentLength is the length of segment s of size bytes.
func SegmentLength(size, s int64) int64 { return min(SegmentSize, size-s*SegmentSize) }

var zeroBytes = sync.OnceValue(func() []byte { return make([]byte, block.ChunkSize) })

// zeroDigest is the digest of a whole chunk of zeros.
var zeroDigest = sync.OnceValue(func() blob.ID { return blob.Sum(zeroBytes()) })

// Zeros is a chunk of n zeros.
func Zeros(n int64) Chunk {
	if n == block.ChunkSize {
		return Chunk{Digest: zeroDigest()}
	}
	return Chunk{Digest: blob.Sum(zeroBytes()[:n])}
}
