package engine

import (
	"bytes"
	"context"
	"errors"
	"sync"

	"drover.io/drover/block"
)

// farReplica is a replica on another node. While that is away its requests wait, to be sent again.
type farReplica struct {
	*replica

	mu    sync.Mutex
	link  func(down error)
	dead  error
	asked map[*block.Request]bool // what was not answered; false: it was abandoned while its memory was in use
	late  int                     // requests that were abandoned, and the disk has them still
}

// OnLink implements Remote.
func (f *farReplica) OnLink(fn func(down error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.link = fn
}

// Submit implements block.Submitter. What travels is a copy.
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
			if q.Op == block.OpRead { // nobody writes to the memory of a write: the engine may use it for the next
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

// Adopt implements Member: it drains what the disk has of a session that was abandoned.
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
