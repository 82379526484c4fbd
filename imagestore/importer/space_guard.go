package importer

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// An image stops short of filling its disk: volumes on it need room to write, and how much a source sends is for the
// source to say.
const (
	minFreeShare = 20      // one part in so many of the disk stays free,
	maxMinFree   = 1 << 30 // but no more than this, in bytes
	checkEvery   = 8 << 20 // bytes between two looks
)

// space looks, while an image is written, that its disk keeps some.
type spaceGuard struct {
	on         block.Layers
	path       string
	untilCheck atomic.Int64 // bytes to write until the next look
	inFlight   atomic.Int64 // bytes that may not be on the disk yet
}

// newSpaceGuard is for a disk that is a folder; for any other, nothing is looked at.
func newSpaceGuard(on block.Layers) *spaceGuard {
	r := &spaceGuard{on: on}
	if at, ok := on.(interface{ Path() string }); ok {
		r.path = at.Path()
	}
	return r
}

// reserve is asked for n more bytes.
func (r *spaceGuard) reserve(n int64) error {
	if r.path == "" || r.untilCheck.Add(-n) >= 0 {
		return nil
	}
	r.untilCheck.Store(checkEvery)
	var st unix.Statfs_t
	if err := unix.Statfs(r.path, &st); err != nil {
		return api.Errorf(api.Unavailable, "disk %s: how much room is left: %w", r.on.UID(), err)
	}
	free, spare := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/minFreeShare, maxMinFree)
	if free-checkEvery-r.inFlight.Load() < spare {
		return api.Errorf(api.Full, "disk %s is full: %s are free, and an image leaves %s to the volumes: free some room, "+
			"or let the image go to a larger disk", r.on.UID(), api.SizeText(free), api.SizeText(spare))
	}
	return nil
}

// guard is put as long as there is room for it; zeros take none.
func (r *spaceGuard) guard(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		if !isZero(p) {
			r.inFlight.Add(int64(len(p)))
			defer r.inFlight.Add(-int64(len(p)))
			if err := r.reserve(int64(len(p))); err != nil {
				return err
			}
		}
		return put(p, off)
	}
}

// guardedSink is a sink that looks at the room.
type guardedSink struct {
	block.Sink
	room *spaceGuard
}

func (s guardedSink) WriteAt(p []byte, off int64) (int, error) {
	s.room.inFlight.Add(int64(len(p)))
	defer s.room.inFlight.Add(-int64(len(p)))
	if err := s.room.reserve(int64(len(p))); err != nil {
		return 0, err
	}
	return s.Sink.WriteAt(p, off)
}
