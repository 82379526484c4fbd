// Package holders keeps works that read held layers apart from releases of the holds.
//
// Invariants: a work is in the Set from before the work takes its hold until after the last read. Nobody releases the
// hold meanwhile, and a work enters after the end of a release in progress. So a work that finds the hold of a
// predecessor keeps the hold, and a disk that hangs in a release delays the works of that hold alone.
//
// The package has no goroutine, and holds no lock over I/O.
package holders

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/block/semaphore"
)

// Hold is the hold of a holder on a disk.
type Hold struct {
	Disk   api.UID
	Holder string
}

// Set has the holds in use or in release. The zero value is ready.
type Set struct {
	uses semaphore.Set[Hold]
}

// Enter begins the use of a hold by a work, until the call of leave. A hold has one work at a time.
func (s *Set) Enter(ctx context.Context, h Hold) (leave func(), err error) {
	return s.uses.Acquire(ctx, h, semaphore.Limit(1))
}

// Release calls release, unless a work uses the hold, or another caller releases the hold.
func (s *Set) Release(h Hold, release func() error) error {
	leave, free := s.uses.TryAcquire(h, 1)
	if !free {
		return nil
	}
	defer leave()
	return release()
}
