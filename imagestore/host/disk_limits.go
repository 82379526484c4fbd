package host

import (
	"context"
	"sync"
)

// limits bound how many jobs of a kind run at once for one disk. A lane is a name; the bound is that of who asks.
type diskLimits struct {
	mu    sync.Mutex
	busy  map[string]int
	freed chan struct{} // closed when one is given back
}

func newDiskLimits() diskLimits { return diskLimits{busy: map[string]int{}, freed: make(chan struct{})} }

// tryAcquire takes a place in a lane, if one is free.
func (l *diskLimits) tryAcquire(lane string, limit int) bool {
	ok, _ := l.attempt(lane, limit)
	return ok
}

// acquire waits for a place in a lane.
func (l *diskLimits) acquire(ctx context.Context, lane string, limit int) error {
	for {
		ok, freed := l.attempt(lane, limit)
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

func (l *diskLimits) attempt(lane string, limit int) (ok bool, freed chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[lane] >= limit {
		return false, l.freed
	}
	l.busy[lane]++
	return true, nil
}

// release leaves a lane.
func (l *diskLimits) release(lane string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[lane]--; l.busy[lane] == 0 {
		delete(l.busy, lane)
	}
	close(l.freed)
	l.freed = make(chan struct{})
}
