package format

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"math/bits"
	"sync"

	"drover.io/drover/block"
)

// The digests of a layer: one per chunk, over the content of the chunk, and the root digest over all of them and the
// map.

// SumsHeaderOf encodes the header of the digests of a layer of size bytes.
func SumsHeaderOf(size int64) []byte {
	b := make([]byte, SumsHeader)
	copy(b, sumsMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint64(b[16:], uint64(size))
	binary.LittleEndian.PutUint64(b[24:], uint64(ChunkSize))
	return b
}

// ChunkSums holds the digest of a chunk and the checksums of its blocks.
type ChunkSums struct {
	Digest [SumSize]byte
	CRCs   []byte // of its blocks
}

// ChunkKinds holds the kinds of a chunk's blocks, two bits each.
type ChunkKinds struct {
	bits [ChunkBlocks / 4]byte
	Data bool // some of them are data
}

// KindsOf packs the kinds of a chunk's blocks.
func KindsOf(kinds []block.Kind) (k ChunkKinds) {
	for i, v := range kinds {
		k.bits[i>>2] |= byte(v) << (i & 3 * 2)
		k.Data = k.Data || v == block.Data
	}
	return k
}

// DataBlocks counts the blocks of data.
func (k *ChunkKinds) DataBlocks() (n int64) {
	const dataBits = 0xaa // block.Data is the only kind with the higher bit
	for _, b := range k.bits {
		n += int64(bits.OnesCount8(b & dataBits))
	}
	return n
}

// Chunks yields the chunks that are not all holes, in order.
func (x *Index) Chunks() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for b := int64(0); b < x.Blocks; {
			v, n := x.Run(b, x.Blocks)
			if block.Kind(v) == block.Hole && (n >= ChunkBlocks || b+n == x.Blocks) {
				if b+n == x.Blocks {
					return
				}
				b += n - n%ChunkBlocks
				continue
			}
			if !yield(b / ChunkBlocks) {
				return
			}
			b += ChunkBlocks
		}
	}
}

// Chunk returns the kinds of the blocks of chunk c, an input of the root digest.
func (x *Index) Chunk(c int64) (k ChunkKinds) {
	b := c * ChunkBlocks
	end := min(b+ChunkBlocks, x.Blocks)
	for i := b; i < end; {
		v, n := x.Run(i, end)
		if block.Kind(v) != block.Hole {
			for j := i - b; j < i-b+n; j++ {
				k.bits[j>>2] |= byte(v) << (j & 3 * 2)
			}
		}
		k.Data = k.Data || block.Kind(v) == block.Data
		i += n
	}
	return k
}

// Held counts the bytes of data and the bytes of zeros in an index of kinds.
func (x *Index) Held() (data, zero int64) {
	for b := int64(0); b < x.Blocks; {
		v, n := x.Run(b, x.Blocks)
		switch block.Kind(v) {
		case block.Data:
			data += n << BlockBits
		case block.Zero:
			zero += n << BlockBits
		}
		b += n
	}
	return data, zero
}

// ChunkSum computes the digest of a chunk; holes and zeros count as zeros. If the chunk has data, buf holds the content
// afterwards.
func ChunkSum(r io.ReaderAt, k ChunkKinds, c, size int64, buf []byte) (sum [SumSize]byte, err error) {
	b := buf[:min(ChunkSize, size-c*ChunkSize)]
	if !k.Data {
		return ZeroSum(int64(len(b))), nil
	}
	if n, err := r.ReadAt(b, c*ChunkSize); n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return sum, fmt.Errorf("read chunk %d: %w", c, err)
	}
	return sha256.Sum256(b), nil
}

// ZeroSum is the digest of a chunk of n zeros.
func ZeroSum(n int64) [SumSize]byte {
	if n == ChunkSize {
		return zeroSum()
	}
	return sha256.Sum256(make([]byte, n))
}

// NoSum is the digest of a chunk that was damaged before a merge: no content has this digest.
var NoSum = [SumSize]byte(bytes.Repeat([]byte{0xff}, SumSize))

// zeroSum is the digest of a whole chunk of zeros.
var zeroSum = sync.OnceValue(func() [SumSize]byte { return sha256.Sum256(make([]byte, ChunkSize)) })

// RootDigest computes the digest over the sums and kinds of all chunks that are not all holes, and passes each chunk to
// see.
func RootDigest(sums io.ReaderAt, size int64, kinds *Index, see ...func(c int64, sum [SumSize]byte)) (string, error) {
	h := NewRoot(size)
	var sum [SumSize]byte
	for c := range kinds.Chunks() {
		if _, err := sums.ReadAt(sum[:], SumsHeader+c*SumSize); err != nil {
			return "", fmt.Errorf("sum of chunk %d: %w", c, err)
		}
		AddRoot(h, c, sum, kinds.Chunk(c))
		for _, fn := range see {
			fn(c, sum)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// NewRoot begins the root digest of a layer of size bytes.
func NewRoot(size int64) hash.Hash {
	h := sha256.New()
	h.Write([]byte("drover layer 1\n"))
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(size))
	h.Write(b[:])
	return h
}

// AddRoot adds a chunk to a root digest. The caller adds the chunks in ascending order, without those that are all
// holes.
func AddRoot(h hash.Hash, c int64, sum [SumSize]byte, k ChunkKinds) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(c))
	h.Write(b[:])
	h.Write(sum[:])
	h.Write(k.bits[:])
}

// Sizes in the file of digests, in bytes.
const (
	sumsMagic  = "DROVERS1"
	SumsHeader = 64
	SumSize    = sha256.Size
)
