package importer

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// An import stops before its disk is full: volumes on the disk need room to write, and the origin alone decides how
// many bytes arrive.
const (
	minFreeShare = 20      // the part of the disk that stays free, as a divisor
	maxMinFree   = 1 << 30 // bytes; the upper limit of that part
	checkEvery   = 8 << 20 // bytes between two checks
)

// spaceGuard checks the free room of a disk while an image is written.
type spaceGuard struct {
	on         block.Layers
	path       string
	untilCheck atomic.Int64 // bytes to write until the next check
	inFlight   atomic.Int64 // bytes that the disk may not count yet
}

// newSpaceGuard guards a disk that is a folder; other disks have no check.
func newSpaceGuard(on block.Layers) *spaceGuard {
	r := &spaceGuard{on: on}
	if at, ok := on.(interface{ Path() string }); ok {
		r.path = at.Path()
	}
	return r
}

// checkSpace asks for room for n bytes.
func (r *spaceGuard) checkSpace(n int64) error {
	if r.path == "" || r.untilCheck.Add(-n) >= 0 {
		return nil
	}
	r.untilCheck.Store(checkEvery)
	var st unix.Statfs_t
	if err := unix.Statfs(r.path, &st); err != nil {
		return api.Errorf(api.Unavailable, "disk %s: free room unknown: %w", r.on.UID(), err)
	}
	free, spare := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/minFreeShare, maxMinFree)
	if free-checkEvery-r.inFlight.Load() < spare {
		return api.Errorf(api.Full, "disk %s is full: %s are free, and an image leaves %s to the volumes: free some room, "+
			"or let the image go to a larger disk", r.on.UID(), api.SizeText(free), api.SizeText(spare))
	}
	return nil
}

// guardPut checks the room before each put. Chunks of zeros take no room.
func (r *spaceGuard) guardPut(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		if !isZero(p) {
			r.inFlight.Add(int64(len(p)))
			defer r.inFlight.Add(-int64(len(p)))
			if err := r.checkSpace(int64(len(p))); err != nil {
				return err
			}
		}
		return put(p, off)
	}
}

// guardedSink checks the room before each write.
type guardedSink struct {
	block.Sink
	room *spaceGuard
}

func (s guardedSink) WriteAt(p []byte, off int64) (int, error) {
	s.room.inFlight.Add(int64(len(p)))
	defer s.room.inFlight.Add(-int64(len(p)))
	if err := s.room.checkSpace(int64(len(p))); err != nil {
		return 0, err
	}
	return s.Sink.WriteAt(p, off)
}

// WriteChunk implements block.DigestSink.
func (s guardedSink) WriteChunk(p []byte, off int64, digest [32]byte) error {
	to, takes := s.Sink.(block.DigestSink)
	if !takes {
		_, err := s.WriteAt(p, off)
		return err
	}
	s.room.inFlight.Add(int64(len(p)))
	defer s.room.inFlight.Add(-int64(len(p)))
	if err := s.room.checkSpace(int64(len(p))); err != nil {
		return err
	}
	return to.WriteChunk(p, off, digest)
}
