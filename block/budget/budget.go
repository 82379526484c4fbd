// Package budget divides the memory of a node's work into parts. Each kind of work has a part that no other kind takes.
//
// Invariants: the parts of a Budget have its size together, and reservations never exceed their part. A work reserves
// all its memory at once, waits for its turn, in the order of the calls, and gives way when its context ends.
//
// Waits cannot form a circle as long as the holder of a part waits for no part, or for such a part alone whose holders
// wait for none.
//
// The package starts no goroutine. Budget.mu is a leaf.
package budget

import (
	"context"
	"slices"
	"sync"
)

// Budget is memory in parts.
type Budget struct {
	mu             sync.Mutex
	left           int64 // bytes that no part has
	reserved, most int64 // bytes of all reservations now, and at most so far
}

// New returns a budget of size bytes without parts.
func New(size int64) *Budget { return &Budget{left: size} }

// Part is the memory of one kind of work. A nil Part has no bound.
type Part struct {
	budget *Budget
	size   int64

	// Guarded by Budget.mu.
	free  int64
	queue []*waiter // in the order of the calls
}

// waiter is a call of Reserve that waits.
type waiter struct {
	n       int64
	granted chan struct{}
}

// NewPart takes size bytes for a kind of work, or what is left.
func (b *Budget) NewPart(size int64) *Part {
	b.mu.Lock()
	defer b.mu.Unlock()
	size = max(min(size, b.left), 0)
	b.left -= size
	return &Part{budget: b, size: size, free: size}
}

// Size returns the bytes of the part.
func (p *Part) Size() int64 { return p.size }

// Reserve waits until n bytes of the part are free, at most all of them. The error is the cause of the context's end.
func (p *Part) Reserve(ctx context.Context, n int64) (release func(), err error) {
	if p == nil {
		return func() {}, nil
	}
	w := &waiter{min(n, p.size), make(chan struct{})}
	p.budget.mu.Lock()
	p.queue = append(p.queue, w)
	p.grant()
	p.budget.mu.Unlock()
	select {
	case <-w.granted:
	case <-ctx.Done():
		if p.leave(w) {
			return nil, context.Cause(ctx)
		}
	}
	return sync.OnceFunc(func() {
		p.budget.mu.Lock()
		defer p.budget.mu.Unlock()
		p.budget.reserved -= w.n
		p.free += w.n
		p.grant()
	}), nil
}

// grant gives memory to the first waiters, as far as the memory suffices. The caller has Budget.mu.
func (p *Part) grant() {
	for len(p.queue) > 0 && p.queue[0].n <= p.free {
		w := p.queue[0]
		p.queue = p.queue[1:]
		p.free -= w.n
		p.budget.reserved += w.n
		p.budget.most = max(p.budget.most, p.budget.reserved)
		close(w.granted)
	}
}

// leave takes a waiter out of the queue; false: the waiter has its memory.
func (p *Part) leave(w *waiter) bool {
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	i := slices.Index(p.queue, w)
	if i < 0 {
		return false
	}
	p.queue = slices.Delete(p.queue, i, i+1)
	p.grant()
	return true
}

// Reserved returns the bytes of all reservations now, and at most so far.
func (b *Budget) Reserved() (now, most int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.reserved, b.most
}
