package origin

import (
	"encoding"
	"hash"
	"sync"
)

// HashStates remembers states of a hash along a stream. A transfer that continues at a place needs the state at the
// place. The goroutine that hashes calls Record; any goroutine may call Before.
type HashStates struct {
	mu     sync.Mutex
	stride int64
	states []HashState
}

// HashState is the state of a hash after Off bytes.
type HashState struct {
	Off int64
	Sum []byte
}

const (
	hashStride    = 256 << 10 // bytes between two states, at least
	maxHashStates = 4096
)

// Record is called once the hash covers off bytes. Record keeps the first state and then one per stride.
func (s *HashStates) Record(off int64, sum hash.Hash) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.states); n > 0 && off-s.states[n-1].Off < max(s.stride, hashStride) {
		return
	}
	m, ok := sum.(encoding.BinaryMarshaler)
	if !ok {
		return
	}
	state, err := m.MarshalBinary()
	if err != nil {
		return
	}
	s.states = append(s.states, HashState{off, state})
	if len(s.states) < maxHashStates {
		return
	}
	// Without a call of Before the list would grow with the stream: half of the states suffice, at twice the stride.
	s.stride = 2 * max(s.stride, hashStride)
	n := 0
	for i := 0; i < len(s.states); i += 2 {
		s.states[n] = s.states[i]
		n++
	}
	s.states = s.states[:n]
}

// Before returns the last known state at or before off, and forgets earlier states.
func (s *HashStates) Before(off int64) (HashState, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < len(s.states) && s.states[n].Off <= off {
		n++
	}
	if n == 0 {
		return HashState{}, false
	}
	s.states = append(s.states[:0], s.states[n-1:]...)
	s.stride = 0
	return s.states[0], true
}
