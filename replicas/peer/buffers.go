package peer

import (
	"sync"

	"golang.org/x/sys/unix"
)

// buffers are page-aligned memory for payloads, in a few sizes, bounded in all. Who finds none waits: that is the
// back-pressure of a server.
type buffers struct {
	mu    sync.Mutex
	room  *sync.Cond
	left  int64
	free  [len(classes)][][]byte
	ended bool
}

var classes = [...]int{4 << 10, 32 << 10, 256 << 10, 1 << 20, maxPayload}

func newBuffers(limit int64) *buffers {
	b := &buffers{left: limit}
	b.room = sync.NewCond(&b.mu)
	return b
}

func class(n int) int {
	for c, size := range classes {
		if n <= size {
			return c
		}
	}
	return -1
}

// get returns a buffer of n bytes; false once the buffers are closed.
func (b *buffers) get(n int) ([]byte, bool) {
	c := class(n)
	if c < 0 {
		return nil, false
	}
	size := int64(classes[c])
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.ended {
		if l := len(b.free[c]); l > 0 {
			buf := b.free[c][l-1]
			b.free[c] = b.free[c][:l-1]
			return buf[:n], true
		}
		if b.left >= size || b.trim(c, size) {
			buf, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
			if err == nil {
				b.left -= size
				return buf[:n], true
			}
		}
		b.room.Wait()
	}
	return nil, false
}

// trim gives back free buffers of other sizes until there is room for one of size. The caller has the lock.
func (b *buffers) trim(not int, size int64) bool {
	for c := range b.free {
		for c != not && len(b.free[c]) > 0 && b.left < size {
			l := len(b.free[c]) - 1
			b.drop(b.free[c][l])
			b.free[c] = b.free[c][:l]
		}
	}
	return b.left >= size
}

func (b *buffers) drop(buf []byte) {
	buf = buf[:cap(buf)]
	b.left += int64(len(buf))
	_ = unix.Munmap(buf) // fails only for an address that is not mapped
}

func (b *buffers) put(buf []byte) {
	if buf == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		b.drop(buf)
	} else {
		c := class(cap(buf))
		b.free[c] = append(b.free[c], buf[:0])
	}
	b.room.Broadcast()
}

// close gives the free ones back; the others follow when they are put.
func (b *buffers) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	for c := range b.free {
		for _, buf := range b.free[c] {
			b.drop(buf)
		}
		b.free[c] = nil
	}
	b.room.Broadcast()
}
