// Package iothreads owns the I/O threads that the engines and served replicas of a node share: one locked goroutine
// each, which Close ends and awaits. A user has a thread from Pick to PutBack.
package iothreads

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/engine"
)

// ringEntries bounds the submissions of one io_uring_enter, not the requests in progress.
const ringEntries = 256

// Thread is an I/O thread, with the buffers of its engines.
type Thread struct {
	*uring.Loop
	Pool *engine.Pool

	users int // under Threads.mu
	done  chan error
}

// Threads of a node.
type Threads struct {
	mu  sync.Mutex
	all []*Thread
}

// Start starts n threads.
func Start(n int, log *slog.Logger) (*Threads, error) {
	t := &Threads{}
	for range n {
		l, err := uring.New(ringEntries)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("I/O thread: %w", err), t.Close())
		}
		pool, err := engine.NewPool()
		if err != nil {
			l.Close()
			return nil, errors.Join(err, t.Close())
		}
		thread := &Thread{Loop: l, Pool: pool, done: make(chan error, 1)}
		go func() {
			err := l.Run()
			if err != nil {
				log.Error("an I/O thread ended", "err", err)
			}
			thread.done <- err
		}()
		t.all = append(t.all, thread)
		runs := make(chan struct{})
		l.Post(func() { close(runs) })
		select {
		case <-runs: // to close a loop that does not run yet is an error
		case err := <-thread.done:
			thread.done <- err
			return nil, errors.Join(fmt.Errorf("I/O thread: %w", err), t.Close())
		}
	}
	return t, nil
}

// Pick is the thread with the fewest users; PutBack follows.
func (t *Threads) Pick() (*Thread, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.all) == 0 {
		return nil, api.Errorf(api.Unavailable, "the data role is stopping")
	}
	best := t.all[0]
	for _, l := range t.all {
		if l.users < best.users {
			best = l
		}
	}
	best.users++
	return best, nil
}

// PutBack ends the use of a thread.
func (t *Threads) PutBack(l *Thread) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l.users--
}

// Close ends the threads. No user may be left.
func (t *Threads) Close() error {
	t.mu.Lock()
	all := t.all
	t.all = nil
	t.mu.Unlock()
	var errs []error
	for _, l := range all {
		l.Close()
		errs = append(errs, <-l.done)
		l.Pool.Close()
	}
	return errors.Join(errs...)
}
