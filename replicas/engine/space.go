package engine

import "syscall"

// roomQueue has the writes that wait for room on the disks. Loop thread.
type roomQueue struct {
	e        *Engine
	held     []*op
	retrying int // formerly held operations in a new try
	full     bool
}

// holdWrite lets a write wait for room on the disk, with its range locked.
func (q *roomQueue) holdWrite(o *op) {
	if !o.slow {
		o.slow = true
		q.e.ranges.slow++
	}
	if o.bounce != nil {
		o.giveBounce() // other operations may need the buffer; the piece is merged again
		o.stage = stageHead
	}
	q.endRetry(o)
	q.held = append(q.held, o)
	if !q.full {
		q.full = true
		if q.e.cfg.OnSpace != nil {
			q.e.cfg.OnSpace(true)
		}
	}
}

// endRetry ends the new try of a formerly held operation.
func (q *roomQueue) endRetry(o *op) {
	if o.again {
		o.again = false
		q.retrying--
	}
	o.probe = false
}

// Retry tries one of the writes that wait for room; if the write finds room, the others follow. Any goroutine; the
// owner calls Retry when the disk may have room again, and now and then while writes wait.
func (e *Engine) Retry() {
	e.cfg.Loop.Post(func() {
		q := &e.room
		if len(q.held) == 0 || q.retrying > 0 {
			return
		}
		o := q.held[0]
		q.held = q.held[1:]
		o.probe = true
		q.retryWrite(o)
	})
}

func (q *roomQueue) retryAll() {
	held := q.held
	q.held = nil
	for _, o := range held {
		q.retryWrite(o)
	}
}

func (q *roomQueue) retryWrite(o *op) {
	e := q.e
	o.again = true
	q.retrying++
	if e.fenced != nil || e.closing {
		e.finishOp(o, syscall.EIO)
		return
	}
	o.firstStep()
}

// reportRoom tells when no write waits for room any more.
func (q *roomQueue) reportRoom() {
	if q.full && len(q.held) == 0 && q.retrying == 0 {
		q.full = false
		if q.e.cfg.OnSpace != nil {
			q.e.cfg.OnSpace(false)
		}
	}
}
