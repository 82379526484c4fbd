package engine

import (
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
)

// Buffers for partial blocks: page-aligned, resident, few. Reads have their own, so that they get on while writes wait.
const (
	bounceSize = 16 * block.Size
	bounceMax  = 4
)

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
		return &o.e.bounceR
	}
	return &o.e.bounceW
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
