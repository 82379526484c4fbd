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
	"sync"

	"golang.org/x/sync/semaphore"
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
	places *semaphore.Weighted
}

// NewPart takes size bytes for a kind of work, or what is left.
func (b *Budget) NewPart(size int64) *Part {
	b.mu.Lock()
	defer b.mu.Unlock()
	size = max(min(size, b.left), 0)
	b.left -= size
	return &Part{budget: b, size: size, places: semaphore.NewWeighted(size)}
}

// Size returns the bytes of the part.
func (p *Part) Size() int64 { return p.size }

// Reserve waits until n bytes of the part are free, at most all of them. The error is the cause of the context's end.
func (p *Part) Reserve(ctx context.Context, n int64) (release func(), err error) {
	if p == nil {
		return func() {}, nil
	}
	n = min(n, p.size)
	if p.places.Acquire(ctx, n) != nil {
		return nil, context.Cause(ctx)
	}
	p.budget.count(n)
	return sync.OnceFunc(func() {
		p.budget.count(-n)
		p.places.Release(n)
	}), nil
}

func (b *Budget) count(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reserved += n
	b.most = max(b.most, b.reserved)
}

// Reserved returns the bytes of all reservations now, and at most so far.
func (b *Budget) Reserved() (now, most int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.reserved, b.most
}
