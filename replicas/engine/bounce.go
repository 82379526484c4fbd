package engine

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

const (
	bounceSize = 16 * block.Size
	bounceMax  = 8 // beside one for each engine
)

// Pool holds the buffers for partial blocks: page-aligned, resident, few. All engines on one loop's thread share the
// pool, and each engine can always have one buffer: other engines with hanging disks may hold all the rest. Reads have
// their own buffers, so that reads continue while writes wait. The pool allocates all buffers beforehand: an allocation
// while I/O is in progress may need the very same I/O to free memory.
type Pool struct{ reads, writes bounces }

// NewPool makes a pool.
func NewPool() (*Pool, error) {
	p := &Pool{}
	for range bounceMax {
		r, w, err := newBounces()
		if err != nil {
			p.Close()
			return nil, err
		}
		p.reads.addBuffer(r)
		p.writes.addBuffer(w)
	}
	return p, nil
}

// addEngine adds the buffers for one more engine.
func (p *Pool) addEngine(loop Loop) error {
	r, w, err := newBounces()
	if err != nil {
		return err
	}
	if !loop.Post(func() { p.reads.addBuffer(r); p.writes.addBuffer(w) }) {
		_, _ = unix.Munmap(r), unix.Munmap(w)
		return api.Errorf(api.Unavailable, "the volume's I/O thread has ended")
	}
	return nil
}

// removeEngine frees the buffers of an engine that has ended. Loop thread.
func (p *Pool) removeEngine() {
	for _, b := range []*bounces{&p.reads, &p.writes} {
		if n := len(b.free) - 1; n >= 0 {
			b.unmap(b.free[n])
			b.free = slices.Delete(b.free, n, n+1)
		}
	}
}

// Close frees the memory; memory in use by a hanging disk is freed after its lease. Called when no engine uses the pool
// any more, on the loop's thread or after its end.
func (p *Pool) Close() {
	p.reads.freeBuffers()
	p.writes.freeBuffers()
}

type bounces struct {
	all   [][]byte
	free  [][]byte
	held  map[*Engine]int // buffers of each engine with buffers
	more  int             // buffers in use beyond the first of each engine
	queue []*op           // operations that wait for a buffer
	over  bool            // freed: putBuffer unmaps buffers
}

// newBounces maps a buffer for reads and a buffer for writes.
func newBounces() (r, w []byte, err error) {
	for _, b := range []*[]byte{&r, &w} {
		if *b, err = unix.Mmap(-1, 0, bounceSize, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE); err != nil {
			if r != nil {
				_ = unix.Munmap(r)
			}
			return nil, nil, fmt.Errorf("buffers for partial blocks: %w", err)
		}
		_ = unix.Mlock(*b) // beyond the limit the pages are at least populated
	}
	return r, w, nil
}

func (b *bounces) addBuffer(buf []byte) {
	b.all = append(b.all, buf)
	b.putBuffer(buf)
}

func (b *bounces) freeBuffers() {
	free := b.free
	b.free, b.queue, b.over = nil, nil, true
	for _, buf := range free {
		b.unmap(buf)
	}
}

// unmap unmaps a mapped buffer; the garbage collector frees others.
func (b *bounces) unmap(buf []byte) {
	if i := slices.IndexFunc(b.all, func(a []byte) bool { return &a[0] == &buf[0] }); i >= 0 {
		_ = unix.Munmap(b.all[i]) // fails only for an unmapped address
		b.all = slices.Delete(b.all, i, i+1)
	}
}

func (b *bounces) unqueue(o *op) {
	if i := slices.Index(b.queue, o); i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
	}
}

func (o *op) bounceBuffers() *bounces {
	if o.isRead() {
		return &o.e.pool.reads
	}
	return &o.e.pool.writes
}

// takeBounce takes a buffer, or queues the operation for a buffer.
func (o *op) takeBounce() bool {
	b := o.bounceBuffers()
	if !b.hasBuffer(o.e) {
		b.queue = append(b.queue, o)
		return false
	}
	b.giveBuffer(o)
	return true
}

// hasBuffer reports whether an engine can have a buffer: the engine's own, or a shared buffer.
func (b *bounces) hasBuffer(e *Engine) bool {
	return len(b.free) > 0 && (b.held[e] == 0 || b.more < bounceMax)
}

// giveBuffer lets an operation have a buffer.
func (b *bounces) giveBuffer(o *op) {
	n := len(b.free) - 1
	o.bounce, b.free = b.free[n], b.free[:n]
	if b.held == nil {
		b.held = map[*Engine]int{}
	}
	if b.held[o.e]++; b.held[o.e] > 1 {
		b.more++
	}
}

// giveBounce hands the buffer to the next waiting operation, which continues in a later turn of the loop.
func (o *op) giveBounce() {
	b := o.bounceBuffers()
	buf := o.bounce
	o.bounce = nil
	if b.held[o.e]--; b.held[o.e] > 0 {
		b.more--
	} else {
		delete(b.held, o.e)
	}
	if l := block.JoinLeases(o.leases...); !l.Released() {
		leased := buf
		l.OnRelease(func() { b.putBuffer(leased) })
		buf = block.AlignedBuffer(bounceSize) // other operations need a buffer
	}
	b.putBuffer(buf)
}

func (b *bounces) putBuffer(buf []byte) {
	if b.over {
		b.unmap(buf)
		return
	}
	b.free = append(b.free, buf)
	if i := slices.IndexFunc(b.queue, func(o *op) bool { return b.hasBuffer(o.e) }); i >= 0 {
		next := b.queue[i]
		b.unqueue(next)
		b.giveBuffer(next)
		next.e.cfg.Loop.Post(next.firstStep)
	}
}

// noteLease notes memory that a member has answered for and may still use.
func (o *op) noteLease(r *block.Request) {
	if !r.Lease.Released() {
		o.leases = append(o.leases, r.Lease)
		o.renew = o.renew || o.reading
	}
	r.Lease = nil
}

// otherMemory is for a repeated read, while a hanging disk may still write to the memory of the first.
func (o *op) otherMemory(buf []byte) []byte {
	o.renew = false
	if o.bounce == nil {
		o.parent.Buf = block.AlignedBuffer(len(buf))
		return o.parent.Buf
	}
	at, b, old := cap(o.bounce)-cap(buf), o.bounceBuffers(), o.bounce
	o.bounce = block.AlignedBuffer(bounceSize)
	copy(o.bounce, old)
	block.JoinLeases(o.leases...).OnRelease(func() { b.putBuffer(old) })
	return o.bounce[at : at+len(buf)]
}
