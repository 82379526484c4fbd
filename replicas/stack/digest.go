package stack

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"runtime"
	"sync"

	"drover.io/drover/block"
)

// Digests of a layer: one per chunk, over its content, and the root over those and the map.

func encodeSumsHeader(size int64) []byte {
	b := make([]byte, sumsHeader)
	copy(b, sumsMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint64(b[16:], uint64(size))
	binary.LittleEndian.PutUint64(b[24:], uint64(chunkSize))
	return b
}

// chunkSums are what a chunk is compared with.
type chunkSums struct {
	digest [sumSize]byte
	crcs   []byte // of its blocks
}

// chunkKinds are the kinds of a chunk's blocks, two bits each.
type chunkKinds struct {
	bits [chunkBlks / 4]byte
	data bool // some of them are data
}

// chunks are the chunks that are not all holes, in order.
func (x *index) chunks() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for b := int64(0); b < x.blocks; {
			v, n := x.run(b, x.blocks)
			if block.Kind(v) == block.Hole && (n >= chunkBlks || b+n == x.blocks) {
				if b+n == x.blocks {
					return
				}
				b += n - n%chunkBlks
				continue
			}
			if !yield(b / chunkBlks) {
				return
			}
			b += chunkBlks
		}
	}
}

// chunk is what the root digest takes in of chunk c.
func (x *index) chunk(c int64) (k chunkKinds) {
	b := c * chunkBlks
	end := min(b+chunkBlks, x.blocks)
	for i := b; i < end; {
		v, n := x.run(i, end)
		if block.Kind(v) != block.Hole {
			for j := i - b; j < i-b+n; j++ {
				k.bits[j>>2] |= byte(v) << (j & 3 * 2)
			}
		}
		k.data = k.data || block.Kind(v) == block.Data
		i += n
	}
	return k
}

// held is how many bytes are data and how many are zero, where values are kinds.
func (x *index) held() (data, zero int64) {
	for b := int64(0); b < x.blocks; {
		v, n := x.run(b, x.blocks)
		switch block.Kind(v) {
		case block.Data:
			data += n << blockBits
		case block.Zero:
			zero += n << blockBits
		}
		b += n
	}
	return data, zero
}

// chunkSum digests the content of a chunk, holes and zeros as zeros. Where some of it is data, all of it is in buf
// then.
func chunkSum(r io.ReaderAt, k chunkKinds, c, size int64, buf []byte) (sum [sumSize]byte, err error) {
	b := buf[:min(chunkSize, size-c*chunkSize)]
	if !k.data {
		if int64(len(b)) == chunkSize {
			return zeroSum(), nil
		}
		clear(b)
	} else if n, err := r.ReadAt(b, c*chunkSize); n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return sum, fmt.Errorf("read chunk %d: %w", c, err)
	}
	return sha256.Sum256(b), nil
}

// zeroSum is the digest of a whole chunk of zeros.
var zeroSum = sync.OnceValue(func() [sumSize]byte { return sha256.Sum256(make([]byte, chunkSize)) })

// eachChunk calls fn for every chunk that is not all holes, from as many goroutines as there are processors. Each gets
// an aligned buffer of a chunk.
func eachChunk(ctx context.Context, kinds *index, fn func(c int64, buf []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int64)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			buf := alignedBuffer(int(chunkSize))
			for c := range work {
				if ctx.Err() != nil {
					continue
				}
				if err := fn(c, buf); err != nil {
					cancel(err)
				}
			}
		})
	}
	for c := range kinds.chunks() {
		if ctx.Err() != nil {
			break
		}
		work <- c
	}
	close(work)
	wg.Wait()
	return context.Cause(ctx)
}

// rootDigest is the digest over the sums and kinds of all chunks that are not all holes. Each of them is shown to see.
func rootDigest(sums io.ReaderAt, size int64, kinds *index, see ...func(c int64, sum [sumSize]byte)) (string, error) {
	h := newRoot(size)
	var sum [sumSize]byte
	for c := range kinds.chunks() {
		if _, err := sums.ReadAt(sum[:], sumsHeader+c*sumSize); err != nil {
			return "", fmt.Errorf("sum of chunk %d: %w", c, err)
		}
		addRoot(h, c, sum, kinds.chunk(c))
		for _, fn := range see {
			fn(c, sum)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func newRoot(size int64) hash.Hash {
	h := sha256.New()
	h.Write([]byte("drover layer 1\n"))
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(size))
	h.Write(b[:])
	return h
}

func addRoot(h hash.Hash, c int64, sum [sumSize]byte, k chunkKinds) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(c))
	h.Write(b[:])
	h.Write(sum[:])
	h.Write(k.bits[:])
}
