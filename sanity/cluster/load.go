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

// Load writes blocks with the block's number and the number of the write, reads the blocks back, and knows the allowed
// content: nothing older than an acknowledged write, and no unwritten data. A Load works across devices, because the
// next device of a volume must hold the same content.
type Load struct {
	Workers int
	// Pace is the least time from one request of a worker to the next, in nanoseconds; 0: none. A load without a pace
	// takes all processors.
	Pace atomic.Int64

	blocks []blockState
	writes atomic.Int64
	reads  atomic.Int64
	worst  atomic.Int64 // nanoseconds of the longest request
	last   atomic.Int64 // end of the last request, in Unix nanoseconds
}

// blockState holds numbers of writes of a block. Each block belongs to a worker.
type blockState struct{ issued, acked, flushed, seen uint32 }

const (
	loadBlock = 4096
	loadMagic = 0xd0e5a11b
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// NewLoad creates a load for a volume of size bytes; the load uses at most most bytes.
func NewLoad(size, most int64) *Load {
	l := &Load{Workers: 4, blocks: make([]blockState, min(size, most)/loadBlock)}
	l.Pace.Store(int64(pace))
	return l
}

// pace is the pace of new loads.
var pace time.Duration

// ErrLost means that a volume broke its promise.
var ErrLost = errors.New("the volume does not hold the written data")

// Run writes and reads until ctx ends, and returns the first error of the device or of its content.
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

// Writes returns the number of acknowledged writes.
func (l *Load) Writes() int64 { return l.writes.Load() }

// Worst returns the duration of the longest request.
func (l *Load) Worst() time.Duration { return time.Duration(l.worst.Load()) }

// Idle returns the time since the end of the last request.
func (l *Load) Idle() time.Duration { return time.Since(time.Unix(0, l.last.Load())) }

// alignedMemory returns n bytes of memory for direct I/O.
func alignedMemory(n int) ([]byte, func(), error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
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
	buf, free, err := alignedMemory(loadBlock)
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
		if rest := time.Duration(l.Pace.Load()) - now.Sub(began); rest > 0 {
			select {
			case <-time.After(rest):
			case <-ctx.Done():
			}
		}
	}
	return nil
}

// orShort returns the error of a short request: the device is smaller, like a loop device that lost its file.
func orShort(err error) error {
	if err == nil {
		return io.ErrUnexpectedEOF
	}
	return err
}

// verifyBlocks is how many blocks Verify reads at a time: a read of each block alone would be most of a test's work.
const verifyBlocks = 64

// Verify reads every block. crashed: the volume may have lost acknowledged writes since the last flush.
func (l *Load) Verify(device string, crashed bool) error {
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", device, err)
	}
	defer func() { _ = unix.Close(fd) }()
	buf, free, err := alignedMemory(verifyBlocks * loadBlock)
	if err != nil {
		return err
	}
	defer free()
	for n := 0; n < len(l.blocks); n += verifyBlocks {
		piece := l.blocks[n:min(n+verifyBlocks, len(l.blocks))]
		b := buf[:len(piece)*loadBlock]
		if k, err := unix.Pread(fd, b, int64(n)*loadBlock); err != nil || k < len(b) {
			return fmt.Errorf("read of %d blocks at block %d of %s: %d bytes: %w", len(piece), n, device, k, orShort(err))
		}
		for i := range piece {
			if err := piece[i].check(b[i*loadBlock:(i+1)*loadBlock], n+i, crashed); err != nil {
				return err
			}
		}
	}
	return nil
}

// Instant bounds the content of a snapshot: at least the writes acknowledged before the request for the snapshot, at
// most the writes issued before the snapshot's completion.
type Instant struct{ acked, issued []uint32 }

// Before begins an Instant, before the request for the snapshot.
func (l *Load) Before() *Instant {
	i := &Instant{acked: make([]uint32, len(l.blocks))}
	for n := range l.blocks {
		i.acked[n] = atomic.LoadUint32(&l.blocks[n].acked)
	}
	return i
}

// After ends an Instant, after the snapshot's completion.
func (l *Load) After(i *Instant) {
	i.issued = make([]uint32, len(l.blocks))
	for n := range l.blocks {
		i.issued[n] = atomic.LoadUint32(&l.blocks[n].issued)
	}
}

// Verify compares a device with the snapshot's content. The next Verify must find the same content.
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

// Mark returns the acknowledged writes, for a load without requests in progress.
func (l *Load) Mark() []uint32 {
	mark := make([]uint32, len(l.blocks))
	for i := range mark {
		mark[i] = l.blocks[i].acked
	}
	return mark
}

// Rewind allows the loss of writes after a mark. A Verify with crashed finds the lost writes.
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

// check compares the content of a block with the allowed content. A block may hold a later, unacknowledged write, but
// must keep the write after a read.
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
	if crashed { // a lost write must not return
		b.acked, b.flushed = seq, min(b.flushed, seq)
	}
	return nil
}
