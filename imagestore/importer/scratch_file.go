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

// unnamedFile is a file without a name as a block.Scratch.
type unnamedFile struct{ *os.File }

func (f unnamedFile) Punch(off, n int64) error {
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

func (f unnamedFile) Datasync() error { return unix.Fdatasync(int(f.Fd())) }

// createScratch gives a file on the disk that has no name: it is gone when it is closed, also by a crash.
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
	// Some file systems make no nameless files.
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
	// scratchUnit is what is given back of a scratch file at once. Sectors do not cross it.
	scratchUnit = 256 << 10
	// newLookahead is how much of a source is taken in before it is asked for. More brought nothing.
	scratchTarget = 32 << 20
)

// scratchFile is a source that arrives in order and is read in any order: a read of what is not there yet waits. So a
// conversion that needs random access runs while the bytes still come. What the conversion has done with (Drop) is
// given back to the disk, and the source waits when the conversion falls behind; so the file stays small where the
// image is in the order of its disk, as it is when a tool has just made it.
//
// It can be kept (state, settle) and continued by another process (resume). What came before it was kept and is dropped
// later stays in the file until it is kept again: the other process would need it.
type scratchFile struct {
	f         block.Scratch
	peak      *atomic.Int64 // the most bytes that were in f at once
	lookahead *lookahead    // what was read before it came; or nil

	mu         sync.Mutex
	change     *sync.Cond
	have       int64 // bytes [0, have) came
	held       int64 // of them in f
	waiting    int   // reads that wait for more
	unbounded  bool  // the conversion is halted, and not behind
	discarding bool  // nobody will read any more
	done       bool
	err        error // why no more bytes come

	part map[int64]int // bytes dropped of units that are not dropped whole
	gone []uint64      // units that are: a bit each

	durable         int64   // what came before this is kept
	punchLater      []units // of it, what was dropped since
	punchLaterBytes int64   // bytes in owed
}

// units is a run of units, [from, to).
type units struct{ from, to int64 }

func newScratchFile(f block.Scratch, peak *atomic.Int64) *scratchFile {
	s := &scratchFile{f: f, peak: peak, part: map[int64]int{}}
	s.change = sync.NewCond(&s.mu)
	return s
}

// put takes the next bytes; called in order, by one goroutine. It waits while enough are there.
func (s *scratchFile) put(p []byte, off int64) error {
	s.mu.Lock()
	for s.held >= scratchTarget && s.waiting == 0 && !s.unbounded && !s.discarding && !s.done {
		s.change.Wait()
	}
	sated, done, err := s.discarding, s.done, s.err
	s.mu.Unlock()
	if err := s.lookahead.compare(p, off); err != nil {
		return err
	}
	if sated || done {
		return err // whoever made it done knows why
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

// halt says that the conversion is halted, or goes on.
func (s *scratchFile) halt(yes bool) {
	s.mu.Lock()
	s.unbounded = yes
	s.mu.Unlock()
	s.change.Broadcast()
}

// finish says that no more bytes come, and why (nil: that was all).
func (s *scratchFile) finish(err error) {
	s.mu.Lock()
	if !s.done {
		s.done, s.err = true, err
	}
	s.mu.Unlock()
	s.change.Broadcast()
}

// discard says that nobody reads any more: what still comes is not kept.
func (s *scratchFile) discard() {
	s.mu.Lock()
	s.discarding = true
	s.mu.Unlock()
	s.change.Broadcast()
}

// wait returns once the bytes up to end are there, or none come any more. It returns how many there are.
func (s *scratchFile) wait(end int64) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting++
	for s.have < end && !s.done {
		s.change.Broadcast() // a source that waits for us goes on
		s.change.Wait()
	}
	s.waiting--
	if s.have >= end {
		return s.have, nil
	}
	return s.have, s.err
}

// chunkWriter waits for all bytes and tells how many they are.
func (s *scratchFile) whole() (int64, error) { return s.wait(1 << 62) }

// Have tells how many bytes have come.
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
	have, err := s.wait(end)
	if err != nil {
		return 0, err
	}
	if have < end {
		p, err = p[:max(have-off, 0)], io.EOF
	}
	if at := s.dropped(off, end); at >= 0 {
		return 0, api.Errorf(api.Corrupt, "the bytes at %#x are used more than once: the image is damaged, or it is one "+
			"that can be read from a file only", at)
	}
	n, rerr := s.f.ReadAt(p, off)
	if errors.Is(rerr, io.EOF) {
		clear(p[n:]) // zeros at the end were not written
		n, rerr = len(p), nil
	}
	if rerr != nil {
		return n, rerr
	}
	return n, err
}

// dropped finds the first byte of a range that is not there any more, or -1. The last sector of a range may be: that of
// compressed data is read whole, also where something else shares it.
func (s *scratchFile) dropped(off, end int64) int64 {
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
		// All units between are gone too: those that are not at the ends of the range went whole.
		late := min(max((s.durable+scratchUnit-1)/scratchUnit, from), to)
		if now = (units{late, to}); late > from {
			s.punchLater = append(s.punchLater, units{from, late})
			s.punchLaterBytes += (late - from) * scratchUnit
		}
	}
	s.mu.Unlock()
	if from >= 0 {
		s.punch(now)
		s.change.Broadcast()
	}
}

// punch gives units back to the disk.
func (s *scratchFile) punch(u units) {
	if u.to > u.from {
		_ = s.f.Punch(u.from*scratchUnit, (u.to-u.from)*scratchUnit) // room that stays taken is given back with the file
	}
}

func (s *scratchFile) Close() error { return s.f.Close() }

var (
	_ io.ReaderAt   = (*scratchFile)(nil)
	_ block.Dropper = (*scratchFile)(nil)
)
