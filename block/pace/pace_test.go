package pace

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// guests do requests one at a time. Beside a step of work, a request takes longer.
type guests struct {
	alone, beside time.Duration // latencies; 0: no requests
	ownDelay      bool          // work delays the guest itself, so the latencies of the volume do not grow
	working       atomic.Int64  // steps in progress
	requests      atomic.Uint64
	latency       atomic.Int64
}

func (g *guests) run(ctx context.Context) {
	const tick = 50 * time.Microsecond
	done, took := 0.0, time.Duration(0) // of the request in progress
	for ctx.Err() == nil {
		if g.alone == 0 {
			time.Sleep(time.Second)
			continue
		}
		time.Sleep(tick)
		took += tick
		latency := g.alone
		if g.working.Load() > 0 {
			latency = g.beside
		}
		done += float64(tick) / float64(latency)
		if done >= 0.999 {
			g.requests.Add(1)
			if g.ownDelay {
				took = g.alone
			}
			g.latency.Add(int64(took))
			done, took = 0, 0
		}
	}
}

func (g *guests) count(context.Context) (GuestIO, error) {
	return GuestIO{Requests: g.requests.Load(), Latency: time.Duration(g.latency.Load())}, nil
}

const (
	span = 20 * time.Second
	step = 2 * time.Millisecond
)

// paced runs work beside guests for a span of time, and returns the speed of the guests as a part of their speed alone,
// and the part of the time in which steps of the work ran.
func paced(t *testing.T, g *guests, o Options) (speed, work float64) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		if o.Guests == nil {
			o.Guests = g.count
		}
		p := New(o)
		ctx, cancel := context.WithTimeout(t.Context(), span)
		defer cancel()
		var guest sync.WaitGroup
		guest.Go(func() { g.run(ctx) })
		end := p.Begin()
		steps := 0
		for {
			leave, err := p.Enter(ctx)
			if err != nil {
				break
			}
			g.working.Add(1)
			time.Sleep(step)
			g.working.Add(-1)
			leave()
			steps++
		}
		end()
		end() // the second call does nothing
		guest.Wait()
		if g.alone > 0 {
			speed = float64(g.requests.Load()) * g.alone.Seconds() / span.Seconds()
		}
		work = float64(steps) * step.Seconds() / span.Seconds()
	})
	return speed, work
}

func keep(part float64) func(context.Context) float64 {
	return func(context.Context) float64 { return part }
}

func TestGuestsKeepTheirSpeed(t *testing.T) {
	for _, g := range []*guests{
		{alone: 100 * time.Microsecond, beside: time.Millisecond},
		{alone: 100 * time.Microsecond, beside: 200 * time.Microsecond},
		{alone: 100 * time.Microsecond, beside: 200 * time.Microsecond, ownDelay: true},
		{alone: 25 * time.Millisecond, beside: 75 * time.Millisecond}, // few large requests
	} {
		guest, work := paced(t, g, Options{Keep: keep(0.85)})
		t.Logf("latency beside work %v: guests %.2f, work %.2f", g.beside, guest, work)
		if guest < 0.8 {
			t.Errorf("guests have %.2f of their speed", guest)
		}
		if work < 0.1 {
			t.Errorf("work goes on for %.2f of the time", work)
		}
	}
}

func TestWorkThatGuestsDoNotNoticeGoesOn(t *testing.T) {
	guest, work := paced(t, &guests{alone: time.Millisecond, beside: 1100 * time.Microsecond},
		Options{Keep: keep(0.85)})
	if guest < 0.9 || work < 0.85 {
		t.Errorf("guests %.2f, work %.2f", guest, work)
	}
}

func TestWorkWithoutGuestsGoesOn(t *testing.T) {
	if _, work := paced(t, &guests{}, Options{Keep: keep(0.85)}); work < 0.95 {
		t.Errorf("work goes on for %.2f of the time", work)
	}
}

// TestGuestsThatWorkStopsAreFound: beside the work, guests have too few requests to count as busy.
func TestGuestsThatWorkStopsAreFound(t *testing.T) {
	guest, work := paced(t, &guests{alone: 100 * time.Microsecond, beside: 300 * time.Millisecond},
		Options{Keep: keep(0.85)})
	t.Logf("guests %.2f, work %.2f", guest, work)
	if guest < 0.55 || work < 0.02 {
		t.Errorf("guests %.2f, work %.2f", guest, work)
	}
}

func TestPacerThatIsOffNeverWaits(t *testing.T) {
	g := &guests{alone: 100 * time.Microsecond, beside: time.Millisecond}
	if _, work := paced(t, g, Options{Keep: keep(0)}); work < 0.99 {
		t.Errorf("off: work goes on for %.2f of the time", work)
	}
	unknown := func(context.Context) (GuestIO, error) { return GuestIO{}, errors.New("no data process") }
	if _, work := paced(t, g, Options{Keep: keep(0.85), Guests: unknown}); work < 0.99 {
		t.Errorf("guests are not known: work goes on for %.2f of the time", work)
	}
	var none *Pacer
	defer none.Begin()()
	leave, err := none.Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	leave()
}

// TestDetachedVolumeIsNoGuest: the counts become smaller when a volume is detached.
func TestDetachedVolumeIsNoGuest(t *testing.T) {
	g := &guests{}
	n := uint64(1) << 40
	_, work := paced(t, g, Options{Keep: keep(0.85), Guests: func(context.Context) (GuestIO, error) {
		n -= 1000
		return GuestIO{Requests: n, Latency: time.Duration(n)}, nil
	}})
	if work < 0.95 {
		t.Errorf("work goes on for %.2f of the time", work)
	}
}

// TestStepThatHangsDelaysNoOther: a step waits for a disk that hangs. The steps of other work continue.
func TestStepThatHangsDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := uint64(0)
		p := New(Options{Keep: keep(0.85), Guests: func(context.Context) (GuestIO, error) {
			n += 1000
			return GuestIO{Requests: n, Latency: time.Duration(n)}, nil
		}})
		defer p.Begin()()
		hung, err := p.Enter(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer hung()
		ctx, cancel := context.WithTimeout(t.Context(), span)
		defer cancel()
		steps := 0
		for ; ctx.Err() == nil; steps++ {
			leave, err := p.Enter(ctx)
			if err != nil {
				break
			}
			time.Sleep(step)
			leave()
		}
		if steps < 1000 {
			t.Errorf("%d steps beside one that hangs", steps)
		}
	})
}
