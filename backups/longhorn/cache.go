package longhorn

import (
	"slices"
	"sync"
)

// cachedBlocks is how many blocks a blockCache keeps: 64 MiB of the largest. The cache of a backing image below a
// volume has room for the smallest, which the readers of a restore read at other places at once.
const (
	cachedBlocks     = 4
	cachedBaseBlocks = 2 * mostReaders
)

// Memory bounds the blocks in memory of all open backups of a node, without the first block of each. Methods are safe
// for concurrent use.
type Memory struct {
	mu   sync.Mutex
	free int64
}

// NewMemory returns a Memory of n bytes.
func NewMemory(n int64) *Memory { return &Memory{free: n} }

// takeBytes takes n bytes, if there are so many.
func (m *Memory) takeBytes(n int64) bool {
	if m == nil {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > m.free {
		return false
	}
	m.free -= n
	return true
}

func (m *Memory) giveBytes(n int64) {
	if m != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.free += n
	}
}

// blockCache keeps the last blocks of which readers read parts, so that a block of several chunks is read once.
type blockCache struct {
	most   int // blocks
	memory *Memory
	mu     sync.Mutex
	freed  sync.Cond      // signals that a block has no users
	recent []*cachedBlock // the last one was used last
	taken  int64          // bytes of memory
}

type cachedBlock struct {
	place int64
	ready chan struct{} // closed after bytes and err are set
	bytes []byte
	err   error

	// Guarded by blockCache.mu.
	users  int
	failed bool
}

// read reads bytes of a block, which the first caller reads for all.
func (c *blockCache) read(o *Opened, place, at int64, piece []byte) error {
	b, first := c.useBlock(place, o.blocks.blockSize)
	defer c.leaveBlock(b)
	if first {
		if b.bytes == nil {
			b.bytes = make([]byte, o.blocks.blockSize)
		}
		b.bytes = b.bytes[:o.blocks.length(place)]
		zeros, err := o.read(o.ctx, place, b.bytes, 0)
		if zeros {
			clear(b.bytes)
		}
		c.mu.Lock()
		b.err, b.failed = err, err != nil
		c.mu.Unlock()
		close(b.ready)
	}
	<-b.ready // the first caller's read ends with the context of the open backup
	if b.err == nil {
		copy(piece, b.bytes[at:])
	}
	return b.err
}

// useBlock returns the block of a place for one more user; first says that the caller reads the block.
func (c *blockCache) useBlock(place, size int64) (b *cachedBlock, first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if i := c.findBlock(func(b *cachedBlock) bool { return b.place == place && !b.failed }); i >= 0 {
			b := c.recent[i]
			b.users++
			c.recent = append(slices.Delete(c.recent, i, i+1), b)
			return b, false
		}
		b = &cachedBlock{place: place, users: 1, ready: make(chan struct{})}
		if !c.mayGrow(size) {
			i := c.findBlock(func(b *cachedBlock) bool { return b.users == 0 })
			if i < 0 {
				c.freed.Wait()
				continue
			}
			b.bytes = c.recent[i].bytes[:cap(c.recent[i].bytes)]
			c.recent = slices.Delete(c.recent, i, i+1)
		}
		c.recent = append(c.recent, b)
		return b, true
	}
}

// mayGrow takes memory for one more block. The caller has mu.
func (c *blockCache) mayGrow(size int64) bool {
	switch {
	case len(c.recent) == c.most:
		return false
	case len(c.recent) == 0:
		return true
	case !c.memory.takeBytes(size):
		return false
	}
	c.taken += size
	return true
}

// close gives the memory back.
func (c *blockCache) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.memory.giveBytes(c.taken)
	c.recent, c.taken = nil, 0
}

func (c *blockCache) findBlock(is func(*cachedBlock) bool) int { return slices.IndexFunc(c.recent, is) }

// leaveBlock ends the use of a block.
func (c *blockCache) leaveBlock(b *cachedBlock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.users--; b.users == 0 {
		c.freed.Broadcast()
	}
}
