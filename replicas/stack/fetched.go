package stack

import (
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// A replica answers reads of blocks that its disk still fetches, and reports fetches to those who ask again.

// ErrNotFetched answers a read of blocks that the replica has begun to fetch from another source. The read ends at
// once, so that nothing that drains I/O waits for a source.
var ErrNotFetched = api.Errorf(api.Busy, "a block of the layer has to be fetched first")

// fetched reports whether the disk has all blocks of a read, and begins to fetch the others. Loop thread.
func (r *Replica) fetched(q *block.Request) bool {
	all := true
	for b, end := q.Off>>blockBits, (q.Off+q.Len)>>blockBits; b < end; {
		v, n := r.idx.Run(b, end)
		if v > fromHead {
			if h := r.layers[v-fromLayer].hy; h != nil && !h.ready(b<<blockBits, n<<blockBits) {
				all = false
			}
		}
		b += n
	}
	return all
}

// OnFetched calls fn after each fetch of blocks that a read asked for. Fn must not block.
func (r *Replica) OnFetched(fn func()) {
	r.fetchMu.Lock()
	defer r.fetchMu.Unlock()
	r.onFetched = fn
}

// tellFetched reports a fetch.
func (r *Replica) tellFetched() {
	r.fetchMu.Lock()
	defer r.fetchMu.Unlock()
	if r.onFetched != nil {
		r.onFetched()
	}
}

// follow subscribes the replica to the fetches of a layer.
func (r *Replica) follow(l *layer) {
	if l.hy == nil {
		return
	}
	r.hydrates = true
	l.hy.listen(l, func(c int64) {
		r.ring.Post(func() {
			if page := l.pages[c*chunkBlks>>format.CRCPageBits]; c >= 0 && page != nil && page.ready {
				page.forget() // it may be older than the chunk
			}
			r.tellSource()
		})
		r.tellFetched()
	})
}

// tellSource reports whether a source of a layer fails. Loop thread.
func (r *Replica) tellSource() {
	fails := slices.ContainsFunc(r.layers, func(l *layer) bool { return l.hy != nil && l.hy.failed.Load() != nil })
	if was := r.parched; fails != was {
		r.parched = fails
		if r.onLost != nil {
			r.onLost(fails)
		}
	}
}
