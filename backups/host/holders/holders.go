// Package holders knows which works of this process hold layers on the node's disks, so that the collector releases the
// holds of killed processes alone.
//
// Invariant: a work is in the Set from before its hold until after the release, and Release releases no stale hold
// while a work enters the Set. So a work that finds the hold of a predecessor keeps the hold.
//
// The package has no goroutine. Lock order: Set.mu is a leaf, which Release holds over the I/O of a release.
package holders

import "sync"

// Set is the set of holders with a work in this process. The zero value is ready.
type Set struct {
	mu    sync.Mutex
	works map[string]int // by holder
}

// Add adds a holder, before the work takes its hold.
func (s *Set) Add(holder string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.works == nil {
		s.works = map[string]int{}
	}
	s.works[holder]++
}

// Remove takes back an Add, after the work released the hold or left the hold to the collector.
func (s *Set) Remove(holder string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.works[holder]--; s.works[holder] <= 0 {
		delete(s.works, holder)
	}
}

// Release calls release for a holder without a work, and does nothing for a holder with a work.
func (s *Set) Release(holder string, release func(holder string) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.works[holder] > 0 {
		return nil
	}
	return release(holder)
}
