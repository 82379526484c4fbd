package stack

import (
	"slices"
	"sync"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// A replica refuses reads of blocks that its disk fetches first, and reports the end of fetches.

// hasFetched reports whether the disk has all blocks of a read, and begins to fetch the others. Loop thread.
func (r *Replica) hasFetched(q *block.Request) bool {
	all := true
	for b, end := q.Off>>blockBits, (q.Off+q.Len)>>blockBits; b < end; {
		v, n := r.idx.Run(b, end)
		if v > fromHead {
			if h := r.layers[v-fromLayer].Hydration; h != nil && !h.Ready(b<<blockBits, n<<blockBits) {
				all = false
			}
		}
		b += n
	}
	return all
}

// fetchNotifier reports fetches of blocks to the reader that waits for the blocks.
type fetchNotifier struct {
	mu sync.Mutex
	fn func()
}

// OnFetched calls fn after each fetch of blocks that a read asked for. Fn must not block.
func (n *fetchNotifier) OnFetched(fn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fn = fn
}

// fetchEnded reports a fetch.
func (n *fetchNotifier) fetchEnded() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fn != nil {
		n.fn()
	}
}

// subscribeFetches subscribes the replica to the fetches of a hydrated layer.
func (r *Replica) subscribeFetches(l *layer.Layer) {
	if l.Hydration == nil {
		return
	}
	r.hydrates = true
	l.Hydration.Listen(l, func(c int64) {
		r.ring.Post(func() {
			if c >= 0 {
				r.crcs.forgetRange(l, c*chunkSize, (c+1)*chunkSize) // the page may be older than the chunk
			}
			r.reportSource()
		})
		r.fetchEnded()
	})
}

// reportSource reports whether a source of a layer fails. Loop thread.
func (r *Replica) reportSource() {
	fails := slices.ContainsFunc(r.layers, func(l *layer.Layer) bool {
		return l.Hydration != nil && l.Hydration.Failed.Load() != nil
	})
	if was := r.sourceFails; fails != was {
		r.sourceFails = fails
		if r.onLost != nil {
			r.onLost(fails)
		}
	}
}
