package device

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	page  = 4096
	maxIO = 1 << 20 // of one FUSE request: max_write, max_pages

	poolCap = 64 << 20 // of one server
)

// Classes of slots. The last class is a whole staging buffer.
var classSize = [...]int{page, 4 * page, 16 * page, maxIO}

const (
	bigClass = len(classSize) - 1
	slabSize = 2 << 20 // a huge page: one run of memory for the disk, and quick to pin
	reserved = 2       // slabs that exist before the first request, and as long as a connection exists
)

// slot is memory of a pool: page-aligned, populated, locked.
type slot struct {
	mem   []byte // classSize bytes
	class int
}

// pool is the memory of all requests of one server, made of slabs from outside. Taking memory from the system can
// wait for the very I/O that needs the memory, so the server's thread, which owns the pool, never does. Memory of the
// pool never faults.
type pool struct {
	free   [len(classSize)][]slot
	slabs  [][]byte
	used   int64 // bytes handed out
	leased int64 // of these, held by a hanging disk
}

func (p *pool) size() int64 { return int64(len(p.slabs)) * slabSize }

// mapLocked maps n bytes, a multiple of the page size, that stay resident.
func mapLocked(n int, warn func(error)) ([]byte, error) {
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_ANON | unix.MAP_PRIVATE
	whole, err := unix.MmapPtr(-1, 0, nil, uintptr(2*n), prot, flags)
	if err != nil {
		return nil, err
	}
	skip := -uintptr(whole) & uintptr(n-1)
	mem := unsafe.Slice((*byte)(unsafe.Add(whole, skip)), n)
	if skip > 0 {
		_ = unix.MunmapPtr(whole, skip)
	}
	_ = unix.MunmapPtr(unsafe.Add(whole, skip+uintptr(n)), uintptr(n)-skip)
	if n >= slabSize {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // small pages do too
	}
	// Touched before the lock: locking absent pages would keep all of the address space waiting.
	for i := 0; i < n; i += page {
		mem[i] = 0
	}
	if err := unix.Mlock(mem); err != nil {
		warn(err) // only reclaim could take the memory away then
	}
	return mem, nil
}

func unmapLocked(mem []byte) { _ = unix.MunmapPtr(unsafe.Pointer(&mem[0]), uintptr(len(mem))) }

// addSlab takes a slab in.
func (p *pool) addSlab(m []byte) {
	p.slabs = append(p.slabs, m)
	p.addSlots(m, bigClass)
}

// refillClass makes slots of a small class from a big slot.
func (p *pool) refillClass(class int) bool {
	f := p.free[bigClass]
	if class == bigClass || len(f) == 0 {
		return false
	}
	p.free[bigClass] = f[:len(f)-1]
	p.addSlots(f[len(f)-1].mem, class)
	return true
}

func (p *pool) addSlots(m []byte, class int) {
	for n := classSize[class]; len(m) > 0; m = m[n:] {
		p.free[class] = append(p.free[class], slot{m[:n:n], class})
	}
}

// getSlot is a slot of at least n bytes; false: none is free.
func (p *pool) getSlot(n int) (slot, bool) {
	class := 0
	for classSize[class] < n {
		class++
	}
	if len(p.free[class]) == 0 && !p.refillClass(class) {
		return slot{}, false
	}
	f := p.free[class]
	s := f[len(f)-1]
	p.free[class] = f[:len(f)-1]
	p.used += int64(classSize[class])
	return s, true
}

func (p *pool) putSlot(s slot) {
	p.used -= int64(classSize[s.class])
	p.free[s.class] = append(p.free[s.class], s)
}

// trimSlabs takes out, for the caller to give back, all slabs but some. Nothing may be handed out.
func (p *pool) trimSlabs(keep int) (spare [][]byte) {
	for c := range p.free {
		p.free[c] = p.free[c][:0]
	}
	n := min(keep, len(p.slabs))
	spare = append(spare, p.slabs[n:]...)
	p.slabs = p.slabs[:n]
	for _, m := range p.slabs {
		p.addSlots(m, bigClass)
	}
	return spare
}
