package stack

import "drover.io/drover/replicas/stack/format"

// Units of a volume, and the values of a block in the index of an open stack.
const (
	blockBits  = format.BlockBits
	blockSize  = format.BlockSize
	pageBits   = format.PageBits
	pageBlocks = format.PageBlocks
	pageSize   = format.PageSize
	chunkSize  = format.ChunkSize
	chunkBlks  = format.ChunkBlocks
	sumSize    = format.SumSize
	sumsHeader = format.SumsHeader
	crcSize    = format.CRCSize

	fromNowhere = format.FromNowhere
	fromZero    = format.FromZero
	fromHead    = format.FromHead
	fromLayer   = format.FromLayer
	unbuilt     = format.Unbuilt
	maxLayers   = format.MaxLayers
)
