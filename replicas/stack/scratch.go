package stack

import (
	"sync"

	"drover.io/drover/replicas/stack/diskfs"
)

// scratch is memory that content is read into to be digested: so much for a disk, however many ask at once. A replica
// that has none gets a little where nothing is left, as what the others read may never come.
type scratch struct {
	mu   sync.Mutex
	room sync.Cond
	used int              // large ones
	has  map[*Replica]int // of both sizes
}

var scratches = sync.Pool{New: func() any { b := diskfs.AlignedBuffer(scratchSize); return &b }}

const (
	scratchSize   = 1 << 20
	scratchCount  = 16
	scratchLittle = 64 << 10
)

// Scratch is memory to read into, aligned for direct I/O, until it is given back: 1 MiB, or 64 KiB where others have
// what the disk has of it. It waits for what the replica itself has alone.
func (r *Replica) Scratch() (buf []byte, back func()) {
	s := &r.disk.scratch
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.has == nil {
		s.has, s.room.L = map[*Replica]int{}, &s.mu
	}
	for s.used >= scratchCount && s.has[r] > 0 {
		s.room.Wait()
	}
	s.has[r]++
	if s.used >= scratchCount {
		return diskfs.AlignedBuffer(scratchLittle), func() { s.back(r, 0) }
	}
	s.used++
	b := scratches.Get().(*[]byte)
	return *b, func() {
		scratches.Put(b)
		s.back(r, 1)
	}
}

func (s *scratch) back(r *Replica, large int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.has[r]--; s.has[r] == 0 {
		delete(s.has, r)
	}
	s.used -= large
	s.room.Broadcast()
}
