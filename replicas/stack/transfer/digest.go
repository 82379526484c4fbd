package transfer

import "drover.io/drover/replicas/stack/format"

// Digest implements block.DigestSource. The digest of a chunk is known if the chunk reads as zeros, or if one finished
// layer supplies all of its data and holds no other data there. No digest is known of a head's data, of hydrated and
// frozen layers, or during a merge.
func (v *View) Digest(chunk int64) (sum [sumSize]byte, known bool) {
	if chunk < 0 || chunk > (v.size-1)/chunkSize || v.Merge != nil {
		return sum, false
	}
	n := min(chunkSize, v.size-chunk*chunkSize)
	if n%blockSize != 0 {
		return sum, false
	}
	from, dataBlocks, only := v.onlyLayer(chunk*chunkBlks, chunk*chunkBlks+n>>blockBits)
	switch {
	case !only:
		return sum, false
	case from == fromNowhere:
		return format.ZeroSum(n), true
	}
	return v.digests[from-fromLayer].DigestOf(chunk, n, dataBlocks)
}

// onlyLayer returns the value in the index of the layer that alone supplies all data in the blocks [b, end), and how
// many blocks; the other blocks are zeros. fromNowhere: all blocks are zeros. only is false if several layers, or a
// head, supply data.
func (v *View) onlyLayer(b, end int64) (from uint16, dataBlocks int64, only bool) {
	from = fromNowhere
	for b < end {
		val, n, err := v.runAt(b, end)
		switch {
		case err != nil || val == fromHead || val > fromHead && from != fromNowhere && from != val:
			return from, 0, false
		case val > fromHead:
			from, dataBlocks = val, dataBlocks+n
		}
		b += n
	}
	return from, dataBlocks, true
}
