package device

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	page  = 4096
	maxIO = 1 << 20 // of one FUSE request: max_write, max_pages

	poolCap = 64 << 20 // beyond it only a device with nothing under way gets memory
)

// Classes of slots. The last one is a whole staging buffer: maxIO bytes and a page before them for the headers.
var classSize = [...]int{page, 4 * page, 16 * page, maxIO}

const (
	bigClass = len(classSize) - 1
	maxSlab  = 1 << 20
)

// slot is memory of a pool: page-aligned, populated, locked.
type slot struct {
	mem   []byte // classSize bytes
	class int
}

// pool is the memory of all requests of one server. It grows in slabs and gives them back when all of it is free.
// It belongs to the server's thread. What it hands out never faults.
type pool struct {
	free  [len(classSize)][]slot
	slabs [][]byte
	used  int64 // bytes handed out
	size  int64 // bytes mapped
	warn  func(error)
}

// locked maps n bytes that stay resident.
func (p *pool) locked(n int) ([]byte, error) {
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		return nil, err
	}
	if err := unix.Mlock(m); err != nil {
		p.warn(err) // populated all the same: only reclaim could take it away
	}
	p.slabs = append(p.slabs, m)
	p.size += int64(n)
	return m, nil
}

func (p *pool) grow(class int) bool {
	n := classSize[class]
	if class == bigClass {
		m, err := p.locked(page + n)
		if err != nil {
			p.warn(err)
			return false
		}
		p.free[class] = append(p.free[class], slot{m[page:], class})
		return true
	}
	m, err := p.locked(min(64*n, maxSlab))
	if err != nil {
		p.warn(err)
		return false
	}
	for ; len(m) > 0; m = m[n:] {
		p.free[class] = append(p.free[class], slot{m[:n:n], class})
	}
	return true
}

// get is a slot of at least n bytes, or false when there is no memory.
func (p *pool) get(n int) (slot, bool) {
	class := 0
	for classSize[class] < n {
		class++
	}
	f := p.free[class]
	if len(f) == 0 {
		if !p.grow(class) {
			return slot{}, false
		}
		f = p.free[class]
	}
	s := f[len(f)-1]
	p.free[class] = f[:len(f)-1]
	p.used += int64(classSize[class])
	return s, true
}

func (p *pool) put(s slot) {
	p.used -= int64(classSize[s.class])
	p.free[s.class] = append(p.free[s.class], s)
}

// trim unmaps everything; nothing may be handed out.
func (p *pool) trim() {
	for _, m := range p.slabs {
		_ = unix.Munmap(m)
	}
	for c := range p.free {
		p.free[c] = p.free[c][:0]
	}
	p.slabs, p.size = p.slabs[:0], 0
}

// before is the n bytes in front of a big slot's memory.
func (s slot) before(n int) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(&s.mem[0]), -n)), n+len(s.mem))
}
