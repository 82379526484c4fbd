package bounded

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/semaphore"
)

// call is one call of the inner store.
type call struct {
	action  string // for errors
	writes  string // the object that a Put writes
	allowed time.Duration
	objects <-chan target.Object // of a list, for each
	each    func(target.Object) error

	store    *Store
	caller   context.Context
	ctx      context.Context // of the inner call
	cancel   context.CancelFunc
	timer    *time.Timer
	returned chan struct{} // closed after the inner call and its undoing

	state state // guarded by registry.mu
}

// state is the state of a call.
type state int

const (
	running   state = iota
	done            // the caller has the result
	abandoned       // the caller has an error, and the inner call runs
	overdue         // abandoned because of the deadline
)

// registry has the calls of all stores of the process, because system calls that hang outlive their store.
type registry struct {
	slots semaphore.Set[string] // by place; a call holds a slot until it returns

	mu      sync.Mutex
	byPlace map[string]map[*call]struct{}
}

var calls registry

// run runs inner in a goroutine of s until inner returns or the call is abandoned.
func run[T any](ctx context.Context, s *Store, c call, inner func(context.Context) (T, error)) (result T, err error) {
	release, err := c.begin(ctx, s)
	if err != nil {
		return result, err
	}
	defer c.leave()
	var value T
	var failure error
	go func() {
		defer close(c.returned)
		defer release()
		defer calls.remove(&c)
		value, failure = inner(c.ctx)
		if calls.settle(&c, done) || failure != nil {
			return
		}
		if c.writes != "" {
			c.undoPut()
		} else if opened, ok := any(value).(io.Closer); ok {
			_ = opened.Close() // the inner store that Open opened too late
		}
	}()
	if err := c.await(); err != nil {
		return result, err
	}
	if end := c.ctx.Err(); end != nil && errors.Is(failure, end) { // the inner call saw the end first
		return result, c.failed()
	}
	return value, failure
}

// begin waits for a slot in the place of s.
func (c *call) begin(ctx context.Context, s *Store) (release func(), err error) {
	c.store, c.caller, c.returned = s, ctx, make(chan struct{})
	if err := calls.checkPlace(s.place, c.action); err != nil {
		return nil, err
	}
	inner, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	c.ctx, c.cancel = inner, func() { stop(); cancel() }
	c.timer = time.AfterFunc(answerTime, cancel)
	release, err = calls.slots.Acquire(c.ctx, s.place, semaphore.Limit(mostCalls))
	if err != nil {
		err = c.failed()
	} else if err = calls.add(c); err != nil {
		release()
	}
	if err != nil {
		c.leave()
		return nil, err
	}
	c.timer.Reset(c.allowed)
	return release, nil
}

// leave ends the context of the inner call.
func (c *call) leave() {
	c.timer.Stop()
	c.cancel()
}

// await waits until the inner call returned; an error says why the call is abandoned.
func (c *call) await() error {
	for {
		select {
		case <-c.returned:
			return nil
		case o := <-c.objects:
			c.timer.Stop()
			if err := c.each(o); err != nil {
				calls.settle(c, abandoned)
				return err
			}
			c.timer.Reset(c.allowed)
		case <-c.ctx.Done():
			why := overdue
			if c.caller.Err() != nil || c.store.ctx.Err() != nil {
				why = abandoned
			}
			if calls.settle(c, why) {
				return c.failed()
			}
			<-c.returned
			return nil
		}
	}
}

// failed is the error of a call whose context ended.
func (c *call) failed() error {
	switch {
	case c.caller.Err() != nil:
		return api.Errorf(api.Other, "%s: cannot %s: %w", c.store.place, c.action, c.caller.Err())
	case c.store.ctx.Err() != nil:
		return c.unavailable("the store is closed")
	}
	return c.unavailable("no answer in time; check its server")
}

func (c *call) unavailable(cause string) error {
	return api.Errorf(api.Unavailable, "%s: cannot %s: %s", c.store.place, c.action, cause)
}

// undoPut undoes a Put that succeeded after its caller had an error. Otherwise an index file or a snapshot would appear
// after a sweep has deleted the packs that no file named.
func (c *call) undoPut() {
	if err := target.Undo(context.WithoutCancel(c.ctx), c.store.inner, c.writes); err != nil {
		slog.Warn("an object that was written too late cannot be undone", "store", c.store.place, "object", c.writes,
			"error", err)
	}
}

// checkPlace refuses a call in a place whose slots are all held by overdue calls.
func (r *registry) checkPlace(place, action string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	hanging := 0
	for c := range r.byPlace[place] {
		if c.state == overdue {
			hanging++
		}
	}
	if hanging >= mostCalls {
		return api.Errorf(api.Unavailable, "%s: cannot %s: %d operations hang; check its server", place, action, hanging)
	}
	return nil
}

// add enters a call that holds a slot, unless the store is closed or an abandoned Put of the same object runs, whose
// undoing would delete the later object.
func (r *registry) add(c *call) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.store.ctx.Err() != nil {
		return c.unavailable("the store is closed")
	}
	for other := range r.byPlace[c.store.place] {
		if c.writes != "" && other.writes == c.writes && other.state >= abandoned {
			return c.unavailable("an earlier write of the object hangs; check its server")
		}
	}
	if r.byPlace == nil {
		r.byPlace = map[string]map[*call]struct{}{}
	}
	if r.byPlace[c.store.place] == nil {
		r.byPlace[c.store.place] = map[*call]struct{}{}
	}
	r.byPlace[c.store.place][c] = struct{}{}
	return nil
}

func (r *registry) remove(c *call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byPlace[c.store.place], c)
	if len(r.byPlace[c.store.place]) == 0 {
		delete(r.byPlace, c.store.place)
	}
}

// settle decides whether the caller has the result or an error: the first decision stands, and settle reports whether
// this one does.
func (r *registry) settle(c *call, to state) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.state != running {
		return false
	}
	c.state = to
	return true
}

// ofStore returns the calls of s. No call enters after s.ctx has ended.
func (r *registry) ofStore(s *Store) (own []*call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.byPlace[s.place] {
		if c.store == s {
			own = append(own, c)
		}
	}
	return own
}

func (r *registry) isOverdue(c *call) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return c.state == overdue
}
