package stack

import "drover.io/drover/replicas/stack/format"

// Units of a volume, and the values of a block in the index of an open stack.
const (
	BlockBits  = format.BlockBits
	BlockSize  = format.BlockSize
	PageBits   = format.PageBits
	PageBlocks = format.PageBlocks
	pageSize   = format.PageSize
	ChunkSize  = format.ChunkSize
	ChunkBlks  = format.ChunkBlocks
	SumSize    = format.SumSize
	SumsHeader = format.SumsHeader
	CRCSize    = format.CRCSize

	FromNowhere = format.FromNowhere
	FromZero    = format.FromZero
	FromHead    = format.FromHead
	FromLayer   = format.FromLayer
	Unbuilt     = format.Unbuilt
	maxLayers   = format.MaxLayers
)
