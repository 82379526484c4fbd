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
	spareShare = 20      // one part in so many of the disk stays free,
	spareMost  = 1 << 30 // but no more than this, in bytes
	lookEvery  = 8 << 20 // bytes between two looks
)

// room looks, while an image is written, that its disk keeps some.
type room struct {
	on   block.Layers
	path string
	left atomic.Int64 // bytes to write until the next look
	sent atomic.Int64 // bytes that may not be on the disk yet
}

// newRoom is for a disk that is a folder; for any other, nothing is looked at.
func newRoom(on block.Layers) *room {
	r := &room{on: on}
	if at, ok := on.(interface{ Path() string }); ok {
		r.path = at.Path()
	}
	return r
}

// take is asked for n more bytes.
func (r *room) take(n int64) error {
	if r.path == "" || r.left.Add(-n) >= 0 {
		return nil
	}
	r.left.Store(lookEvery)
	var st unix.Statfs_t
	if err := unix.Statfs(r.path, &st); err != nil {
		return api.Errorf(api.Unavailable, "disk %s: how much room is left: %w", r.on.UID(), err)
	}
	free, spare := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/spareShare, spareMost)
	if free-lookEvery-r.sent.Load() < spare {
		return api.Errorf(api.Full, "disk %s is full: %s are free, and an image leaves %s to the volumes: free some room, "+
			"or let the image go to a larger disk", r.on.UID(), api.SizeText(free), api.SizeText(spare))
	}
	return nil
}

// within is put as long as there is room for it; zeros take none.
func (r *room) within(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		if !isZero(p) {
			r.sent.Add(int64(len(p)))
			defer r.sent.Add(-int64(len(p)))
			if err := r.take(int64(len(p))); err != nil {
				return err
			}
		}
		return put(p, off)
	}
}

// roomySink is a sink that looks at the room.
type roomySink struct {
	block.Sink
	room *room
}

func (s roomySink) WriteAt(p []byte, off int64) (int, error) {
	s.room.sent.Add(int64(len(p)))
	defer s.room.sent.Add(-int64(len(p)))
	if err := s.room.take(int64(len(p))); err != nil {
		return 0, err
	}
	return s.Sink.WriteAt(p, off)
}
