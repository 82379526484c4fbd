package stack

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// hasPages reports whether the index knows all blocks of q. If not, q waits for the first page that is missing.
func (r *Replica) hasPages(q *block.Request) bool {
	for p := int(q.Off >> (blockBits + pageBits)); p <= int((q.Off+q.Len-1)>>(blockBits+pageBits)); p++ {
		r.idx.Used[p] = true
		if r.idx.Built(p) || r.buildNow(p) {
			continue
		}
		list, building := r.waiting[p]
		r.waiting[p] = append(list, q)
		if !building {
			r.buildPage(p)
		}
		return false
	}
	return true
}

// Nothing reports whether a read of whole blocks would surely return only zeros and read no file. On the loop's thread.
func (r *Replica) Nothing(off, n int64) bool {
	q := block.Request{Op: block.OpDiscard, Off: off, Len: n}
	if r.holding > 0 || r.validateRequest(&q) != nil {
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

// buildNow builds a page without a read of a file, if possible.
func (r *Replica) buildNow(p int) bool {
	if !r.fresh || !r.noZeros || r.merge != nil {
		return false
	}
	v, full := fromNowhere, false
	for k := len(r.layers) - 1; k >= 0 && !full; k-- {
		m := r.layers[k].Map
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

// buildPage builds a page in the worker and then begins the requests that wait for the page.
func (r *Replica) buildPage(p int) {
	n := r.idx.PageLen(p)
	r.work.put(func() {
		vals := make([]uint16, n)
		err := layer.Resolve(vals, p, r.layers, &r.log.Zeros, r.fds[0])
		r.merge.Redirect(vals, int64(p)<<pageBits, r.layers)
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
					r.finishRequest(q, unix.EIO)
				} else {
					r.beginRequest(q)
				}
			}
		})
	})
}

// dropTime bounds how long DropPages holds I/O.
const dropTime = 50 * time.Millisecond

// DropPages drops the pages of the index that no I/O has used since the call before, but for pages with one value,
// which take no room. The next I/O builds them again. DropPages returns the memory that it freed, in bytes; it drops
// nothing during a merge, or while I/O takes long to end.
func (r *Replica) DropPages(ctx context.Context) (freed int64, err error) {
	unused := false
	if err := r.onLoop(func() {
		if unused = r.idx.AnyUnused(); !unused {
			r.idx.DropUnused() // begins the next term of use
		}
	}); err != nil || !unused {
		return 0, err
	}
	soon, cancel := context.WithTimeout(ctx, dropTime)
	defer cancel()
	release, err := r.quiesce(soon)
	if errors.Is(err, ErrUnderWay) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer release()
	err = r.onLoop(func() {
		if r.merge != nil || r.cutting > 0 || r.syncing > 0 {
			return
		}
		if freed = r.idx.DropUnused(); freed > 0 {
			r.fresh, r.noZeros = false, false // the head may have blocks of a dropped page
		}
	})
	return freed, err
}

// DropPages drops unused pages of the indexes of open replicas if the indexes of the disk take more than most bytes.
func (d *Disk) DropPages(ctx context.Context, most int64) {
	var total int64
	list := d.open.list()
	for _, r := range list {
		n, err := r.IndexMemory()
		if err != nil {
			continue // the replica is being closed
		}
		total += n
	}
	if total <= most {
		return
	}
	var freed int64
	for _, r := range list {
		n, err := r.DropPages(ctx)
		if err != nil && ctx.Err() == nil && !errors.Is(err, errLoopEnded) {
			slog.Warn("unused pages of an index stay in memory", "replica", r.dir, "error", err)
		}
		freed += n
	}
	if freed > 0 {
		slog.Info("unused pages of indexes dropped", "disk", d.Path(), "indexes", total, "freed", freed)
	}
}
