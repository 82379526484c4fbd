package stack

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// Delta tells, from the maps alone, which blocks of one stack of layers may differ from those of another: where both
// read a block from the same layer, or both have nothing there, it is the same. One goroutine at a time.
type Delta struct {
	size         int64
	base, target []*layer
	common       int // layers that both begin with

	none format.Index // no head, no zeros in it
	page int
	a, b []uint16
}

// Delta opens two stacks of finished or frozen layers, bottom first. Size is that of the target.
func (d *Disk) Delta(base, target []string, size int64) (_ *Delta, err error) {
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
		l, err := d.findLayer(uid, 0, false)
		if err != nil {
			return nil, err
		}
		x.target = append(x.target, l)
	}
	x.base = slices.Clone(x.target[:x.common])
	for _, uid := range base[x.common:] {
		l, err := d.findLayer(uid, 0, false)
		if err != nil {
			return nil, err
		}
		x.base = append(x.base, l)
	}
	return x, nil
}

// Changes are the blocks of a replica's snapshot that differ from those of another one; without a base, those that it
// holds.
func (d *Disk) Changes(replica, base, target string) (*Delta, error) {
	for tries := 0; ; tries++ {
		m, err := d.Stack(replica)
		if err != nil {
			return nil, err
		}
		chain := func(uid string) ([]string, error) {
			k := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == uid })
			if k < 0 {
				return nil, api.Errorf(api.NotFound, "replica %s has no snapshot %s", replica, uid)
			}
			return m.Chain(m.Snapshots[k].Layer)
		}
		var from []string
		if base != "" {
			if from, err = chain(base); err != nil {
				return nil, err
			}
		}
		to, err := chain(target)
		if err != nil {
			return nil, err
		}
		size := int64(0)
		if len(to) > 0 {
			if size, _, err = d.LayerSize(to[len(to)-1]); err != nil && !api.Is(err, api.NotFound) {
				return nil, err
			}
		}
		var x *Delta
		if err == nil {
			x, err = d.Delta(from, to, size)
		}
		if !api.Is(err, api.NotFound) || tries == 3 { // else a merge was faster
			return x, err
		}
	}
}

// Size is that of the target, in bytes.
func (x *Delta) Size() int64 { return x.size }

// Next is the first range at or after off, cut to whole blocks, that differs; none: io.EOF.
func (x *Delta) Next(off int64) (block.Extent, error) {
	blocks := x.size >> blockBits
	start, end := int64(-1), int64(-1)
	for b := off >> blockBits; b < blocks; b++ {
		differs, err := x.differs(b)
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

// differs looks at one block; a and b are nil where a whole page is the same.
func (x *Delta) differs(b int64) (bool, error) {
	if p := int(b >> pageBits); p != x.page {
		x.a, x.b, x.page = nil, nil, p
		if !x.untouched(p) {
			x.a, x.b = make([]uint16, x.none.PageLen(p)), make([]uint16, x.none.PageLen(p))
			if err := errors.Join(resolve(x.a, p, x.base, &x.none, -1), resolve(x.b, p, x.target, &x.none, -1)); err != nil {
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

// untouched reports whether no layer that only one of the two has holds anything in a page, as far as that is cheap to
// know.
func (x *Delta) untouched(p int) bool {
	for _, l := range append(slices.Clone(x.base[x.common:]), x.target[x.common:]...) {
		if kind, ok := l.m.Uniform(p); !ok || kind != block.Hole {
			return false
		}
	}
	return true
}

// Close lets go of the layers.
func (x *Delta) Close() error {
	var errs []error
	for _, l := range x.target {
		errs = append(errs, l.close())
	}
	if len(x.base) > x.common {
		for _, l := range x.base[x.common:] {
			errs = append(errs, l.close())
		}
	}
	return errors.Join(errs...)
}
