package engine

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
)

const (
	bounceSize = 16 * block.Size
	bounceMax  = 8
)

// Pool holds the buffers for partial blocks: page-aligned, resident, few. All engines on one loop's thread share it.
// Reads have their own buffers, so that they get on while writes wait. All are there from the start: memory is not
// asked for while I/O is under way, since the system may need that very I/O to find some.
type Pool struct{ reads, writes bounces }

// NewPool makes a pool.
func NewPool() (*Pool, error) {
	p := &Pool{}
	for range bounceMax {
		for _, b := range []*bounces{&p.reads, &p.writes} {
			if err := b.grow(); err != nil {
				p.Close()
				return nil, fmt.Errorf("buffers for partial blocks: %w", err)
			}
		}
	}
	return p, nil
}

// Close gives the memory back, what a disk that hangs still may use when that is over. No engine uses the pool any
// more; on their loop's thread, or after its end.
func (p *Pool) Close() {
	p.reads.release()
	p.writes.release()
}

type bounces struct {
	all   [][]byte
	free  [][]byte
	queue []*op // operations that wait for one
	over  bool  // released: what comes back is unmapped
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
	free := b.free
	b.free, b.queue, b.over = nil, nil, true
	for _, buf := range free {
		b.unmap(buf)
	}
}

// unmap gives a buffer back that was mapped; others are the collector's.
func (b *bounces) unmap(buf []byte) {
	if i := slices.IndexFunc(b.all, func(a []byte) bool { return &a[0] == &buf[0] }); i >= 0 {
		_ = unix.Munmap(b.all[i]) // fails only for an address that is not mapped
		b.all = slices.Delete(b.all, i, i+1)
	}
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
	if l := block.LentTo(o.lents...); !l.Back() {
		lent := buf
		l.Until(func() { b.put(lent) })
		buf = aligned(bounceSize) // others need one
	}
	b.put(buf)
}

func (b *bounces) put(buf []byte) {
	if b.over {
		b.unmap(buf)
		return
	}
	if len(b.queue) == 0 {
		b.free = append(b.free, buf)
		return
	}
	next := b.queue[0]
	b.queue = b.queue[1:]
	next.bounce = buf
	next.e.cfg.Loop.Post(next.begin)
}

// lend takes note of memory that a member has answered for and may still use.
func (o *op) lend(r *block.Request) {
	if !r.Lent.Back() {
		o.lents = append(o.lents, r.Lent)
		o.renew = o.renew || o.reading
	}
	r.Lent = nil
}

// otherMemory is for a read that is asked again, while a disk that hangs may still write to the memory of the first.
func (o *op) otherMemory(buf []byte) []byte {
	o.renew = false
	if o.bounce == nil {
		o.parent.Buf = aligned(len(buf))
		return o.parent.Buf
	}
	at, b, old := cap(o.bounce)-cap(buf), o.bounces(), o.bounce
	o.bounce = aligned(bounceSize)
	copy(o.bounce, old)
	block.LentTo(o.lents...).Until(func() { b.put(old) })
	return o.bounce[at : at+len(buf)]
}
