package stack

import (
	"context"
	"errors"
	"iter"
	"math/bits"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
)

// Disk returns the disk of the replica.
func (r *Replica) Disk() *Disk { return r.disk }

// SnapshotLayers returns the layers of a snapshot, bottom first, and the size of the volume.
func (r *Replica) SnapshotLayers(uid string) ([]string, int64, error) {
	m := r.Meta()
	chain, err := m.chainOf(uid)
	return chain, m.Size, r.nameError(err)
}

// chainOf returns the layers of a snapshot, bottom first.
func (m Meta) chainOf(uid string) ([]string, error) {
	i := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == uid })
	if i < 0 {
		return nil, api.Errorf(api.NotFound, "snapshot %s does not exist", uid)
	}
	return m.Chain(m.Snapshots[i].Layer)
}

// maxPieces bounds the pieces of a volume: the largest volume in pieces of 1 MiB.
const maxPieces = api.MaxVolumeSize >> 20

// Changed lists the pieces of a volume, by number, that may differ between two snapshots, as the maps tell: all pieces
// in which a layer of only one snapshot holds something. An empty from means the layers of base, or no layer; an empty
// to means the present content with the head. base names layers of the replica only.
func (r *Replica) Changed(ctx context.Context, from, to string, base []string, piece int64) ([]int64, error) {
	found, err := r.ChangedPieces(ctx, from, to, base, piece)
	if err != nil {
		return nil, err
	}
	return slices.Collect(found), nil
}

// ChangedPieces yields what Changed lists, in ascending order.
func (r *Replica) ChangedPieces(ctx context.Context, from, to string, base []string, piece int64) (
	iter.Seq[int64], error) {
	r.mu.Lock() // the layers stay what they are
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return nil, err
	}
	m := r.Meta()
	if piece <= 0 || piece%blockSize != 0 || (m.Size-1)/piece >= maxPieces {
		return nil, r.nameError(api.Errorf(api.Invalid, "pieces of %d bytes", piece))
	}
	own := m.AllLayers()
	for _, uid := range base {
		if !slices.Contains(own, uid) {
			return nil, r.nameError(api.Errorf(api.NotFound, "layer %q is none of its layers", uid))
		}
	}
	a, b := base, m.Layers
	var err error
	if from != "" {
		if a, err = m.chainOf(from); err != nil {
			return nil, r.nameError(err)
		}
	}
	if to != "" {
		if b, err = m.chainOf(to); err != nil {
			return nil, r.nameError(err)
		}
	}
	common := 0
	for common < min(len(a), len(b)) && a[common] == b[common] {
		common++
	}
	found := newPieces(m.Size, piece)
	for _, uid := range append(slices.Clone(a[common:]), b[common:]...) {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		if err := r.markLayer(uid, found); err != nil {
			return nil, r.nameError(diskfs.Classify(err))
		}
	}
	if to == "" {
		if err := r.markHead(found); err != nil {
			return nil, r.nameError(diskfs.Classify(err))
		}
	}
	return found.all(), nil
}

// pieces is a set of pieces of a volume.
type pieces struct {
	size, piece int64 // of the volume, and of a piece
	bits        []uint64
}

func newPieces(size, piece int64) *pieces {
	n := (size + piece - 1) / piece
	return &pieces{size: size, piece: piece, bits: make([]uint64, (n+63)/64)}
}

// mark adds the pieces of the bytes from off to end, without bytes beyond the volume.
func (p *pieces) mark(off, end int64) {
	end = min(end, p.size)
	for i := off / p.piece; i*p.piece < end; i++ {
		p.bits[i/64] |= 1 << (i % 64)
	}
}

func (p *pieces) all() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for i, w := range p.bits {
			for ; w != 0; w &= w - 1 {
				if !yield(int64(i)*64 + int64(bits.TrailingZeros64(w))) {
					return
				}
			}
		}
	}
}

// markLayer marks the pieces in which a layer holds something.
func (r *Replica) markLayer(uid string, found *pieces) (err error) {
	var l *layer.Layer
	if i := slices.IndexFunc(r.layers, func(l *layer.Layer) bool { return l.Rec.UID == uid }); i >= 0 {
		l = r.layers[i]
	} else {
		if l, err = r.disk.Find(uid, 0, true); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, l.Close()) }()
	}
	kinds := new([pageBlocks]block.Kind)
	for p := range int((l.Map.Length()>>blockBits + pageBlocks - 1) >> pageBits) {
		at := int64(p) * pageSize
		if kind, ok := l.Map.Uniform(p); ok {
			if kind != block.Hole {
				found.mark(at, min(at+pageSize, l.Map.Length()))
			}
			continue
		}
		if err := l.Map.Load(p, kinds); err != nil {
			return err
		}
		for i, k := range kinds {
			if k != block.Hole {
				found.mark(at+int64(i)*blockSize, at+int64(i+1)*blockSize)
			}
		}
	}
	return nil
}

// markHead marks the pieces in which the head holds something, in the worker, which owns the zero log.
func (r *Replica) markHead(found *pieces) (err error) {
	r.work.do(func() {
		z := &r.log.Zeros
		for b := int64(0); b < z.Blocks; {
			v, n := z.Run(b, z.Blocks)
			if v == 1 {
				found.mark(b<<blockBits, (b+n)<<blockBits)
			}
			b += n
		}
		for off := int64(0); ; {
			var at, end int64
			if at, end, err = file.NextData(int(r.head.Fd()), off, found.size); err != nil || at >= found.size {
				return
			}
			found.mark(at, end)
			off = end
		}
	})
	return err
}
