package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Delta lists, from the maps alone, the blocks that may differ between two stacks of layers: a block is the same if
// both stacks read it from the same layer, or neither stack has it. A Delta belongs to one goroutine at a time.
type Delta struct {
	size         int64
	base, target []*layer.Layer
	common       int // layers at the bottom of both stacks

	none format.Index // the zero records of no head
	page int
	a, b []uint16
}

// OpenDelta opens two stacks of finished or frozen layers, bottom first. Size is the size of the target.
func OpenDelta(d *layer.Store, base, target []string, size int64) (_ *Delta, err error) {
	x := &Delta{size: size, none: format.NewIndex(size>>blockBits, 0), page: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, x.Close())
		}
	}()
	for x.common < min(len(base), len(target)) && base[x.common] == target[x.common] {
		x.common++
	}
	for _, uid := range target {
		l, err := d.Find(uid, 0, false)
		if err != nil {
			return nil, err
		}
		x.target = append(x.target, l)
	}
	x.base = slices.Clone(x.target[:x.common])
	for _, uid := range base[x.common:] {
		l, err := d.Find(uid, 0, false)
		if err != nil {
			return nil, err
		}
		x.base = append(x.base, l)
	}
	return x, nil
}

// Size is the size of the target, in bytes.
func (x *Delta) Size() int64 { return x.size }

// Next returns the first differing range at or after off, in whole blocks; io.EOF: no further range.
func (x *Delta) Next(off int64) (block.Extent, error) { return x.nextBelow(off, x.size) }

// Chunks lists the chunks with differing blocks, in ascending order.
func (x *Delta) Chunks(ctx context.Context) (list []int64, err error) {
	for c := range (x.size + chunkSize - 1) / chunkSize {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		_, err := x.nextBelow(c*chunkSize, min((c+1)*chunkSize, x.size))
		if errors.Is(err, io.EOF) {
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	return list, nil
}

// nextBelow is Next for the part of the stacks below limit.
func (x *Delta) nextBelow(off, limit int64) (block.Extent, error) {
	blocks := limit >> blockBits
	start, end := int64(-1), int64(-1)
	for b := off >> blockBits; b < blocks; b++ {
		differs, err := x.blockDiffers(b)
		if err != nil {
			return block.Extent{}, err
		}
		switch {
		case differs && start < 0:
			start, end = b, b+1
		case differs:
			end = b + 1
		case start >= 0:
			return block.Extent{Off: start << blockBits, Len: (end - start) << blockBits, Kind: block.Data}, nil
		case x.a == nil: // nothing differs in this page
			b |= pageBlocks - 1
		}
	}
	if start >= 0 {
		return block.Extent{Off: start << blockBits, Len: (end - start) << blockBits, Kind: block.Data}, nil
	}
	return block.Extent{}, io.EOF
}

// blockDiffers compares one block; a and b are nil if a whole page is the same.
func (x *Delta) blockDiffers(b int64) (bool, error) {
	if p := int(b >> pageBits); p != x.page {
		x.a, x.b, x.page = nil, nil, p
		if !x.pageUntouched(p) {
			x.a, x.b = make([]uint16, x.none.PageLen(p)), make([]uint16, x.none.PageLen(p))
			err := errors.Join(layer.Resolve(x.a, p, x.base, &x.none, -1), layer.Resolve(x.b, p, x.target, &x.none, -1))
			if err != nil {
				return false, fmt.Errorf("map: %w", err)
			}
		}
	}
	if x.a == nil {
		return false, nil
	}
	was, is := x.a[b&(pageBlocks-1)], x.b[b&(pageBlocks-1)]
	if is < fromHead && was < fromHead {
		return false, nil
	}
	return is != was || int(is-fromLayer) >= x.common, nil
}

// pageUntouched reports whether the layers of only one stack surely hold nothing in a page. The answer needs no page of
// a map.
func (x *Delta) pageUntouched(p int) bool {
	for _, l := range append(slices.Clone(x.base[x.common:]), x.target[x.common:]...) {
		if kind, ok := l.Map.Uniform(p); !ok || kind != block.Hole {
			return false
		}
	}
	return true
}

// Close closes the layers.
func (x *Delta) Close() error {
	var errs []error
	for _, l := range x.target {
		errs = append(errs, l.Close())
	}
	if len(x.base) > x.common {
		for _, l := range x.base[x.common:] {
			errs = append(errs, l.Close())
		}
	}
	return errors.Join(errs...)
}
