package restoring

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"iter"

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

// newPlan plans the layer of an open backup; nil: the backup, its damage or the disk allows no plan.
func newPlan(ctx context.Context, on block.Layers, open block.Backup) (*plan, error) {
	b, ok := open.(block.ChunkedBackup)
	planner, plans := on.(block.LayerPlanner)
	n := open.Size()
	if !ok || !plans || n <= 0 || n > api.MaxVolumeSize {
		return nil, nil
	}
	p := &plan{content: n, size: (n + block.Size - 1) / block.Size * block.Size}
	chunks := (n + block.ChunkSize - 1) / block.ChunkSize
	p.data = make([]uint64, (chunks+63)/64)
	sums := make([]byte, 0, 64*sumSize)
	err := b.Digests(ctx, func(c int64, sum [32]byte) {
		p.data[c/64] |= 1 << (c % 64)
		sums = append(binary.LittleEndian.AppendUint64(sums, uint64(c)), sum[:]...)
	})
	if err == nil {
		err = p.padLast(ctx, b, chunks-1, sums)
	}
	switch {
	case api.Is(err, api.Corrupt):
		return nil, nil // the restore tells which chunks are damaged
	case err != nil:
		return nil, err
	}
	p.root, p.file, err = planner.PlanLayer(n, eachSum(sums))
	return p, err
}

// eachSum yields pairs of a chunk and its digest.
func eachSum(pairs []byte) iter.Seq2[int64, [32]byte] {
	return func(yield func(int64, [32]byte) bool) {
		for ; len(pairs) > 0; pairs = pairs[8+sumSize:] {
			if !yield(int64(binary.LittleEndian.Uint64(pairs)), [32]byte(pairs[8:])) {
				return
			}
		}
	}
}

// padLast replaces the digest of a last chunk with a part of a block: a layer has whole blocks.
func (p *plan) padLast(ctx context.Context, b block.ChunkedBackup, last int64, pairs []byte) error {
	if p.content == p.size || !p.isData(last) {
		return nil
	}
	buf := make([]byte, p.size-last*block.ChunkSize)
	if err := b.ReadChunk(ctx, last, buf[:p.content-last*block.ChunkSize]); err != nil {
		return err
	}
	sum := sha256.Sum256(buf)
	copy(pairs[len(pairs)-sumSize:], sum[:])
	return nil
}

func (p *plan) isData(c int64) bool { return p.data[c/64]>>(c%64)&1 == 1 }

// length is the length of a chunk of the layer.
func (p *plan) length(c int64) int64 { return min(block.ChunkSize, p.size-c*block.ChunkSize) }

// digest is the digest of a chunk.
func (p *plan) digest(c int64) [sumSize]byte {
	header := int64(len(p.file)) - (p.size+block.ChunkSize-1)/block.ChunkSize*sumSize
	return [sumSize]byte(p.file[header+c*sumSize:])
}

// matches reports whether bytes are those of a chunk.
func (p *plan) matches(c int64, b []byte) bool { return sha256.Sum256(b) == p.digest(c) }

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
	chunks := (size + block.ChunkSize - 1) / block.ChunkSize
	return filledChunks{whole: make([]uint64, (chunks+63)/64), part: map[int64]int64{}}
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
