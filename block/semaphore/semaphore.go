// Package semaphore bounds how many jobs run at once. A Set owns a semaphore per key (a disk, a volume, a request's
// name); the caller brings the limit, because a setting may change the limit while jobs wait.
//
// Invariants: a semaphore never admits a job above the job's limit; every release wakes all jobs that wait for the same
// key, and each job reads the limit again.
//
// The package starts no goroutine. Set.mu is held for moments only, and never while a limit is read.
package semaphore

import (
	"context"
	"sync"
)

// Set has a semaphore per key. The zero value is ready.
type Set[K comparable] struct {
	mu  sync.Mutex
	all map[K]*semaphore // held by jobs
}

// semaphore of one key.
type semaphore struct {
	jobs  int
	freed chan struct{} // closed by the next release
}

// Limit is a limit that never changes.
func Limit(n int) func() int { return func() int { return n } }

// Acquire waits until fewer than limit jobs hold the semaphore of key. An error is that of the context.
func (s *Set[K]) Acquire(ctx context.Context, key K, limit func() int) (release func(), err error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		release, freed := s.attempt(key, limit())
		if release != nil {
			return release, nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
		}
	}
}

// TryAcquire takes the semaphore of key if fewer than limit jobs hold it.
func (s *Set[K]) TryAcquire(key K, limit int) (release func(), ok bool) {
	release, _ = s.attempt(key, limit)
	return release, release != nil
}

func (s *Set[K]) attempt(key K, limit int) (release func(), freed chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := s.all[key]
	if held != nil && held.jobs >= limit {
		return nil, held.freed
	}
	if held == nil {
		if s.all == nil {
			s.all = map[K]*semaphore{}
		}
		held = &semaphore{freed: make(chan struct{})}
		s.all[key] = held
	}
	held.jobs++
	return sync.OnceFunc(func() { s.release(key, held) }), nil
}

func (s *Set[K]) release(key K, held *semaphore) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if held.jobs--; held.jobs == 0 {
		delete(s.all, key)
	}
	close(held.freed)
	held.freed = make(chan struct{})
}
