package pace

import (
	"context"
	"sync"
	"time"
)

// gate lets steps of work in, or one rest.
type gate struct {
	mu      sync.Mutex
	steps   int           // in progress
	open    chan struct{} // closed at the end of the rest; nil: no rest
	drained chan struct{} // closed when the rest may begin
}

// enter waits for the end of a rest.
func (g *gate) enter(ctx context.Context) error {
	for {
		g.mu.Lock()
		open := g.open
		if open == nil {
			g.steps++
			g.mu.Unlock()
			return nil
		}
		g.mu.Unlock()
		select {
		case <-open:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.steps--; g.steps == 0 && g.open != nil {
		close(g.drained)
	}
}

// drainTime bounds the wait for steps in progress: one that sends bytes over a slow line, or to a disk that hangs, does
// not keep the other ones waiting.
const drainTime = time.Second

// rest keeps new steps out and waits for those in progress. False: ctx ended. In both cases resume ends the rest.
func (g *gate) rest(ctx context.Context) bool {
	g.mu.Lock()
	g.open, g.drained = make(chan struct{}), make(chan struct{})
	if g.steps == 0 {
		close(g.drained)
	}
	drained := g.drained
	g.mu.Unlock()
	late := time.NewTimer(drainTime)
	defer late.Stop()
	select {
	case <-drained:
		return true
	case <-late.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (g *gate) resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.open)
	g.open = nil
}
