package stack

import (
	"log/slog"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// ready reports whether the index knows all blocks of q. If not, q waits for the first page that is missing.
func (r *Replica) ready(q *block.Request) bool {
	for p := int(q.Off >> (blockBits + pageBits)); p <= int((q.Off+q.Len-1)>>(blockBits+pageBits)); p++ {
		if r.idx.Built(p) || r.buildNow(p) {
			continue
		}
		list, building := r.waiting[p]
		r.waiting[p] = append(list, q)
		if !building {
			r.build(p)
		}
		return false
	}
	return true
}

// Nothing reports whether a read of a range, of whole blocks, would surely be of zeros alone, for which no file is
// read. On the loop's thread.
func (r *Replica) Nothing(off, n int64) bool {
	q := block.Request{Op: block.OpDiscard, Off: off, Len: n}
	if r.holding > 0 || r.check(&q) != nil {
		return false
	}
	for p := int(off >> (blockBits + pageBits)); p <= int((off+n-1)>>(blockBits+pageBits)); p++ {
		if !r.idx.Built(p) {
			return false
		}
	}
	for b, end := off>>blockBits, (off+n)>>blockBits; b < end; {
		v, k := r.idx.Run(b, end)
		if v >= fromHead {
			return false
		}
		b += k
	}
	return true
}

// buildNow builds a page where memory says what it holds.
func (r *Replica) buildNow(p int) bool {
	if !r.fresh || !r.noZeros || r.merge != nil {
		return false
	}
	v, full := fromNowhere, false
	for k := len(r.layers) - 1; k >= 0 && !full; k-- {
		m := r.layers[k].m
		kind, ok := m.Uniform(p)
		if !ok || kind != block.Hole && m.Length()>>blockBits < int64(p)<<pageBits+int64(r.idx.PageLen(p)) {
			return false
		}
		switch kind {
		case block.Data:
			v, full = fromLayer+uint16(k), true
		case block.Zero:
			v, full = fromZero, true
		}
	}
	r.idx.Uniform[p] = v
	return true
}

// build builds a page in the worker and starts what waits for it.
func (r *Replica) build(p int) {
	n := r.idx.PageLen(p)
	r.work.put(func() {
		vals := make([]uint16, n)
		err := resolve(vals, p, r.layers, &r.log.Zeros, r.fds[0])
		r.merge.moved(vals, int64(p)<<pageBits, r.layers)
		if err != nil {
			slog.Error("index of a replica cannot be built; its I/O fails", "replica", r.dir, "page", p, "error", err)
		}
		r.ring.Post(func() {
			list := r.waiting[p]
			delete(r.waiting, p)
			if err == nil {
				r.idx.Load(p, vals)
			}
			for _, q := range list {
				if err != nil {
					r.finish(q, unix.EIO)
				} else {
					r.begin(q)
				}
			}
		})
	})
}

// resolve fills vals with where the blocks of page p are read from. Layers come bottom first; zeros is the head's
// record, which the data in the head (-1: none) overrides.
func resolve(vals []uint16, p int, layers []*layer, zeros *format.Index, head int) error {
	kinds := new([pageBlocks]block.Kind)
	for k, l := range layers {
		if kind, ok := l.m.Uniform(p); ok && kind == block.Hole {
			continue
		}
		if err := l.m.Load(p, kinds); err != nil {
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
