package engine

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
)

const (
	bounceSize = 16 * block.Size
	bounceMax  = 16
)

// Pool holds the buffers for partial blocks: page-aligned, resident, few. All engines on one loop's thread share it.
// Reads have their own buffers, so that they get on while writes wait.
type Pool struct{ reads, writes bounces }

// NewPool makes a pool. One buffer of each sort is there from the start, so that merging always gets on, however scarce
// memory becomes.
func NewPool() (*Pool, error) {
	p := &Pool{}
	for _, b := range []*bounces{&p.reads, &p.writes} {
		if err := b.grow(); err != nil {
			p.Close()
			return nil, fmt.Errorf("buffers for partial blocks: %w", err)
		}
	}
	return p, nil
}

// Close gives the memory back. No engine uses the pool any more.
func (p *Pool) Close() {
	p.reads.release()
	p.writes.release()
}

type bounces struct {
	all   [][]byte
	free  [][]byte
	queue []*op // operations that wait for one
}

func (b *bounces) grow() error {
	buf, err := unix.Mmap(-1, 0, bounceSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return err
	}
	_ = unix.Mlock(buf) // where the limit forbids it the pages are at least populated
	b.all = append(b.all, buf)
	b.free = append(b.free, buf)
	return nil
}

func (b *bounces) release() {
	for _, buf := range b.all {
		_ = unix.Munmap(buf) // fails only for an address that is not mapped
	}
	*b = bounces{}
}

func (b *bounces) forget(o *op) {
	if i := slices.Index(b.queue, o); i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
	}
}

func (o *op) bounces() *bounces {
	if o.isRead() {
		return &o.e.pool.reads
	}
	return &o.e.pool.writes
}

// takeBounce gets a buffer, or queues the operation for one.
func (o *op) takeBounce() bool {
	b := o.bounces()
	if len(b.free) == 0 && len(b.all) < bounceMax {
		_ = b.grow() // else it waits for one of those that there are
	}
	if len(b.free) == 0 {
		b.queue = append(b.queue, o)
		return false
	}
	n := len(b.free) - 1
	o.bounce, b.free = b.free[n], b.free[:n]
	return true
}

// giveBounce hands the buffer to the next that waits, which goes on in a turn of its own.
func (o *op) giveBounce() {
	b := o.bounces()
	buf := o.bounce
	o.bounce = nil
	if len(b.queue) == 0 {
		b.free = append(b.free, buf)
		return
	}
	next := b.queue[0]
	b.queue = b.queue[1:]
	next.bounce = buf
	o.e.cfg.Loop.Post(next.begin)
}
