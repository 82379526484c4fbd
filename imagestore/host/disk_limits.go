package host

import (
	"context"
	"sync"
)

// diskLimits bounds how many jobs of a kind run at once on one disk. A name stands for kind and disk; the caller brings
// the limit, which a setting may change at any time.
type diskLimits struct {
	mu    sync.Mutex
	busy  map[string]int
	freed chan struct{} // closed by a release
}

func newDiskLimits() diskLimits {
	return diskLimits{busy: map[string]int{}, freed: make(chan struct{})}
}

// tryAcquire acquires a slot if one is free.
func (l *diskLimits) tryAcquire(name string, limit int) bool {
	ok, _ := l.attempt(name, limit)
	return ok
}

// acquire waits for a slot.
func (l *diskLimits) acquire(ctx context.Context, name string, limit int) error {
	for {
		ok, freed := l.attempt(name, limit)
		if ok {
			return nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *diskLimits) attempt(name string, limit int) (ok bool, freed chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[name] >= limit {
		return false, l.freed
	}
	l.busy[name]++
	return true, nil
}

// release returns a slot.
func (l *diskLimits) release(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[name]--; l.busy[name] == 0 {
		delete(l.busy, name)
	}
	close(l.freed)
	l.freed = make(chan struct{})
}
