package importer

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// unnamedFile is a block.Scratch without a name.
type unnamedFile struct{ *os.File }

func (f unnamedFile) Punch(off, n int64) error {
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

func (f unnamedFile) Datasync() error { return unix.Fdatasync(int(f.Fd())) }

// createScratch creates a file without a name on the disk: Close or a crash removes the file.
func createScratch(on block.Layers) (block.Scratch, error) {
	f, err := createUnnamed(on)
	return unnamedFile{f}, err
}

func createUnnamed(on block.Layers) (*os.File, error) {
	at, ok := on.(interface{ Path() string })
	if !ok {
		return nil, api.Errorf(api.Unsupported, "disk %s has no room for scratch files", on.UID())
	}
	f, err := os.OpenFile(at.Path(), os.O_RDWR|unix.O_TMPFILE, 0o600)
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return f, err
	}
	// Some file systems have no files without a name.
	f, err = os.CreateTemp(at.Path(), ".scratch-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

const (
	// scratchUnit is the unit in which a scratch file returns room to the disk. Sectors do not cross a unit.
	scratchUnit = 256 << 10
	// scratchTarget is the number of bytes to receive ahead of the conversion. More brought nothing.
	scratchTarget = 32 << 20
)

// scratchFile holds a stream that arrives in order and is read in any order: a read waits for its bytes. So a
// conversion with random access runs during the transfer. Converted parts (Drop) return their room to the disk, and the
// stream waits for a slow conversion; so the file stays small for an image in the order of its disk, as tools write
// images.
//
// A checkpoint (durableState, punchCheckpointed) lets another process continue (restoreState). Bytes from before the
// checkpoint that are dropped later stay in the file until the next checkpoint, because the other process would need
// them.
type scratchFile struct {
	f         block.Scratch
	peak      *atomic.Int64 // peak of the bytes in f
	lookahead *lookahead    // or nil

	mu         sync.Mutex
	change     *sync.Cond
	have       int64 // bytes [0, have) arrived
	held       int64 // bytes in f
	waiting    int   // reads that wait for bytes
	unbounded  bool  // the stream does not wait for the halted conversion
	discarding bool  // no further read follows
	done       bool
	err        error // why no further bytes arrive

	part map[int64]int // dropped bytes of partly dropped units
	gone []uint64      // a bit per dropped unit

	durable         int64   // end of the bytes in the last checkpoint
	punchLater      []units // units dropped since, from before the checkpoint
	punchLaterBytes int64   // bytes in punchLater
}

// units is a range of units, [from, to).
type units struct{ from, to int64 }

func newScratchFile(f block.Scratch, peak *atomic.Int64) *scratchFile {
	s := &scratchFile{f: f, peak: peak, part: map[int64]int{}}
	s.change = sync.NewCond(&s.mu)
	return s
}

// storeBytes stores the next bytes. One goroutine calls storeBytes, in order. storeBytes waits while scratchTarget
// bytes are in the file.
func (s *scratchFile) storeBytes(p []byte, off int64) error {
	s.mu.Lock()
	for s.held >= scratchTarget && s.waiting == 0 && !s.unbounded && !s.discarding && !s.done {
		s.change.Wait()
	}
	sated, done, err := s.discarding, s.done, s.err
	s.mu.Unlock()
	if err := s.lookahead.compareStream(p, off); err != nil {
		return err
	}
	if sated || done {
		return err // finishStream received the cause
	}
	if !isZero(p) {
		if _, err := s.f.WriteAt(p, off); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.have = off + int64(len(p))
	s.held += int64(len(p))
	s.peak.Store(max(s.peak.Load(), s.held+s.punchLaterBytes))
	s.mu.Unlock()
	s.change.Broadcast()
	return nil
}

// setHalted reports whether the conversion is halted.
func (s *scratchFile) setHalted(yes bool) {
	s.mu.Lock()
	s.unbounded = yes
	s.mu.Unlock()
	s.change.Broadcast()
}

// finishStream reports that no further bytes arrive, with the cause; nil after the last byte.
func (s *scratchFile) finishStream(err error) {
	s.mu.Lock()
	if !s.done {
		s.done, s.err = true, err
	}
	s.mu.Unlock()
	s.change.Broadcast()
}

// discardRest reports that no further read follows: later bytes are not stored.
func (s *scratchFile) discardRest() {
	s.mu.Lock()
	s.discarding = true
	s.mu.Unlock()
	s.change.Broadcast()
}

// awaitBytes returns the number of received bytes once the bytes up to end arrived, or no further bytes arrive.
func (s *scratchFile) awaitBytes(end int64) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting++
	for s.have < end && !s.done {
		s.change.Broadcast() // the stream may wait for this read
		s.change.Wait()
	}
	s.waiting--
	if s.have >= end {
		return s.have, nil
	}
	return s.have, s.err
}

// awaitAll waits for all bytes and returns their number.
func (s *scratchFile) awaitAll() (int64, error) { return s.awaitBytes(1 << 62) }

// Have returns the number of received bytes.
func (s *scratchFile) Have() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.have
}

func (s *scratchFile) ReadAt(p []byte, off int64) (int, error) {
	end := off + int64(len(p))
	if s.lookahead.readAt(p, off, s.Have()) {
		return len(p), nil
	}
	have, err := s.awaitBytes(end)
	if err != nil {
		return 0, err
	}
	if have < end {
		p, err = p[:max(have-off, 0)], io.EOF
	}
	if at := s.firstDropped(off, end); at >= 0 {
		return 0, api.Errorf(api.Corrupt, "the bytes at %#x are used more than once: the image is damaged, or it is one "+
			"that can be read from a file only", at)
	}
	n, rerr := s.f.ReadAt(p, off)
	if errors.Is(rerr, io.EOF) {
		clear(p[n:]) // zeros at the end have no bytes in the file
		n, rerr = len(p), nil
	}
	if rerr != nil {
		return n, rerr
	}
	return n, err
}

// firstDropped returns the first dropped byte of a range, or -1. The last sector of a range may be dropped: compressed
// data is read in whole sectors, also if the last sector belongs to other data too.
func (s *scratchFile) firstDropped(off, end int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for u := off / scratchUnit; u*scratchUnit < max(end-512, off+1); u++ {
		if i := int(u / 64); i < len(s.gone) && s.gone[i]>>(u%64)&1 != 0 {
			return max(u*scratchUnit, off)
		}
	}
	return -1
}

// Drop implements block.Dropper.
func (s *scratchFile) Drop(off, n int64) {
	from, to := int64(-1), int64(0)
	s.mu.Lock()
	for at, end := off, off+n; at < end; {
		u := at / scratchUnit
		next := min((u+1)*scratchUnit, end)
		if s.part[u] += int(next - at); s.part[u] >= scratchUnit {
			delete(s.part, u)
			for int64(len(s.gone)) <= u/64 {
				s.gone = append(s.gone, 0)
			}
			s.gone[u/64] |= 1 << (u % 64)
			s.held -= scratchUnit
			if from < 0 {
				from = u
			}
			to = u + 1
		}
		at = next
	}
	var now units
	if from >= 0 {
		// The units between the ends of a range are dropped as a whole.
		late := min(max((s.durable+scratchUnit-1)/scratchUnit, from), to)
		if now = (units{late, to}); late > from {
			s.punchLater = append(s.punchLater, units{from, late})
			s.punchLaterBytes += (late - from) * scratchUnit
		}
	}
	s.mu.Unlock()
	if from >= 0 {
		s.punchUnits(now)
		s.change.Broadcast()
	}
}

// punchUnits returns units to the disk.
func (s *scratchFile) punchUnits(u units) {
	if u.to > u.from {
		// After a failure, Close of the file returns the room.
		_ = s.f.Punch(u.from*scratchUnit, (u.to-u.from)*scratchUnit)
	}
}

func (s *scratchFile) Close() error { return s.f.Close() }

var (
	_ io.ReaderAt   = (*scratchFile)(nil)
	_ block.Dropper = (*scratchFile)(nil)
)
