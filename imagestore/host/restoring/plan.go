package restoring

import (
	"cmp"
	"context"
	"crypto/sha256"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

const sumSize = sha256.Size

// plan is the layer of a backup: each chunk that is not zeros is data, any other a hole.
type plan struct {
	content int64 // bytes of the backup
	size    int64 // bytes of the layer: whole blocks
	root    string
	file    []byte // of digests
	data    []uint64
}

// newPlan plans the layer of an open backup; nil: the backup, its damage or the disk allows no plan, and why tells
// users what they can do.
func newPlan(ctx context.Context, on block.Layers, open block.Backup) (_ *plan, why, err error) {
	b, ok := open.(block.ChunkedBackup)
	planner, plans := on.(block.LayerPlanner)
	n := open.Size()
	if !ok || !plans || n <= 0 || n > api.MaxVolumeSize {
		return nil, nil, nil
	}
	p := &plan{content: n, size: (n + block.Size - 1) / block.Size * block.Size}
	p.data = make([]uint64, (chunksOf(n)+63)/64)
	var failed error // of the backup
	root, file, err := planner.PlanLayer(n, func(yield func(int64, [sumSize]byte) bool) {
		failed = p.listData(ctx, b, yield)
	})
	switch {
	case api.Is(failed, api.Corrupt):
		return nil, nil, nil // the restore tells which chunks are damaged
	case api.Is(failed, api.Unsupported):
		return nil, failed, nil // the restore computes the digests
	case failed != nil:
		return nil, nil, failed
	}
	p.root, p.file = root, file
	return p, nil, err
}

// listData lists the chunks with data and their digests, until each returns false.
func (p *plan) listData(ctx context.Context, b block.ChunkedBackup, each func(int64, [sumSize]byte) bool) error {
	var failed error
	more := true
	err := b.Digests(ctx, func(c int64, sum [sumSize]byte) {
		if more = more && failed == nil; !more {
			return
		}
		p.data[c/64] |= 1 << (c % 64)
		if (c+1)*block.ChunkSize > p.content && p.content < p.size {
			if sum, failed = p.padLast(ctx, b, c); failed != nil {
				return
			}
		}
		more = each(c, sum)
	})
	return cmp.Or(err, failed)
}

// padLast is the digest of a last chunk with a part of a block: a layer has whole blocks.
func (p *plan) padLast(ctx context.Context, b block.ChunkedBackup, last int64) (sum [sumSize]byte, err error) {
	buf := make([]byte, p.size-last*block.ChunkSize)
	if err := b.ReadChunk(ctx, last, buf[:p.content-last*block.ChunkSize]); err != nil {
		return sum, err
	}
	return sha256.Sum256(buf), nil
}

// chunksOf is the number of chunks of n bytes.
func chunksOf(n int64) int64 { return (n + block.ChunkSize - 1) / block.ChunkSize }

// planSize is the memory that the plan of a backup of n bytes takes, if all chunks have data.
func planSize(n int64) int64 { return chunksOf(n) * sumSize }

func (p *plan) isData(c int64) bool { return p.data[c/64]>>(c%64)&1 == 1 }

// length is the length of a chunk of the layer.
func (p *plan) length(c int64) int64 { return min(block.ChunkSize, p.size-c*block.ChunkSize) }

// digest is the digest of a chunk.
func (p *plan) digest(c int64) [sumSize]byte {
	header := int64(len(p.file)) - planSize(p.size)
	return [sumSize]byte(p.file[header+c*sumSize:])
}

// matches reports whether bytes are those of a chunk.
func (p *plan) matches(c int64, b []byte) bool { return sha256.Sum256(b) == p.digest(c) }

// accepts reports whether n bytes at off may have a digest. The last chunk is padded in the layer, and is compared when
// the layer is sealed.
func (p *plan) accepts(off, n int64, digest [sumSize]byte) bool {
	c := off / block.ChunkSize
	return off%block.ChunkSize != 0 || n != p.length(c) || p.isData(c) && p.digest(c) == digest
}

// extent is the extent of one kind from off on.
func (p *plan) extent(off int64) block.Extent {
	c := off / block.ChunkSize
	data := p.isData(c)
	for c++; c*block.ChunkSize < p.size && p.isData(c) == data; c++ {
	}
	e := block.Extent{Off: off, Len: min(c*block.ChunkSize, p.size) - off}
	if data {
		e.Kind = block.Data
	}
	return e
}

// filledChunks counts the bytes of chunks that a restore has written.
type filledChunks struct {
	whole []uint64
	part  map[int64]int64 // bytes of chunks that are not whole
}

func newFilledChunks(size int64) filledChunks {
	return filledChunks{whole: make([]uint64, (chunksOf(size)+63)/64), part: map[int64]int64{}}
}

func (f *filledChunks) has(c int64) bool {
	return c/64 < int64(len(f.whole)) && f.whole[c/64]>>(c%64)&1 == 1
}

// add adds n written bytes of a backup of size bytes. Writes that come twice are not added.
func (f *filledChunks) add(size, off, n int64) {
	for end := off + n; off < end; {
		c := off / block.ChunkSize
		next := min((c+1)*block.ChunkSize, end)
		if f.part[c] += next - off; f.part[c] >= min(block.ChunkSize, size-c*block.ChunkSize) {
			f.set(c)
		}
		off = next
	}
}

// set adds a whole chunk.
func (f *filledChunks) set(c int64) {
	delete(f.part, c)
	f.whole[c/64] |= 1 << (c % 64)
}

// reset forgets chunks that are not whole: a restore that continues writes them again.
func (f *filledChunks) reset() { clear(f.part) }
