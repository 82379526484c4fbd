package engine

import (
	"bytes"
	"context"
	"errors"
	"sync"

	"drover.io/drover/block"
)

// farReplica is a replica on another node. While the node is away, requests wait, and are then sent again.
type farReplica struct {
	*replica

	mu    sync.Mutex
	link  func(down error)
	dead  error
	asked map[*block.Request]bool // requests without an answer; false: abandoned while the memory was in use
	late  int                     // abandoned requests that the disk still has
}

// OnLink implements Remote.
func (f *farReplica) OnLink(fn func(down error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.link = fn
}

// Submit implements block.Submitter. The disk gets a copy of the request.
func (f *farReplica) Submit(q *block.Request) {
	f.mu.Lock()
	if q.Err = f.dead; q.Err != nil {
		f.mu.Unlock()
		q.Done(q)
		return
	}
	f.asked[q] = true
	f.mu.Unlock()
	sent := &block.Request{Op: q.Op, Off: q.Off, Len: q.Len, Buf: bytes.Clone(q.Buf)}
	sent.Done = func(sent *block.Request) {
		f.mu.Lock()
		lives, waits := f.asked[q]
		again := lives && errors.Is(sent.Err, errAway)
		switch {
		case waits && !again:
			delete(f.asked, q)
		case !waits:
			f.late--
		}
		f.mu.Unlock()
		if again {
			f.replica.Submit(sent)
		} else if waits {
			if q.Op == block.OpRead { // else unchanged: the engine may reuse a write's memory
				copy(q.Buf, sent.Buf)
			}
			q.Err = sent.Err
			q.Done(q)
		}
	}
	f.replica.Submit(sent)
}

// Abandon implements Remote.
func (f *farReplica) Abandon(why error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = why
	for q := range f.asked {
		if q.Off/block.Size%3 == 0 {
			f.asked[q] = false
			continue
		}
		delete(f.asked, q)
		f.late++
		f.w.l.Post(func() {
			q.Err = why
			q.Done(q)
		})
	}
}

// Adopt implements Member. Adopt succeeds only once the disk has no requests of an abandoned session.
func (f *farReplica) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	err := f.replica.Adopt(ctx, epoch, incarnation, members)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil || f.late > 0 || f.dead != nil && len(f.asked) > 0 {
		return errAway
	}
	f.dead = nil
	f.link(nil)
	return nil
}

// goAway has the replica be reached, or not.
func (r *replica) goAway(is func(bool) bool) {
	r.mu.Lock()
	was := r.away
	r.away = is(was)
	now, f := r.away, r.far
	r.mu.Unlock()
	if f == nil || now == was {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead != nil {
		return
	}
	if now {
		f.link(errAway)
	} else {
		f.link(nil)
	}
}
