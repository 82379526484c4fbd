package watched

import (
	"errors"
	"io/fs"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"drover.io/drover/block"
)

var errHangs = errors.New("the disk does not answer")

// source is a source whose reads wait for hang.
type source struct {
	block.DigestSource
	hang    chan struct{} // nil: reads do not wait
	reading atomic.Int32
	closed  atomic.Bool
}

func (s *source) ReadAt(p []byte, _ int64) (int, error) {
	s.reading.Add(1)
	defer s.reading.Add(-1)
	if s.hang != nil {
		<-s.hang
	}
	return len(p), nil
}

func (s *source) Digest(int64) (sum [32]byte, known bool) { return [32]byte{1}, true }

func (s *source) Close() error {
	if s.reading.Load() > 0 {
		return errors.New("closed under a read")
	}
	s.closed.Store(true)
	return nil
}

// TestDiskThatHangsCostsOneWait: a read of a disk that hangs ends after the limit, and until the disk answers further
// calls fail without a wait, those of another user of the disk, too. Another disk answers. The source is closed behind
// the read, and afterwards the disk can be used again.
func TestDiskThatHangsCostsOneWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, other := NewDisk("hangs", errHangs), NewDisk("answers", errHangs)
		inner := &source{hang: make(chan struct{})}
		s, err := Open(d, func() (block.Source, error) { return inner, nil })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.ReadAt(make([]byte, 1), 0); !errors.Is(err, errHangs) {
			t.Errorf("a read of a disk that hangs: %v", err)
		}
		never := func() error { t.Error("a disk that hangs is called"); return nil }
		if err := Do(NewDisk("hangs", errHangs), never); !errors.Is(err, errHangs) {
			t.Errorf("a further call: %v", err)
		}
		if _, known := s.Digest(0); known {
			t.Error("the digest of a disk that hangs is known")
		}
		if err := Do(other, func() error { return nil }); err != nil {
			t.Errorf("the other disk: %v", err)
		}
		if err := s.Close(); !errors.Is(err, errHangs) || inner.closed.Load() {
			t.Errorf("the end of the source: %v, closed: %v", err, inner.closed.Load())
		}
		close(inner.hang)
		synctest.Wait()
		if !inner.closed.Load() || d.Failure() != nil || len(overdue.calls) > 0 {
			t.Errorf("the disk answers; closed: %v, %v, %v", inner.closed.Load(), d.Failure(), overdue.calls)
		}
		if _, err := s.ReadAt(make([]byte, 1), 0); !errors.Is(err, fs.ErrClosed) {
			t.Errorf("a read of a closed source: %v", err)
		}
	})
}

// TestOverdueResultIsDropped: a source that opens after its caller has given up is closed.
func TestOverdueResultIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner, hang := &source{}, make(chan struct{})
		_, err := Open(NewDisk("hangs", errHangs), func() (block.Source, error) { <-hang; return inner, nil })
		if !errors.Is(err, errHangs) {
			t.Errorf("an open of a disk that hangs: %v", err)
		}
		close(hang)
		synctest.Wait()
		if !inner.closed.Load() {
			t.Error("the source stays open")
		}
	})
}
