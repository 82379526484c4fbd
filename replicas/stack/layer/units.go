package layer

import "drover.io/drover/replicas/stack/format"

// Units of a layer.
const (
	blockBits  = format.BlockBits
	blockSize  = format.BlockSize
	pageBits   = format.PageBits
	pageBlocks = format.PageBlocks
	chunkSize  = format.ChunkSize
	chunkBlks  = format.ChunkBlocks
	sumSize    = format.SumSize
	sumsHeader = format.SumsHeader
	crcSize    = format.CRCSize

	fromZero  = format.FromZero
	fromHead  = format.FromHead
	fromLayer = format.FromLayer
)
