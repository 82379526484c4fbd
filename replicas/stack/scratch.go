package stack

import (
	"sync"

	"drover.io/drover/block"
)

// scratch is the bounded memory of a disk for reads that compute digests. A replica without a buffer gets a small one
// when all large ones are in use, because reads of other replicas may never end.
type scratch struct {
	mu   sync.Mutex
	room sync.Cond
	used int              // large ones
	has  map[*Replica]int // of both sizes
}

var scratches = sync.Pool{New: func() any { b := block.AlignedBuffer(scratchSize); return &b }}

const (
	scratchSize   = 1 << 20
	scratchCount  = 16
	scratchLittle = 64 << 10
)

// Scratch returns a buffer for direct I/O until back is called: 1 MiB, or 64 KiB while other replicas have all large
// buffers. Scratch waits only for buffers of the replica itself.
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
		return block.AlignedBuffer(scratchLittle), func() { s.giveBack(r, 0) }
	}
	s.used++
	b := scratches.Get().(*[]byte)
	return *b, func() {
		scratches.Put(b)
		s.giveBack(r, 1)
	}
}

func (s *scratch) giveBack(r *Replica, large int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.has[r]--; s.has[r] == 0 {
		delete(s.has, r)
	}
	s.used -= large
	s.room.Broadcast()
}
