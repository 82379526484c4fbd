// Package pace has background work give way to the guests: the programs that use the volumes on a node, or volumes with
// replicas on the node.
//
// While work is in progress and guests do I/O, periods of work alternate with rests. A rest shows how fast the guests
// are undisturbed; latencies and rates in both decide how long the next rests are, so that guests keep a part of their
// speed on a slow disk, and work loses little time on a fast one. Without guest I/O the Pacer rests for a moment now
// and then, and so finds guests that the work stops altogether.
//
// Work that uses a disk calls Enter for each step of some milliseconds. A rest begins when the steps in progress have
// ended, or after a second. A step never waits for another step, which may wait for the end of a rest.
//
// The first caller of Begin starts one goroutine, which the last end awaits.
package pace

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// GuestIO counts the requests of guests that volumes have answered.
type GuestIO struct {
	Requests uint64        `json:"requests"`
	Latency  time.Duration `json:"latency"` // sum, from request to answer
}

// Add adds the requests of other.
func (g GuestIO) Add(other GuestIO) GuestIO {
	return GuestIO{g.Requests + other.Requests, g.Latency + other.Latency}
}

// Counter counts requests. Methods are safe for concurrent use.
type Counter struct {
	requests atomic.Uint64
	latency  atomic.Int64
}

// Count counts a request that was answered after took.
func (c *Counter) Count(took time.Duration) {
	c.requests.Add(1)
	c.latency.Add(int64(took))
}

// GuestIO is the sum.
func (c *Counter) GuestIO() GuestIO {
	return GuestIO{c.requests.Load(), time.Duration(c.latency.Load())}
}

// Options of a Pacer.
type Options struct {
	// Guests counts since some time in the past. After an error, work does not wait.
	Guests func(context.Context) (GuestIO, error)
	// Keep is the part of their speed that guests keep at least, below 1; 0: work never waits.
	Keep func(context.Context) float64
	// Rested, if set, is called after each rest.
	Rested func(time.Duration)
}

const (
	workPeriod  = 200 * time.Millisecond
	shortest    = 20 * time.Millisecond  // of a rest
	firstRest   = 200 * time.Millisecond // the least first rest with guest I/O, to measure the guests' speed
	longest     = 2 * time.Second
	leastShare  = 0.05 // of the rests in the time
	mostShare   = 0.9
	lookEvery   = 8   // periods of work without guest I/O between two looks
	fewRequests = 50  // per second: quick requests do not count as guest I/O up to this rate
	quickPart   = 0.1 // of a period: requests are quick if the sum of their latencies is at most this part
	memory      = 0.7 // of the counts of earlier periods, in each period
)

// Pacer makes the work of one node wait. Methods are safe for concurrent use. A nil Pacer never waits.
type Pacer struct {
	o    Options
	gate gate

	work, rest tally // of the goroutine alone; work that begins soon after other work knows them

	mu    sync.Mutex
	users int
	end   func() // ends the goroutine and awaits it
}

// New returns a Pacer without a goroutine.
func New(o Options) *Pacer { return &Pacer{o: o} }

// Begin announces work until the call of end.
func (p *Pacer) Begin() (end func()) {
	if p == nil {
		return func() {}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users++; p.users == 1 {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.run(ctx)
		}()
		p.end = func() { cancel(); <-done }
	}
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.users--; p.users == 0 {
			p.end()
		}
	})
}

// Enter waits for the end of a rest and begins a step of work, until the call of leave.
func (p *Pacer) Enter(ctx context.Context) (leave func(), err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if p == nil {
		return func() {}, nil
	}
	if err := p.gate.enter(ctx); err != nil {
		return nil, err
	}
	return p.gate.leave, nil
}

// run alternates work and rests.
func (p *Pacer) run(ctx context.Context) {
	began, before := time.Now(), p.count(ctx)
	quiet, busy := 0, false // periods without guest I/O; the last rest had guest I/O
	for wait(ctx, workPeriod) {
		keep, now := p.o.Keep(ctx), p.count(ctx)
		if keep <= 0 || now == nil || before == nil {
			began, before = time.Now(), now
			continue
		}
		if !busy && isQuiet(now, before, time.Since(began)) {
			if quiet++; quiet < lookEvery {
				began, before = time.Now(), now
				continue
			}
		}
		quiet = 0
		if !p.gate.rest(ctx) {
			p.gate.resume()
			return
		}
		worked, drained := time.Since(began), p.count(ctx)
		p.work.add(drained, before, worked)
		rest := restAfter(worked, p.work.speed(p.rest), keep)
		if p.rest.requests == 0 && !isQuiet(drained, before, worked) {
			rest = max(rest, firstRest)
		}
		began = time.Now()
		if !wait(ctx, rest) {
			p.gate.resume()
			return
		}
		before = p.count(ctx)
		if busy = !isQuiet(before, drained, time.Since(began)); busy {
			p.rest.add(before, drained, time.Since(began))
		} else {
			p.work, p.rest = tally{}, tally{}
		}
		if p.o.Rested != nil {
			p.o.Rested(time.Since(began))
		}
		began = time.Now()
		p.gate.resume()
	}
}

// count returns nil when the guests cannot be counted.
func (p *Pacer) count(ctx context.Context) *GuestIO {
	io, err := p.o.Guests(ctx)
	if err != nil {
		return nil
	}
	return &io
}

// isQuiet reports whether guests did no I/O, or only a few quick requests. A few slow requests count as guest I/O: the
// guest waits for large requests, or for a slow disk.
func isQuiet(now, before *GuestIO, took time.Duration) bool {
	if now == nil || before == nil || now.Requests < before.Requests || now.Latency < before.Latency {
		return true
	}
	return float64(now.Requests-before.Requests) <= fewRequests*took.Seconds() &&
		(now.Latency-before.Latency).Seconds() <= quickPart*took.Seconds()
}

// restAfter returns the length of a rest after a period of work. The work slows guests down to the part speed, and they
// keep the part keep on average when the share s of the rests in the time satisfies s + (1-s) * speed = keep.
func restAfter(worked time.Duration, speed, keep float64) time.Duration {
	share := leastShare
	if speed < keep {
		share = min(max((keep-speed)/(1-speed), leastShare), mostShare)
	}
	return min(max(time.Duration(float64(worked)*share/(1-share)), shortest), longest)
}

// tally has the requests of the last periods; those of earlier ones count less.
type tally struct{ requests, latency, seconds float64 }

func (t *tally) add(now, before *GuestIO, took time.Duration) {
	if now == nil || before == nil || now.Requests < before.Requests || now.Latency < before.Latency {
		return // a volume was detached
	}
	t.requests = t.requests*memory + float64(now.Requests-before.Requests)
	t.latency = t.latency*memory + float64(now.Latency-before.Latency)
	t.seconds = t.seconds*memory + took.Seconds()
}

// speed returns how fast guests are during the work t, as a part of their speed during rest. The lower of two ratios
// counts: a volume does not see how long its guest waits for a processor, which lowers the rate alone; and a guest that
// issues requests by a clock keeps its rate, while work makes the latencies longer.
func (t *tally) speed(rest tally) float64 {
	switch {
	case rest.requests == 0: // nothing is known yet
		return 1
	case t.requests == 0 || t.latency == 0: // no request came back
		return 0
	}
	latency := rest.latency / rest.requests * t.requests / t.latency
	rate := t.requests / t.seconds * rest.seconds / rest.requests
	return min(latency, rate, 1)
}

// wait returns false when ctx ended.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
