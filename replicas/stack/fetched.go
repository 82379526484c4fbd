package stack

import (
	"slices"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// A replica answers reads of blocks that its disk still fetches, and reports fetches to those who ask again.

// fetched reports whether the disk has all blocks of a read, and begins to fetch the others. Loop thread.
func (r *Replica) fetched(q *block.Request) bool {
	all := true
	for b, end := q.Off>>BlockBits, (q.Off+q.Len)>>BlockBits; b < end; {
		v, n := r.idx.Run(b, end)
		if v > FromHead {
			if h := r.layers[v-FromLayer].Hydration; h != nil && !h.Ready(b<<BlockBits, n<<BlockBits) {
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
func (r *Replica) follow(l *layer.Layer) {
	if l.Hydration == nil {
		return
	}
	r.hydrates = true
	l.Hydration.Listen(l, func(c int64) {
		r.ring.Post(func() {
			if c >= 0 {
				r.crcs.forget(l, c*ChunkSize, (c+1)*ChunkSize) // the page may be older than the chunk
			}
			r.tellSource()
		})
		r.tellFetched()
	})
}

// tellSource reports whether a source of a layer fails. Loop thread.
func (r *Replica) tellSource() {
	fails := slices.ContainsFunc(r.layers, func(l *layer.Layer) bool {
		return l.Hydration != nil && l.Hydration.Failed.Load() != nil
	})
	if was := r.parched; fails != was {
		r.parched = fails
		if r.onLost != nil {
			r.onLost(fails)
		}
	}
}
