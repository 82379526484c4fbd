// Package watched calls disks that may hang. A call without an answer in Limit is overdue: its caller has an error, and
// the call runs on until the disk answers. Until then every further call of the disk fails at once. So a disk that
// hangs costs its callers one wait, and the process a goroutine for each call in progress.
//
// The calls of all users of a disk count together, by the disk's UID, because they hang together. Nobody waits for the
// goroutine of an overdue call, which ends when the disk answers. The package's mutexes are leaves, except Source.mu,
// which is held over calls of the source.
package watched

import (
	"io/fs"
	"sync"
	"time"

	"drover.io/drover/block"
)

// Limit is how long a call may take. A busy disk takes seconds.
const Limit = 30 * time.Second

// overdue counts the overdue calls of the process, by UID of the disk.
var overdue struct {
	mu    sync.Mutex
	calls map[string]int
}

func countOverdue(uid string, n int) {
	overdue.mu.Lock()
	defer overdue.mu.Unlock()
	if overdue.calls == nil {
		overdue.calls = map[string]int{}
	}
	if overdue.calls[uid] += n; overdue.calls[uid] == 0 {
		delete(overdue.calls, uid)
	}
}

// Disk is a disk that may hang.
type Disk struct {
	uid     string
	failure error
}

// NewDisk watches the disk of a UID. failure is the error of its overdue calls, and of the calls after them.
func NewDisk(uid string, failure error) Disk { return Disk{uid, failure} }

// Failure returns an error while the disk hangs.
func (d Disk) Failure() error {
	overdue.mu.Lock()
	defer overdue.mu.Unlock()
	if overdue.calls[d.uid] > 0 {
		return d.failure
	}
	return nil
}

// Call returns the result of do, which may run on after Call has returned, and then owns all that do uses. drop, if
// set, gets the result of an overdue call that succeeded after all.
func Call[T any](d Disk, do func() (T, error), drop func(T)) (result T, err error) {
	if err := d.Failure(); err != nil {
		return result, err
	}
	return beginCall(d, do, drop)()
}

// Do is Call for a function without a result.
func Do(d Disk, do func() error) error {
	_, err := Call(d, func() (struct{}, error) { return struct{}{}, do() }, nil)
	return err
}

// beginCall begins a call, whose end wait awaits.
func beginCall[T any](d Disk, do func() (T, error), drop func(T)) (wait func() (T, error)) {
	type answer struct {
		result T
		err    error
	}
	answers, late := make(chan answer, 1), make(chan struct{})
	timer := time.AfterFunc(Limit, func() {
		countOverdue(d.uid, 1)
		close(late)
	})
	go func() {
		result, err := do()
		if timer.Stop() {
			answers <- answer{result, err}
			return
		}
		<-late
		if err == nil && drop != nil {
			drop(result)
		}
		countOverdue(d.uid, -1)
	}()
	return func() (none T, err error) {
		select {
		case a := <-answers:
			return a.result, a.err
		case <-late:
			return none, d.failure
		}
	}
}

// Source is a source of a disk that may hang.
type Source struct {
	disk  Disk
	inner block.Source

	mu     sync.RWMutex // held for reading over calls of inner, and for writing over its Close
	closed bool
}

var (
	_ block.DigestSource  = (*Source)(nil)
	_ block.CacheBypasser = (*Source)(nil)
)

// Open opens a source of the disk.
func Open(d Disk, open func() (block.Source, error)) (*Source, error) {
	return Call(d, func() (*Source, error) {
		inner, err := open()
		if err != nil {
			return nil, err
		}
		return &Source{disk: d, inner: inner}, nil
	}, func(s *Source) { _ = s.inner.Close() })
}

// useSource calls the open source.
func useSource[T any](s *Source, do func() (T, error)) (T, error) {
	return Call(s.disk, func() (none T, err error) {
		s.mu.RLock()
		defer s.mu.RUnlock()
		if s.closed {
			return none, fs.ErrClosed
		}
		return do()
	}, nil)
}

// Size implements block.Source.
func (s *Source) Size() int64 { return s.inner.Size() }

// ReadAt implements io.ReaderAt. After an error the disk may still write to p.
func (s *Source) ReadAt(p []byte, off int64) (int, error) {
	return useSource(s, func() (int, error) { return s.inner.ReadAt(p, off) })
}

// Next implements block.Source.
func (s *Source) Next(off int64) (block.Extent, error) {
	return useSource(s, func() (block.Extent, error) { return s.inner.Next(off) })
}

// Digest implements block.DigestSource. The digests of a source without digests, or of a disk that hangs, are not
// known.
func (s *Source) Digest(chunk int64) (sum [32]byte, known bool) {
	digests, is := s.inner.(block.DigestSource)
	if !is {
		return sum, false
	}
	type digest struct {
		sum   [32]byte
		known bool
	}
	d, _ := useSource(s, func() (d digest, err error) {
		d.sum, d.known = digests.Digest(chunk)
		return d, nil
	})
	return d.sum, d.known
}

// BypassCache implements block.CacheBypasser.
func (s *Source) BypassCache() {
	if inner, is := s.inner.(block.CacheBypasser); is {
		_, _ = useSource(s, func() (struct{}, error) { inner.BypassCache(); return struct{}{}, nil })
	}
}

// Close implements io.Closer. Calls in progress delay the end of the source; Close does not wait for overdue ones.
func (s *Source) Close() error {
	wait := beginCall(s.disk, func() (struct{}, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.closed {
			return struct{}{}, nil
		}
		s.closed = true
		return struct{}{}, s.inner.Close()
	}, nil)
	if err := s.disk.Failure(); err != nil {
		return err
	}
	_, err := wait()
	return err
}
