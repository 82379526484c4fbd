package layer

import (
	"context"
	"crypto/sha256"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// AdoptChunks implements block.ChunkAdopter. It reads past the page cache, which may hold bytes that a failed sync of
// an earlier process kept from the disk.
func (w *Writer) AdoptChunks(ctx context.Context, digestOf func(chunk int64) (digest [sumSize]byte, known bool),
	adopted func(chunk int64)) error {
	size, err := w.checkAccess(0, 0)
	if err != nil {
		return w.nameError(err)
	}
	found := format.NewIndex(size>>blockBits, uint16(block.Hole))
	for off := int64(0); off < size; {
		from, to, err := file.NextData(int(w.data.Fd()), off, size)
		if err != nil {
			return w.nameError(err)
		}
		if from < to {
			found.Set(from>>blockBits, (to+blockSize-1)>>blockBits, uint16(block.Data))
		}
		off = to
	}
	return w.nameError(EachChunk(ctx, &found, func(c int64, buf []byte) error {
		buf = buf[:min(chunkSize, size-c*chunkSize)]
		n, _ := w.direct.ReadAt(buf, c*chunkSize) // chunks that cannot be read are written again
		digest, known := digestOf(c)
		if !known || n < len(buf) || sha256.Sum256(buf) != digest {
			return w.data.Punch(c*chunkSize, int64(len(buf)))
		}
		if err := w.putSums(c, format.ChunkSums{Digest: digest, CRCs: format.ChunkCRCs(buf)}); err != nil {
			return err
		}
		w.Mu.Lock()
		w.kinds.Set(c*chunkBlks, c*chunkBlks+int64(len(buf))>>blockBits, uint16(block.Data))
		w.known[c] = true
		w.Mu.Unlock()
		adopted(c)
		return nil
	}))
}

var _ block.ChunkAdopter = (*Writer)(nil)
