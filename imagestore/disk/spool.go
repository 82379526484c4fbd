package disk

import (
	"errors"
	"io"
	"os"
	"sync"

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

// spool is a source that arrives in order and is read in any order: a read of what is not there yet waits. So a
// conversion that needs random access runs while the bytes still come.
type spool struct {
	f    *os.File
	mu   sync.Mutex
	more *sync.Cond
	have int64 // bytes [0, have) are in f
	done bool
	err  error // why no more bytes come
}

func newSpool(on block.Layers) (*spool, error) {
	f, err := scratch(on)
	if err != nil {
		return nil, err
	}
	s := &spool{f: f}
	s.more = sync.NewCond(&s.mu)
	return s, nil
}

// put takes the next bytes; called in order, by one goroutine.
func (s *spool) put(p []byte, off int64) error {
	if _, err := s.f.WriteAt(p, off); err != nil {
		return err
	}
	s.mu.Lock()
	s.have = off + int64(len(p))
	s.mu.Unlock()
	s.more.Broadcast()
	return nil
}

// finish says that no more bytes come, and why (nil: that was all).
func (s *spool) finish(err error) {
	s.mu.Lock()
	if !s.done {
		s.done, s.err = true, err
	}
	s.mu.Unlock()
	s.more.Broadcast()
}

// wait returns once the bytes up to end are there, or none come any more.
func (s *spool) wait(end int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.have < end && !s.done {
		s.more.Wait()
	}
	if s.have >= end {
		return nil
	}
	return s.err
}

func (s *spool) ReadAt(p []byte, off int64) (int, error) {
	if err := s.wait(off + int64(len(p))); err != nil {
		return 0, err
	}
	return s.f.ReadAt(p, off)
}

func (s *spool) Close() error { return s.f.Close() }

var _ io.ReaderAt = (*spool)(nil)
