package block

import (
	"context"
	"sync"
	"time"
)

// Throttle bounds the mean rate of a stream of bytes, which several callers may share. The zero value has no bound. An
// idle Throttle saves nothing up. Methods are safe for concurrent use.
type Throttle struct {
	mu       sync.Mutex
	rate     int64 // bytes per second; 0: no bound
	reserved int64 // bytes of all calls of Wait so far
	passed   float64
	at       time.Time     // when passed was right
	changed  chan struct{} // closed when the rate changes
}

// longestPause is in the range of a time.Duration.
const longestPause = time.Hour

// NewThrottle makes a Throttle of rate bytes per second; 0: no bound.
func NewThrottle(rate int64) *Throttle {
	t := &Throttle{}
	t.SetRate(rate)
	return t
}

// SetRate changes the rate, also for calls of Wait in progress.
func (t *Throttle) SetRate(rate int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if rate = max(rate, 0); rate == t.rate {
		return
	}
	t.advance()
	t.rate = rate
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// advance counts the bytes that the rate allowed since the last call. The caller has mu.
func (t *Throttle) advance() {
	now := time.Now()
	if t.rate == 0 {
		t.passed = float64(t.reserved)
	} else {
		t.passed = min(t.passed+now.Sub(t.at).Seconds()*float64(t.rate), float64(t.reserved))
	}
	t.at = now
}

// Add counts n bytes that were moved without a call of Wait, or, below 0, bytes of an earlier call that were not moved.
func (t *Throttle) Add(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.advance()
	if n > 0 {
		t.reserved += n
	} else { // calls in progress know their place among the reserved bytes
		t.passed = min(t.passed-float64(n), float64(t.reserved))
	}
}

// Wait returns when the rate allows the bytes of all earlier calls; the caller then moves n bytes. After an error, the
// n bytes count, too.
func (t *Throttle) Wait(ctx context.Context, n int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.advance()
	from := float64(t.reserved)
	t.reserved += n
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		t.advance()
		if t.rate == 0 || t.passed >= from {
			return nil
		}
		if t.changed == nil {
			t.changed = make(chan struct{})
		}
		seconds := min((from-t.passed)/float64(t.rate), longestPause.Seconds())
		pause, changed := time.Duration(seconds*1e9)+time.Microsecond, t.changed // rounded up, so that one wait is enough
		t.mu.Unlock()
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-changed:
		case <-ctx.Done():
		}
		timer.Stop()
		t.mu.Lock()
	}
}
