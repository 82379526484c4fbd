// Package bounded is a store around another store whose calls may hang. A system call on the share of a dead file
// server ends when the server returns, if ever, and no context ends the call. Therefore each call of the inner store
// runs in a goroutine of the bounded Store, and the caller waits at most until the deadline of the call or the end of
// the context. From then on the call is abandoned: the goroutine runs to its end, and the caller has an error.
//
// All stores of the process in the same place share the bound of mostCalls calls, with abandoned calls, so that a dead
// server costs a target a few threads and the node nothing else. While overdue calls hold the whole bound, each new
// call fails at once.
//
// Invariants. Nothing that the caller knows as failed happens later unseen: the inner store learns of the abandonment
// from its context, and a Put that succeeds after the abandonment is undone (target.Undo). No other Put writes the same
// object in the meantime. An abandoned call calls no callback of the caller, besides that of target.WithUndo, and
// returns nothing to the caller, but may read the body of a Put until the call ends.
//
// Each goroutine belongs to a Store and ends with its inner call. Close waits for the goroutines, except for those that
// hang. The last to end closes the inner store. The mutex of registry guards maps and the states of calls; no call of a
// store happens under the mutex.
package bounded

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

const (
	// answerTime is how long a call may take besides the time for its bytes and names, and how long a list may show no
	// object.
	answerTime = time.Minute
	// slowRate is the slowest transfer, in bytes per second, that meets its deadline.
	slowRate = 256 << 10
	// slowDelete is how long a deleted object may take.
	slowDelete = 100 * time.Millisecond
	// unknownSize is the size for the deadline of a Get to the end of an object: a large pack.
	unknownSize = 128 << 20
	// largestSize keeps the deadline of a Get of any length in range.
	largestSize = 1 << 40
	// mostCalls bounds the calls in a place, running and abandoned ones.
	mostCalls = 16
	// closeTime is how long Close waits for calls that are not overdue.
	closeTime = 10 * time.Second
)

// Store is a store whose calls end in time.
type Store struct {
	place string
	inner target.Store
	ctx   context.Context // ends with Close
	end   context.CancelFunc

	once    sync.Once
	closed  chan struct{} // closed after the inner store
	failure error         // of the inner Close; guarded by closed
}

var _ target.Store = (*Store)(nil)

// Open opens the inner store with open, which may hang, too. The place names the store in errors, and is equal for
// stores that hang together. The caller closes the Store, which then closes an inner store that is an io.Closer.
func Open(ctx context.Context, place string, open func(ctx context.Context) (target.Store, error)) (*Store, error) {
	s := &Store{place: place, closed: make(chan struct{})}
	s.ctx, s.end = context.WithCancel(context.Background())
	inner, err := run(ctx, s, call{action: "open the store", allowed: answerTime}, open)
	if err != nil {
		s.end()
		return nil, err
	}
	s.inner = inner
	return s, nil
}

// Close ends the calls of the Store, waits for them, and closes the inner store. An error says how many calls still
// hang; the inner store is closed when they have returned.
func (s *Store) Close() error {
	s.end()
	wait, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	own := calls.ofStore(s)
	s.closeInner(own)
	hanging := 0
	for _, c := range own {
		select {
		case <-c.returned:
			continue
		default:
		}
		if calls.isOverdue(c) {
			hanging++
			continue
		}
		select {
		case <-c.returned:
		case <-wait.Done():
			hanging++
		}
	}
	if hanging > 0 {
		return api.Errorf(api.Unavailable, "%s: closed while operations hang (%d); check its server", s.place, hanging)
	}
	select {
	case <-s.closed:
		return s.failure
	case <-wait.Done():
		return api.Errorf(api.Unavailable, "%s: the end of the store hangs; check its server", s.place)
	}
}

// closeInner closes the inner store, once, after own calls have returned. The goroutine hangs as long as a call hangs.
func (s *Store) closeInner(own []*call) {
	s.once.Do(func() {
		inner, ok := s.inner.(io.Closer)
		if !ok {
			close(s.closed)
			return
		}
		go func() {
			defer close(s.closed)
			for _, c := range own {
				<-c.returned
			}
			s.failure = inner.Close()
		}()
	})
}

// String names the store in errors.
func (s *Store) String() string { return s.place }

// transferTime is the time for n bytes.
func transferTime(n int64) time.Duration {
	return answerTime + time.Duration(min(n, largestSize)/slowRate)*time.Second
}

// nothing is the result of a call without one.
type nothing struct{}

// Put implements target.Store. After an error, body belongs to the store.
func (s *Store) Put(ctx context.Context, name string, body []byte) error {
	_, err := run(ctx, s, call{action: "write object " + name, writes: name, allowed: transferTime(int64(len(body)))},
		func(ctx context.Context) (nothing, error) { return nothing{}, s.inner.Put(ctx, name, body) })
	return err
}

// Get implements target.Store.
func (s *Store) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	size := n
	if n < 0 {
		size = unknownSize
	}
	return run(ctx, s, call{action: "read object " + name, allowed: transferTime(size)},
		func(ctx context.Context) ([]byte, error) { return s.inner.Get(ctx, name, off, n) })
}

// Stat implements target.Store.
func (s *Store) Stat(ctx context.Context, name string) (target.Object, error) {
	return run(ctx, s, call{action: "look up object " + name, allowed: answerTime},
		func(ctx context.Context) (target.Object, error) { return s.inner.Stat(ctx, name) })
}

// List implements target.Store. The deadline moves with each object, and the time that each takes does not count.
func (s *Store) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	objects := make(chan target.Object)
	_, err := run(ctx, s, call{action: fmt.Sprintf("list objects %q", prefix), allowed: answerTime, objects: objects,
		each: each},
		func(ctx context.Context) (nothing, error) {
			return nothing{}, s.inner.List(ctx, prefix, func(o target.Object) error {
				select {
				case objects <- o:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		})
	return err
}

// ListFolders implements target.FolderLister, as List does.
func (s *Store) ListFolders(ctx context.Context, prefix string, each func(string) error) error {
	folders := make(chan target.Object)
	_, err := run(ctx, s, call{action: fmt.Sprintf("list folders %q", prefix), allowed: answerTime, objects: folders,
		each: func(o target.Object) error { return each(o.Name) }},
		func(ctx context.Context) (nothing, error) {
			return nothing{}, target.ListFolders(ctx, s.inner, prefix, func(name string) error {
				select {
				case folders <- target.Object{Name: name}:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		})
	return err
}

// Delete implements target.Store.
func (s *Store) Delete(ctx context.Context, names ...string) error {
	action := "delete objects"
	if len(names) == 1 {
		action = "delete object " + names[0]
	}
	_, err := run(ctx, s, call{action: action, allowed: answerTime + time.Duration(len(names))*slowDelete},
		func(ctx context.Context) (nothing, error) { return nothing{}, s.inner.Delete(ctx, names...) })
	return err
}
