package layer

import (
	"encoding/hex"
	"iter"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// PlanLayer implements block.LayerPlanner. A Writer that writes the same chunks by Exact seals a layer with these
// digests.
func (d *Store) PlanLayer(size int64, sums iter.Seq2[int64, [sumSize]byte]) (root string, file []byte, err error) {
	if size <= 0 || size > api.MaxVolumeSize {
		return "", nil, api.Errorf(api.OutOfRange, "%d is not a size that a layer can have", size)
	}
	blocks := (size + blockSize - 1) >> blockBits
	chunks := (blocks + chunkBlks - 1) / chunkBlks
	file = make([]byte, sumsHeader+chunks*sumSize)
	copy(file, format.SumsHeaderOf(blocks<<blockBits))
	h := format.NewRoot(blocks << blockBits)
	data := slices.Repeat([]block.Kind{block.Data}, int(chunkBlks))
	last := int64(-1)
	for c, sum := range sums {
		if c <= last || c >= chunks {
			return "", nil, api.Errorf(api.Invalid, "chunk %d of a layer of %d bytes: out of order, or behind the end", c, size)
		}
		last = c
		copy(file[sumsHeader+c*sumSize:], sum[:])
		format.AddRoot(h, c, sum, format.KindsOf(data[:min(chunkBlks, blocks-c*chunkBlks)]))
	}
	return hex.EncodeToString(h.Sum(nil)), file, nil
}
