package engine

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A member may lack blocks of a layer and fetch them from another source. The member answers a read of such blocks with
// stack.ErrNotFetched, at once. The engine asks the other members, and sets the operation aside if no member has the
// blocks. An operation set aside is no I/O in progress: the operation holds no range, no buffer and no place in a
// generation, so no drain and no fence waits for a source. The engine asks again when a member reports a fetch, and by
// a timer.

// Fetcher is a member that reports each fetch of blocks that a read asked for. Fn must not block.
type Fetcher interface{ OnFetched(fn func()) }

// Pauses between two questions about the same read, if no member reports a fetch.
const (
	fetchFirst = 20 * time.Millisecond
	fetchLast  = time.Second
)

// resyncTime bounds the wait for a source before an engine serves: the attach fails then, and names the cause.
const resyncTime = 20 * time.Second

// fetches are the operations of an engine that are set aside. Loop thread.
type fetches struct {
	e     *Engine
	list  []*op
	timer *time.Timer
}

// subscribeToMember subscribes to the fetches of a member.
func (a *fetches) subscribeToMember(m Member) {
	f, ok := m.(Fetcher)
	if !ok {
		return
	}
	posted := new(atomic.Bool)
	f.OnFetched(func() {
		if posted.CompareAndSwap(false, true) {
			a.e.cfg.Loop.Post(func() {
				posted.Store(false)
				a.askMemberAgain(m)
			})
		}
	})
}

// setAside sets an operation aside. The engine drops the members that failed the read, as after any other read: a
// member that fetches serves.
func (a *fetches) setAside(o *op) {
	e := a.e
	for m := range e.cfg.Members {
		if (o.tried &^ o.sore).has(m) && e.members.has(m) {
			e.proposeDrop(m, o.err)
		}
	}
	o.tried, o.sore, o.err = 0, 0, nil
	if e.closing || e.fenced != nil {
		e.finishOp(o, syscall.EIO)
		return
	}
	if now := time.Since(e.base); now >= o.due {
		o.pause = min(max(2*o.pause, fetchFirst), fetchLast)
		o.due = now + o.pause
	}
	if o.bounce != nil {
		o.giveBounce() // other operations need the buffer
	}
	e.room.endRetry(o)
	e.inflight--
	e.gens.endOperation(o.gen)
	a.list = append(a.list, o)
	a.armTimer()
	if o.isRead() {
		return
	}
	e.ranges.removeBusy(o)
	if e.ranges.queue.head != nil {
		e.ranges.startQueued()
	}
	e.room.reportRoom()
}

// askMemberAgain asks a member again that reported a fetch.
func (a *fetches) askMemberAgain(m Member) {
	i := slices.IndexFunc(a.e.cfg.Members, func(n Named) bool { return n.Member == m })
	if len(a.list) > 0 && i >= 0 && (a.e.members &^ a.e.suspect).has(i) {
		a.askAgain(func(o *op) bool {
			o.unfetched &^= bit(i)
			return true
		})
	}
}

// askDueAgain asks all members again about the operations whose pause is over.
func (a *fetches) askDueAgain() {
	now := time.Since(a.e.base)
	a.askAgain(func(o *op) bool {
		if o.due > now {
			return false
		}
		o.unfetched = 0
		return true
	})
}

// askAgain starts some of the operations. No write starts while a cut holds writes back.
func (a *fetches) askAgain(which func(o *op) bool) {
	list := a.list
	a.list = nil
	for _, o := range list {
		held := a.e.gate.closed && !o.isRead()
		if held {
			o.due = max(o.due, time.Since(a.e.base)+fetchFirst)
		}
		if held || !which(o) {
			a.list = append(a.list, o)
			continue
		}
		o.countInProgress()
		switch {
		case !o.isRead():
			o.stage = stageHead // another write may have changed the block
			a.e.ranges.admit(o)
		case o.isAligned():
			o.readFromMember(o.parent.Buf, o.parent.Off)
		default:
			o.firstStep()
		}
	}
	a.armTimer()
}

// armTimer sets the timer for the next question.
func (a *fetches) armTimer() {
	if len(a.list) == 0 {
		return
	}
	first := slices.MinFunc(a.list, func(x, y *op) int { return int(x.due - y.due) }).due
	wait := max(first-time.Since(a.e.base), fetchFirst/4)
	if a.timer == nil {
		a.timer = time.AfterFunc(wait, func() { a.e.cfg.Loop.Post(a.askDueAgain) })
		return
	}
	a.timer.Reset(wait)
}

// failAll fails the operations: the engine ends.
func (a *fetches) failAll() {
	if a.timer != nil {
		a.timer.Stop()
	}
	list := a.list
	a.list = nil
	for _, o := range list {
		o.countInProgress()
		if !o.isRead() {
			a.e.ranges.busy.push(o)
			if o.slow {
				a.e.ranges.slow++
			}
		}
	}
	for _, o := range list {
		a.e.finishOp(o, syscall.EIO)
	}
}

// countInProgress counts an operation as I/O in progress.
func (o *op) countInProgress() {
	e := o.e
	e.inflight++
	o.gen = e.gens.beginOperation()
}

// untilFetched repeats a read outside of the loop's thread until a member has fetched its blocks, no longer than most;
// 0: without bound.
func untilFetched(ctx context.Context, most time.Duration, read func() error) error {
	began := time.Now()
	for wait := fetchFirst; ; wait = min(2*wait, fetchLast) {
		err := read()
		if !errors.Is(err, stack.ErrNotFetched) {
			return err
		}
		if most > 0 && time.Since(began) > most {
			return api.Errorf(api.Unavailable, "the source of a layer sends no blocks: %w", err)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}
