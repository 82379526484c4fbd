package longhorn

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/digests"
	"drover.io/drover/block"
)

// chunkLength is the length of a chunk.
func (o *Opened) chunkLength(chunk int64) int64 {
	return min(block.ChunkSize, o.Size()-chunk*block.ChunkSize)
}

// keyOf is the name of a chunk in the table of digests: the block's checksum, or what the chunk is of the base's file.
// zeros: the chunk is part of a block of zeros.
func (o *Opened) keyOf(chunk int64) (k digests.Key, zeros bool, err error) {
	off := chunk * block.ChunkSize
	place := off / o.blocks.blockSize
	if !o.blocks.has(place) {
		name := fmt.Sprintf("image %s, %d bytes at %d", o.baseSum, o.chunkLength(chunk), off)
		return digests.Key{Name: sha256.Sum256([]byte(name))}, off >= o.baseEnd(), nil
	}
	sum, err := o.blocks.sum(place)
	if err != nil || o.isZeros(place, sum) {
		return k, err == nil, err
	}
	_, err = hex.Decode(k.Name[:], []byte(sum))
	k.Part = uint32(off % o.blocks.blockSize / block.ChunkSize) //nolint:gosec // less than eight
	return k, false, err
}

// note notes the digests of chunks from off on, whose bytes were compared with a checksum.
func (o *Opened) note(off int64, b []byte, mark uint64) error {
	if o.digests == nil {
		return nil
	}
	for ; len(b) > 0; off += block.ChunkSize {
		n := min(block.ChunkSize, len(b))
		k, zeros, err := o.keyOf(off / block.ChunkSize)
		if err != nil {
			return err
		}
		if !zeros && o.digests.Put(k, sha256.Sum256(b[:n]), mark) && mark == 0 {
			return api.Errorf(api.Unavailable, "%s: chunk at offset %d: the node's table had another digest, and is corrected "+
				"now; the next attempt compares again", o.object, off)
		}
		b = b[n:]
	}
	return nil
}

// digest is what the node knows of a chunk. The digest of zeros is always known.
func (o *Opened) digest(chunk int64) (e digests.Entry, known bool) {
	k, zeros, err := o.keyOf(chunk)
	if err != nil {
		return e, false
	}
	if zeros {
		e.Digest = zerosOf(o.chunkLength(chunk))
		return e, true
	}
	if e, known = o.digests.Find(k); known {
		return e, true
	}
	off := chunk * block.ChunkSize
	if of, is := o.base.(block.DigestSource); is && !o.blocks.has(off/o.blocks.blockSize) &&
		off+block.ChunkSize <= min(o.baseEnd(), o.Size()) {
		e.Digest, known = of.Digest(chunk)
	}
	return e, known
}

// Digest implements block.DigestSource.
func (o *Opened) Digest(chunk int64) (sum [32]byte, known bool) {
	if o.digests == nil || chunk < 0 || chunk*block.ChunkSize >= o.Size() {
		return sum, false
	}
	e, known := o.digest(chunk)
	return e.Digest, known
}

// eachChunk calls each, in order, with the chunks that may have other bytes than zeros.
func (o *Opened) eachChunk(each func(chunk int64) error) error {
	return o.eachPart(func(off, n int64) error {
		for c := off / block.ChunkSize; c*block.ChunkSize < off+n; c++ {
			if err := each(c); err != nil {
				return err
			}
		}
		return nil
	})
}

// Known counts the chunks that may have other bytes than zeros, and how many of them have a known digest.
func (o *Opened) Known() (known, total int64, err error) {
	err = o.eachChunk(func(chunk int64) error {
		total++
		if _, is := o.digest(chunk); is {
			known++
		}
		return nil
	})
	return known, total, err
}

// Digests implements block.ChunkedBackup.
func (o *Opened) Digests(ctx context.Context, each func(chunk int64, sum [32]byte)) error {
	if o.digests == nil {
		return api.Errorf(api.Unsupported, "%s: the node knows no digests", o.object)
	}
	return o.eachChunk(func(chunk int64) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		e, known := o.digest(chunk)
		switch {
		case !known:
			return o.explainUnknown()
		case e.Digest != zerosOf(o.chunkLength(chunk)):
			each(chunk, e.Digest)
		}
		return nil
	})
}

// explainUnknown is the error for digests that are not known.
func (o *Opened) explainUnknown() error {
	known, total, err := o.Known()
	if err != nil {
		return err
	}
	return api.Errorf(api.Unsupported, "%s: the node knows the digests of %d %% of the chunks; run `drover backup verify`"+
		", and restores of the backup begin at once", o.object, known*100/max(total, 1))
}

// ReadChunk implements block.ChunkedBackup. Without a known digest, the checksum alone is compared.
func (o *Opened) ReadChunk(ctx context.Context, chunk int64, buf []byte) error {
	off := chunk * block.ChunkSize
	if chunk < 0 || off >= o.Size() || int64(len(buf)) != o.chunkLength(chunk) {
		return api.Errorf(api.OutOfRange, "%s: has no chunk %d of %d bytes", o.object, chunk, len(buf))
	}
	ctx, cancel := o.withEnd(ctx)
	defer cancel()
	var err error
	if place, at := off/o.blocks.blockSize, off%o.blocks.blockSize; o.blocks.has(place) &&
		o.blocks.length(place) > int64(len(buf)) {
		err = o.cache.read(o, place, at, buf)
	} else {
		var zeros bool
		if zeros, err = o.readPart(ctx, off, buf, 0); zeros {
			clear(buf)
		}
	}
	if api.Is(err, api.Corrupt) {
		if gone := o.confirm(ctx); gone != nil {
			err = gone
		}
	}
	return err
}

// readPart reads a range of eachPart: a block, or a chunk of the base. mark and zeros are those of read.
func (o *Opened) readPart(ctx context.Context, off int64, buffer []byte, mark uint64) (zeros bool, err error) {
	if place := off / o.blocks.blockSize; o.blocks.has(place) {
		return o.read(ctx, place, buffer, mark)
	}
	return false, o.readBaseChunk(buffer, off, mark)
}

var zeroChunk = sync.OnceValue(func() [sha256.Size]byte { return sha256.Sum256(make([]byte, block.ChunkSize)) })

// zerosOf is the digest of n zeros.
func zerosOf(n int64) [sha256.Size]byte {
	if n == block.ChunkSize {
		return zeroChunk()
	}
	return sha256.Sum256(make([]byte, n))
}

// isZero reports whether all bytes are zeros.
func isZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
