package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Load writes blocks that say which block they are and how often it was written, reads them back, and knows what may be
// read: nothing older than what was acknowledged, nothing that was never written. It outlives a device: what is true of
// a volume stays true on its next one.
type Load struct {
	Workers int

	blocks []blockState
	writes atomic.Int64
	reads  atomic.Int64
	worst  atomic.Int64 // nanoseconds of one request
	last   atomic.Int64 // end of the last request, in Unix nanoseconds
}

// blockState is what is known of a block, by numbers of writes. Each is used by one worker.
type blockState struct{ issued, acked, flushed, seen uint32 }

const (
	loadBlock = 4096
	loadMagic = 0xd0e5a11b
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// NewLoad is for a volume of size bytes, of which at most most are used.
func NewLoad(size, most int64) *Load {
	return &Load{Workers: 4, blocks: make([]blockState, min(size, most)/loadBlock)}
}

// ErrLost is an answer that breaks the promise of a volume.
var ErrLost = errors.New("the volume does not hold what it should")

// Run writes and reads until ctx ends, and returns the first error of the device or of what it holds.
func (l *Load) Run(ctx context.Context, device string) error {
	errs := make([]error, l.Workers)
	var all sync.WaitGroup
	for i := range l.Workers {
		all.Add(1)
		go func() {
			defer all.Done()
			errs[i] = l.worker(ctx, device, i)
		}()
	}
	all.Wait()
	return errors.Join(errs...)
}

// Writes is how many writes were acknowledged.
func (l *Load) Writes() int64 { return l.writes.Load() }

// Worst is the longest time that one request took.
func (l *Load) Worst() time.Duration { return time.Duration(l.worst.Load()) }

// Idle is how long no request ended.
func (l *Load) Idle() time.Duration { return time.Since(time.Unix(0, l.last.Load())) }

// alignedBlock is memory that direct I/O takes.
func alignedBlock() ([]byte, func(), error) {
	b, err := unix.Mmap(-1, 0, loadBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, err
	}
	return b, func() { _ = unix.Munmap(b) }, nil
}

func (l *Load) worker(ctx context.Context, device string, me int) error {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", device, err)
	}
	defer func() { _ = unix.Close(fd) }()
	buf, free, err := alignedBlock()
	if err != nil {
		return err
	}
	defer free()
	var dirty []int // acknowledged, not flushed
	mine := (len(l.blocks) - me + l.Workers - 1) / l.Workers
	for ctx.Err() == nil {
		n := rand.IntN(mine)*l.Workers + me
		b := &l.blocks[n]
		began := time.Now()
		switch x := rand.IntN(100); {
		case x < 5:
			if err := unix.Fdatasync(fd); err != nil {
				return fmt.Errorf("flush: %w", err)
			}
			for _, d := range dirty {
				l.blocks[d].flushed = l.blocks[d].acked
			}
			dirty = dirty[:0]
		case x < 65:
			atomic.AddUint32(&b.issued, 1)
			fillBlock(buf, n, b.issued)
			if k, err := unix.Pwrite(fd, buf, int64(n)*loadBlock); err != nil || k < len(buf) {
				return fmt.Errorf("write of block %d: %d bytes: %w", n, k, orShort(err))
			}
			atomic.StoreUint32(&b.acked, b.issued)
			dirty = append(dirty, n)
			l.writes.Add(1)
		default:
			if k, err := unix.Pread(fd, buf, int64(n)*loadBlock); err != nil || k < len(buf) {
				return fmt.Errorf("read of block %d: %d bytes: %w", n, k, orShort(err))
			}
			if err := b.check(buf, n, false); err != nil {
				return err
			}
			l.reads.Add(1)
		}
		now := time.Now()
		l.last.Store(now.UnixNano())
		for took := int64(now.Sub(began)); ; {
			if was := l.worst.Load(); took <= was || l.worst.CompareAndSwap(was, took) {
				break
			}
		}
	}
	return nil
}

// orShort is the error of a request that ended early: the device is smaller, as one that stands on nothing is.
func orShort(err error) error {
	if err == nil {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Verify reads every block. crashed: what was acknowledged and not flushed may be lost.
func (l *Load) Verify(device string, crashed bool) error {
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", device, err)
	}
	defer func() { _ = unix.Close(fd) }()
	buf, free, err := alignedBlock()
	if err != nil {
		return err
	}
	defer free()
	for n := range l.blocks {
		if k, err := unix.Pread(fd, buf, int64(n)*loadBlock); err != nil || k < len(buf) {
			return fmt.Errorf("read of block %d of %s: %d bytes: %w", n, device, k, orShort(err))
		}
		if err := l.blocks[n].check(buf, n, crashed); err != nil {
			return err
		}
	}
	return nil
}

// Instant is what a snapshot must hold, and may: the writes that were acknowledged before it was asked for, and those
// that were issued until it was there.
type Instant struct{ acked, issued []uint32 }

// Before begins an Instant.
func (l *Load) Before() *Instant {
	i := &Instant{acked: make([]uint32, len(l.blocks))}
	for n := range l.blocks {
		i.acked[n] = atomic.LoadUint32(&l.blocks[n].acked)
	}
	return i
}

// After ends it.
func (l *Load) After(i *Instant) {
	i.issued = make([]uint32, len(l.blocks))
	for n := range l.blocks {
		i.issued[n] = atomic.LoadUint32(&l.blocks[n].issued)
	}
}

// Verify compares a device that holds the snapshot with it. What it finds must be found by the next Verify too.
func (i *Instant) Verify(device string) error {
	l := &Load{blocks: make([]blockState, len(i.acked))}
	for n := range l.blocks {
		l.blocks[n].acked, l.blocks[n].issued = i.acked[n], i.issued[n]
	}
	err := l.Verify(device, false)
	for n := range l.blocks {
		i.acked[n], i.issued[n] = l.blocks[n].seen, l.blocks[n].seen
	}
	return err
}

// Mark is what was acknowledged so far. Nothing is under way.
func (l *Load) Mark() []uint32 {
	mark := make([]uint32, len(l.blocks))
	for i := range mark {
		mark[i] = l.blocks[i].acked
	}
	return mark
}

// Rewind says that what came after a mark may be lost; Verify as after a crash finds out what is.
func (l *Load) Rewind(mark []uint32) {
	for i := range mark {
		l.blocks[i].flushed = mark[i]
	}
}

func fillBlock(buf []byte, n int, seq uint32) {
	for off := 0; off < loadBlock; off += 32 {
		binary.LittleEndian.PutUint32(buf[off:], loadMagic)
		binary.LittleEndian.PutUint32(buf[off+4:], seq)
		binary.LittleEndian.PutUint64(buf[off+8:], uint64(n))
		binary.LittleEndian.PutUint64(buf[off+16:], uint64(seq)*0x9e3779b97f4a7c15+uint64(off))
		binary.LittleEndian.PutUint32(buf[off+24:], uint32(off))
		binary.LittleEndian.PutUint32(buf[off+28:], crc32.Checksum(buf[off:off+28], castagnoli))
	}
}

// check compares a block that was read with what is known. A later write that nobody has acknowledged may be there, but
// once it was read it stays.
func (b *blockState) check(buf []byte, n int, crashed bool) error {
	seq := binary.LittleEndian.Uint32(buf[4:])
	zero := true
	for off := 0; off < loadBlock && zero; off += 8 {
		zero = binary.LittleEndian.Uint64(buf[off:]) == 0
	}
	if zero {
		seq = 0
	} else {
		for off := 0; off < loadBlock; off += 32 {
			p := buf[off : off+32]
			if binary.LittleEndian.Uint32(p) != loadMagic || binary.LittleEndian.Uint32(p[4:]) != seq ||
				binary.LittleEndian.Uint64(p[8:]) != uint64(n) || binary.LittleEndian.Uint32(p[24:]) != uint32(off) ||
				binary.LittleEndian.Uint32(p[28:]) != crc32.Checksum(p[:28], castagnoli) {
				return fmt.Errorf("%w: block %d is torn or another one at %d (write %d)", ErrLost, n, off, seq)
			}
		}
	}
	least := max(b.acked, b.seen)
	if crashed {
		least = b.flushed
	}
	if seq < least || seq > b.issued {
		return fmt.Errorf("%w: block %d is as after write %d; acknowledged %d, flushed %d, seen %d, issued %d", ErrLost, n,
			seq, b.acked, b.flushed, b.seen, b.issued)
	}
	b.seen = seq
	b.acked = min(max(b.acked, seq), b.issued)
	if crashed { // what was lost is not to come back
		b.acked, b.flushed = seq, min(b.flushed, seq)
	}
	return nil
}
