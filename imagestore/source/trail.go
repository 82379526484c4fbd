package source

import (
	"encoding"
	"hash"
	"sync"
)

// Trail remembers the states that a checksum had along a stream: who goes on at a place of it needs the state there.
// Note belongs to the goroutine that sums, Before to any.
type Trail struct {
	mu     sync.Mutex
	stride int64
	marks  []TrailMark
}

// TrailMark is a state after off bytes.
type TrailMark struct {
	Off int64
	Sum []byte
	CRC uint32
}

const (
	trailStride = 256 << 10
	trailMost   = 4096
)

// Note is told that off bytes are summed. It remembers some of them, and always the first.
func (t *Trail) Note(off int64, sum hash.Hash, crc uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.marks); n > 0 && off-t.marks[n-1].Off < max(t.stride, trailStride) {
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
	t.marks = append(t.marks, TrailMark{off, state, crc})
	if len(t.marks) < trailMost {
		return
	}
	// Nobody asks for a long time: fewer will do.
	t.stride = 2 * max(t.stride, trailStride)
	n := 0
	for i := 0; i < len(t.marks); i += 2 {
		t.marks[n] = t.marks[i]
		n++
	}
	t.marks = t.marks[:n]
}

// Before is the last state that is remembered at or before off. Earlier ones are forgotten.
func (t *Trail) Before(off int64) (TrailMark, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for n < len(t.marks) && t.marks[n].Off <= off {
		n++
	}
	if n == 0 {
		return TrailMark{}, false
	}
	t.marks = append(t.marks[:0], t.marks[n-1:]...)
	t.stride = 0
	return t.marks[0], true
}
