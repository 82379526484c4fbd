package peer

import (
	"sync"

	"golang.org/x/sys/unix"
)

// buffers are page-aligned memory for payloads, in a few sizes, bounded in all. A session without a buffer waits: this
// is the back-pressure of a server. But a session with a small share gets a buffer in any case: other sessions with
// hanging disks, or without reads of their answers, cannot block the session.
type buffers struct {
	mu    sync.Mutex
	room  *sync.Cond
	left  int64 // below 0 where sessions were given more than there is
	free  [len(classes)][][]byte
	ended bool
}

// account counts the buffers of a session, or of all sessions of a connection.
type account struct {
	of     *account // of the session's connection
	held   int64    // bytes, of the requested lengths
	closed bool     // of a connection: gets no more buffers
}

const (
	// connMost bounds the buffers of a connection: twice the announced credit, because a disk may still use the buffers
	// of abandoned requests.
	connMost = 2 * connCredit
	// sessionShare is the share of a session also beyond the bounds; or one buffer, if larger.
	sessionShare = 256 << 10
)

var classes = [...]int{4 << 10, 32 << 10, 256 << 10, 1 << 20, maxPayload}

func newBuffers(limit int64) *buffers {
	b := &buffers{left: limit}
	b.room = sync.NewCond(&b.mu)
	return b
}

func classOf(n int) int {
	for c, size := range classes {
		if n <= size {
			return c
		}
	}
	return -1
}

// getBuffer returns a buffer of n bytes for a session; false once its connection or the buffers are closed.
func (b *buffers) getBuffer(n int, a *account) ([]byte, bool) {
	c := classOf(n)
	if c < 0 {
		return nil, false
	}
	size, conn := int64(classes[c]), a.of
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.ended && !conn.closed {
		if conn.held > 0 && conn.held+int64(n) > connMost {
			b.room.Wait() // until the client takes answers
			continue
		}
		var buf []byte
		if l := len(b.free[c]); l > 0 {
			buf = b.free[c][l-1]
			b.free[c] = b.free[c][:l-1]
		} else if b.left >= size || b.freeOtherSizes(c, size) || a.held == 0 || a.held+size <= sessionShare {
			var err error
			if buf, err = unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE); err == nil {
				b.left -= size
			}
		}
		if buf != nil {
			a.held += int64(n)
			conn.held += int64(n)
			return buf[:n], true
		}
		b.room.Wait()
	}
	return nil, false
}

// endWaits ends all waits for a connection's buffers.
func (b *buffers) endWaits(conn *account) {
	b.mu.Lock()
	conn.closed = true
	b.room.Broadcast()
	b.mu.Unlock()
}

// freeOtherSizes frees unused buffers of other sizes until one of size fits. The caller has the lock.
func (b *buffers) freeOtherSizes(not int, size int64) bool {
	for c := range b.free {
		for c != not && len(b.free[c]) > 0 && b.left < size {
			l := len(b.free[c]) - 1
			b.freeBuffer(b.free[c][l])
			b.free[c] = b.free[c][:l]
		}
	}
	return b.left >= size
}

func (b *buffers) freeBuffer(buf []byte) {
	buf = buf[:cap(buf)]
	b.left += int64(len(buf))
	_ = unix.Munmap(buf) // fails only for an unmapped address
}

// putBuffer takes a buffer back, with its length as of get.
func (b *buffers) putBuffer(buf []byte, a *account) {
	if buf == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	a.held -= int64(len(buf))
	a.of.held -= int64(len(buf))
	if b.ended || b.left < 0 {
		b.freeBuffer(buf)
	} else {
		c := classOf(cap(buf))
		b.free[c] = append(b.free[c], buf[:0])
	}
	b.room.Broadcast()
}

// close frees the unused buffers; putBuffer frees the others.
func (b *buffers) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	for c := range b.free {
		for _, buf := range b.free[c] {
			b.freeBuffer(buf)
		}
		b.free[c] = nil
	}
	b.room.Broadcast()
}
