package driver

import (
	"context"
	"errors"
	"sync"
)

// group owns goroutines: the first failure ends the context of all.
type group struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	err    error
}

func newGroup(ctx context.Context) *group {
	g := &group{}
	g.ctx, g.cancel = context.WithCancel(ctx)
	return g
}

func (g *group) run(f func(context.Context) error) {
	g.wg.Go(func() {
		if err := f(g.ctx); err != nil && !errors.Is(err, context.Canceled) {
			g.mu.Lock()
			if g.err == nil {
				g.err = err
			}
			g.mu.Unlock()
			g.cancel()
		}
	})
}

// wait returns the first error after the end of all goroutines.
func (g *group) wait() error {
	g.wg.Wait()
	g.cancel()
	return g.err
}
