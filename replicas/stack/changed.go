package stack

import (
	"context"
	"errors"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Disk that the replica is on.
func (r *Replica) Disk() *Disk { return r.disk }

// SnapshotLayers are the layers of a snapshot, bottom first, and its size.
func (r *Replica) SnapshotLayers(uid string) ([]string, int64, error) {
	m := r.Meta()
	chain, err := m.chainOf(uid)
	return chain, m.Size, r.name(err)
}

// chainOf are the layers of a snapshot, bottom first.
func (m Meta) chainOf(uid string) ([]string, error) {
	i := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == uid })
	if i < 0 {
		return nil, api.Errorf(api.NotFound, "it has no snapshot %s", uid)
	}
	return m.Chain(m.Snapshots[i].Layer)
}

// Changed lists the pieces of a volume, by number, that may differ between two snapshots, as the maps tell: all pieces
// in which a layer that only one of them has holds something. from may be empty, for the layers of base, or nothing at
// all; to may be empty, for what the replica holds now, the head with it.
func (r *Replica) Changed(ctx context.Context, from, to string, base []string, piece int64) ([]int64, error) {
	if piece <= 0 || piece%blockSize != 0 {
		return nil, r.name(api.Errorf(api.Invalid, "pieces of %d bytes", piece))
	}
	r.mu.Lock() // the layers stay what they are
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return nil, err
	}
	m := r.Meta()
	a, b := base, m.Layers
	var err error
	if from != "" {
		if a, err = m.chainOf(from); err != nil {
			return nil, r.name(err)
		}
	}
	if to != "" {
		if b, err = m.chainOf(to); err != nil {
			return nil, r.name(err)
		}
	}
	common := 0
	for common < min(len(a), len(b)) && a[common] == b[common] {
		common++
	}
	found := make([]bool, (m.Size+piece-1)/piece)
	for _, uid := range append(slices.Clone(a[common:]), b[common:]...) {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		if err := r.markLayer(uid, found, piece); err != nil {
			return nil, r.name(classify(err))
		}
	}
	if to == "" {
		if err := r.markHead(found, piece, m.Size); err != nil {
			return nil, r.name(classify(err))
		}
	}
	var list []int64
	for i, is := range found {
		if is {
			list = append(list, int64(i))
		}
	}
	return list, nil
}

// markLayer marks the pieces in which a layer holds something.
func (r *Replica) markLayer(uid string, found []bool, piece int64) (err error) {
	var l *layer
	if i := slices.IndexFunc(r.layers, func(l *layer) bool { return l.rec.UID == uid }); i >= 0 {
		l = r.layers[i]
	} else {
		if l, err = r.disk.findLayer(uid, 0, true); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, l.close()) }()
	}
	kinds := new([pageBlocks]block.Kind)
	for p := range int((l.m.length()>>blockBits + pageBlocks - 1) >> pageBits) {
		if kind, ok := l.m.uniform(p); ok && kind == block.Hole {
			continue
		}
		if err := l.m.load(p, kinds); err != nil {
			return err
		}
		for i, k := range kinds {
			if k != block.Hole {
				found[(int64(p)<<pageBits+int64(i))<<blockBits/piece] = true
			}
		}
	}
	return nil
}

// markHead does so for the head. In the worker, which has the record of zeros.
func (r *Replica) markHead(found []bool, piece, size int64) (err error) {
	r.work.do(func() {
		z := &r.log.zeros
		for b := int64(0); b < z.blocks; {
			v, n := z.run(b, z.blocks)
			for i := b; v == 1 && i < b+n; i++ {
				found[i<<blockBits/piece] = true
			}
			b += n
		}
		for off := int64(0); ; {
			var at, end int64
			if at, end, err = file.NextData(int(r.head.Fd()), off, size); err != nil || at >= size {
				return
			}
			for i := at / piece; i <= (end-1)/piece; i++ {
				found[i] = true
			}
			off = end
		}
	})
	return err
}
