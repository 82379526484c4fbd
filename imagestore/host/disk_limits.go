package host

import (
	"context"
	"sync"
)

// lanes bound how many jobs of a kind run at once for one disk. A lane is a name; the bound is that of who asks.
type lanes struct {
	mu    sync.Mutex
	busy  map[string]int
	freed chan struct{} // closed when one is given back
}

func newLanes() lanes { return lanes{busy: map[string]int{}, freed: make(chan struct{})} }

// try takes a place in a lane, if one is free.
func (l *lanes) try(lane string, limit int) bool {
	ok, _ := l.look(lane, limit)
	return ok
}

// take waits for a place in a lane.
func (l *lanes) take(ctx context.Context, lane string, limit int) error {
	for {
		ok, freed := l.look(lane, limit)
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

func (l *lanes) look(lane string, limit int) (ok bool, freed chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[lane] >= limit {
		return false, l.freed
	}
	l.busy[lane]++
	return true, nil
}

// give leaves a lane.
func (l *lanes) give(lane string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[lane]--; l.busy[lane] == 0 {
		delete(l.busy, lane)
	}
	close(l.freed)
	l.freed = make(chan struct{})
}
