package engine

import (
	"sync/atomic"
	"time"

	"drover.io/drover/block"
)

// Buckets are the upper bounds of the latency histograms; longer latencies count in a last bucket.
var Buckets = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, time.Second, 5 * time.Second,
}

// Class of requests with common counts.
type Class uint8

// Classes. Discards and zeros share a class.
const (
	Read Class = iota
	Write
	Flush
	Discard
	classes
)

func (c Class) String() string { return [...]string{"read", "write", "flush", "discard"}[c] }

// Counts of one class since Open.
type Counts struct {
	Ops, Errors, Bytes uint64
	Seconds            float64                  // sum of latencies
	Latency            [len(Buckets) + 1]uint64 // ops by bucket
}

// Stats of an engine since Open.
type Stats [classes]Counts

type counters [classes]struct {
	ops, errors, bytes, nanos atomic.Uint64
	latency                   [len(Buckets) + 1]atomic.Uint64
}

func (c *counters) countRequest(r *block.Request, nanos int64) {
	class := Discard
	switch r.Op {
	case block.OpRead:
		class = Read
	case block.OpWrite:
		class = Write
	case block.OpFlush:
		class = Flush
	}
	k := &c[class]
	k.ops.Add(1)
	if r.Err != nil {
		k.errors.Add(1)
	} else {
		k.bytes.Add(uint64(r.Len))
	}
	k.nanos.Add(uint64(nanos))
	b := 0
	for b < len(Buckets) && nanos > int64(Buckets[b]) {
		b++
	}
	k.latency[b].Add(1)
}

// Stats returns the counts since Open. Any goroutine.
func (e *Engine) Stats() Stats {
	var s Stats
	for i := range e.stats {
		k := &e.stats[i]
		s[i] = Counts{Ops: k.ops.Load(), Errors: k.errors.Load(), Bytes: k.bytes.Load(),
			Seconds: float64(k.nanos.Load()) / 1e9}
		for b := range k.latency {
			s[i].Latency[b] = k.latency[b].Load()
		}
	}
	return s
}
