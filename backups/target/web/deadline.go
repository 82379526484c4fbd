package web

import (
	"context"
	"time"
)

// slowLine is the slowest line, in bytes per second, on which a transfer meets its deadline.
const slowLine = 128 << 10

// Deadline ends the context of an operation that takes too long: some answer times for the tries of the library, and
// the time that the bytes need on a slow line.
type Deadline struct {
	Ctx    context.Context
	answer time.Duration
	cancel context.CancelFunc
	timer  *time.Timer
}

// Begin starts an operation that moves size bytes. The caller ends the Deadline.
func (n Network) Begin(ctx context.Context, size int64) *Deadline {
	d := &Deadline{answer: n.AnswerTime}
	d.Ctx, d.cancel = context.WithCancel(ctx)
	d.timer = time.AfterFunc(d.allowance(size), d.cancel)
	return d
}

// allowance is the time for an operation that moves size bytes.
func (d *Deadline) allowance(size int64) time.Duration {
	return 3*d.answer + time.Duration(size/slowLine)*time.Second
}

// Extend moves the deadline: from now on the operation has the time for size bytes.
func (d *Deadline) Extend(size int64) { d.timer.Reset(d.allowance(size)) }

// Pause stops the clock until Extend.
func (d *Deadline) Pause() { d.timer.Stop() }

// End ends the operation.
func (d *Deadline) End() {
	d.timer.Stop()
	d.cancel()
}
