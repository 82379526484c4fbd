package block_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/block"
)

// took returns how long a function takes by the test's clock.
func took(do func()) time.Duration {
	began := time.Now()
	do()
	return time.Since(began)
}

// near reports whether two times differ by less than a millisecond.
func near(a, b time.Duration) bool { return (a - b).Abs() < time.Millisecond }

// TestThrottleKeepsTheMeanRateOfAllCallers: callers in parallel share one rate, and each caller waits for the bytes of
// the callers before.
func TestThrottleKeepsTheMeanRateOfAllCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := block.NewThrottle(1000)
		ended := make(chan error)
		d := took(func() {
			for range 5 {
				go func() { ended <- limit.Wait(t.Context(), 1000) }()
			}
			for range 5 {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		})
		if !near(d, 4*time.Second) { // the last call waits for the bytes of four calls
			t.Errorf("5 x 1000 bytes took %v at 1000 a second", d)
		}
	})
}

// TestThrottleSavesNothingUp: after an idle hour, the rate bounds the next bytes as at the start.
func TestThrottleSavesNothingUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := block.NewThrottle(1000)
		time.Sleep(time.Hour) // by the test's clock
		d := took(func() {
			for range 3 {
				_ = limit.Wait(t.Context(), 1000)
			}
		})
		if !near(d, 2*time.Second) {
			t.Errorf("after an idle hour, 3 x 1000 bytes took %v at 1000 a second", d)
		}
	})
}

// TestThrottleGivesBytesBack: later calls do not wait for bytes that an earlier call gave back, and more bytes than
// counted give no credit.
func TestThrottleGivesBytesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := block.NewThrottle(1000)
		d := took(func() {
			_ = limit.Wait(t.Context(), 5000)
			limit.Add(-4000)
			_ = limit.Wait(t.Context(), 0)
			limit.Add(2000)
			_ = limit.Wait(t.Context(), 0)
			limit.Add(-1 << 40) // more bytes than the throttle counted
			_ = limit.Wait(t.Context(), 1000)
			_ = limit.Wait(t.Context(), 0)
		})
		if !near(d, 4*time.Second) {
			t.Errorf("4000 bytes took %v at 1000 a second", d)
		}
	})
}

// TestThrottleTakesANewRateDuringAWait: a new rate counts from the change on, also for a call in progress. A call
// without a rate ends at once.
func TestThrottleTakesANewRateDuringAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := block.NewThrottle(1000)
		_ = limit.Wait(t.Context(), 10_000)
		ended := make(chan error, 1)
		d := took(func() {
			go func() { ended <- limit.Wait(t.Context(), 1) }()
			time.Sleep(5 * time.Second) // time for half of the bytes
			limit.SetRate(5000)
			<-ended
		})
		if !near(d, 6*time.Second) {
			t.Errorf("5000 bytes at 1000 a second, and 5000 at 5000, took %v", d)
		}
		_ = limit.Wait(t.Context(), 1<<40)
		limit.SetRate(0)
		if d := took(func() { _ = limit.Wait(t.Context(), 1) }); d != 0 {
			t.Errorf("without a bound, a wait took %v", d)
		}
	})
}

// TestThrottleEndsWithTheContext: the end of the context ends a long wait with the cause of the end.
func TestThrottleEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := block.NewThrottle(1)
		_ = limit.Wait(t.Context(), 1<<40)
		why := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(why) })
		if err := limit.Wait(ctx, 1); !errors.Is(err, why) {
			t.Errorf("got %v", err)
		}
	})
}
