package layer

import (
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Resolve fills vals with the values of page p in the index of a stack. Layers come bottom first; zeros are the zero
// records of the head. Data in the head, an open file (-1: no head), overrides zero records.
func Resolve(vals []uint16, p int, layers []*Layer, zeros *format.Index, head int) error {
	kinds := new([pageBlocks]block.Kind)
	for k, l := range layers {
		if kind, ok := l.Map.Uniform(p); ok && kind == block.Hole {
			continue
		}
		if err := l.Map.Load(p, kinds); err != nil {
			return err
		}
		for i := range vals {
			switch kinds[i] {
			case block.Data:
				vals[i] = fromLayer + uint16(k)
			case block.Zero:
				vals[i] = fromZero
			}
		}
	}
	base := int64(p) << pageBits
	end := base + int64(len(vals))
	for b := base; b < end; {
		v, n := zeros.Run(b, end)
		if v == 1 {
			for i := b; i < b+n; i++ {
				vals[i-base] = fromZero
			}
		}
		b += n
	}
	if head < 0 {
		return nil
	}
	for off := base << blockBits; ; {
		from, to, err := file.NextData(head, off, end<<blockBits)
		if err != nil {
			return err
		}
		if from >= end<<blockBits {
			return nil
		}
		for b := from >> blockBits; b < (to+blockSize-1)>>blockBits; b++ {
			vals[b-base] = fromHead
		}
		off = to
	}
}
