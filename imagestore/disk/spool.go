package disk

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

// scratch gives a file on the disk that has no name: it is gone when it is closed, also by a crash.
func scratch(on block.Layers) (*os.File, error) {
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
	// unit is what is given back of a scratch file at once. Sectors do not cross it.
	unit = 256 << 10
	// ahead is how much of a source is taken in before it is asked for.
	ahead = 64 << 20
)

// spool is a source that arrives in order and is read in any order: a read of what is not there yet waits. So a
// conversion that needs random access runs while the bytes still come. What the conversion has done with (Drop) is
// given back to the disk, and the source waits when the conversion falls behind; so the file stays small where the
// image is in the order of its disk, as it is when a tool has just made it.
type spool struct {
	f    *os.File
	peak *atomic.Int64 // the most bytes that were in f at once

	mu      sync.Mutex
	change  *sync.Cond
	have    int64 // bytes [0, have) came
	held    int64 // of them in f
	waiting int   // reads that wait for more
	sated   bool  // nobody will read any more
	done    bool
	err     error // why no more bytes come

	part map[int64]int // bytes dropped of units that are not dropped whole
	gone []uint64      // units that are: a bit each
}

func newSpool(on block.Layers, peak *atomic.Int64) (*spool, error) {
	f, err := scratch(on)
	if err != nil {
		return nil, err
	}
	s := &spool{f: f, peak: peak, part: map[int64]int{}}
	s.change = sync.NewCond(&s.mu)
	return s, nil
}

// put takes the next bytes; called in order, by one goroutine. It waits while enough are there.
func (s *spool) put(p []byte, off int64) error {
	s.mu.Lock()
	for s.held >= ahead && s.waiting == 0 && !s.sated && !s.done {
		s.change.Wait()
	}
	sated, done, err := s.sated, s.done, s.err
	s.mu.Unlock()
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
	s.peak.Store(max(s.peak.Load(), s.held))
	s.mu.Unlock()
	s.change.Broadcast()
	return nil
}

// finish says that no more bytes come, and why (nil: that was all).
func (s *spool) finish(err error) {
	s.mu.Lock()
	if !s.done {
		s.done, s.err = true, err
	}
	s.mu.Unlock()
	s.change.Broadcast()
}

// enough says that nobody reads any more: what still comes is not kept.
func (s *spool) enough() {
	s.mu.Lock()
	s.sated = true
	s.mu.Unlock()
	s.change.Broadcast()
}

// wait returns once the bytes up to end are there, or none come any more. It returns how many there are.
func (s *spool) wait(end int64) (int64, error) {
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

// whole waits for all bytes and tells how many they are.
func (s *spool) whole() (int64, error) { return s.wait(1 << 62) }

// Have tells how many bytes have come.
func (s *spool) Have() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.have
}

func (s *spool) ReadAt(p []byte, off int64) (int, error) {
	end := off + int64(len(p))
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
	if rerr == io.EOF {
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
func (s *spool) dropped(off, end int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for u := off / unit; u*unit < max(end-512, off+1); u++ {
		if i := int(u / 64); i < len(s.gone) && s.gone[i]>>(u%64)&1 != 0 {
			return max(u*unit, off)
		}
	}
	return -1
}

// Drop implements block.Dropper.
func (s *spool) Drop(off, n int64) {
	from, to := int64(-1), int64(0)
	s.mu.Lock()
	for at, end := off, off+n; at < end; {
		u := at / unit
		next := min((u+1)*unit, end)
		if s.part[u] += int(next - at); s.part[u] >= unit {
			delete(s.part, u)
			for int64(len(s.gone)) <= u/64 {
				s.gone = append(s.gone, 0)
			}
			s.gone[u/64] |= 1 << (u % 64)
			s.held -= unit
			if from < 0 {
				from = u
			}
			to = u + 1
		}
		at = next
	}
	s.mu.Unlock()
	if from >= 0 {
		// All units between are gone too: those that are not at the ends of the range went whole.
		_ = unix.Fallocate(int(s.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from*unit, (to-from)*unit)
		s.change.Broadcast()
	}
}

func (s *spool) Close() error { return s.f.Close() }

var (
	_ io.ReaderAt   = (*spool)(nil)
	_ block.Dropper = (*spool)(nil)
)
