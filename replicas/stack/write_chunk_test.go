package stack

import (
	"crypto/sha256"
	"math/rand/v2"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestWriteChunkMakesTheSameLayer: a layer of chunks that are written with their digests has the root digest of a layer
// that hashes them, with zeros within chunks and a short last one, and after a later write into a chunk. A digest that
// is given for less than a chunk is not used.
func TestWriteChunkMakesTheSameLayer(t *testing.T) {
	rng := rand.New(rand.NewPCG(suite.Seed(t), 0))
	d := newDisk(t)
	const size = 3*chunkSize + 5*blockSize
	roots := map[bool]string{}
	buf := block.AlignedBuffer(int(chunkSize))
	var chunks [4][]byte
	for c := range chunks {
		chunks[c] = block.AlignedBuffer(int(min(chunkSize, size-int64(c)*chunkSize)))
		randomBytes(rng, chunks[c])
		clear(chunks[c][blockSize : 3*blockSize])
	}
	randomBytes(rng, buf)
	for _, given := range []bool{false, true} {
		uid := string(api.NewUID())
		w, err := d.Create(t.Context(), uid, size)
		if err != nil {
			t.Fatal(err)
		}
		to, takes := w.(block.DigestSink)
		if !takes {
			t.Fatal("the writer takes no digests")
		}
		for c, b := range chunks {
			off := int64(c) * chunkSize
			if given {
				err = to.WriteChunk(b, off, sha256.Sum256(b))
			} else {
				_, err = w.WriteAt(b, off)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		part := buf[:4*blockSize]
		if given { // no whole chunk
			err = to.WriteChunk(part, chunkSize+blockSize, [32]byte{1})
		} else {
			_, err = w.WriteAt(part, chunkSize+blockSize)
		}
		if err != nil {
			t.Fatal(err)
		}
		if roots[given], _, err = w.Seal(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := d.Verify(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	if roots[false] != roots[true] {
		t.Errorf("the root digests differ: %v", roots)
	}
}
