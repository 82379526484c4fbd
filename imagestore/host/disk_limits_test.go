package host

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// A lane never has more than its bound, gives way to all, and to nobody after the end.
func TestLanes(t *testing.T) {
	l := newDiskLimits()
	var mu sync.Mutex
	var wg sync.WaitGroup
	now, most, all := 0, 0, 0
	for range 50 {
		wg.Go(func() {
			if err := l.acquire(t.Context(), "x", 3); err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			now++
			all++
			most = max(most, now)
			mu.Unlock()
			<-time.After(time.Millisecond)
			mu.Lock()
			now--
			mu.Unlock()
			l.release("x")
		})
	}
	wg.Wait()
	if most != 3 || all != 50 || len(l.busy) != 0 {
		t.Errorf("%d at once, %d in all, busy %v", most, all, l.busy)
	}
	if !l.tryAcquire("y", 1) || l.tryAcquire("y", 1) || !l.tryAcquire("z", 1) {
		t.Error("a lane is taken twice, or stands in the way of another")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.acquire(ctx, "y", 1); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
