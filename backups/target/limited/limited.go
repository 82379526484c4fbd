// Package limited is a store around another store that bounds the rates of the bytes to the store and from the store.
//
// A Put or Get of n bytes begins when the rate allows the bytes of the calls before, and then moves its bytes at once:
// the rate holds on average. Lists and deletions have no bound. Small objects are counted and do not wait: behind packs
// on a slow line, the refresh of a lock would come too late, and other programs would take the session for dead. The
// Store lies outside of package bounded, so that the time of a wait counts for no deadline.
//
// Small reads go first: a reader of a volume waits for them, and the opening of a backup makes several, while a restore
// has 32 MiB of large reads in the queue. Small reads wait for small reads alone, and large reads for both.
//
// The package starts no goroutines.
package limited

import (
	"context"
	"io"
	"math"
	"sync/atomic"

	"drover.io/drover/backups/target"
	"drover.io/drover/block"
)

// Rates are the throttles of all sessions that use a store. The zero value has no bounds.
type Rates struct {
	upload, download, small block.Throttle
	largestPut              atomic.Int64 // 0: no bound
}

// smallRead is longer than a chunk, and than the descriptions in a repository. Restores read pieces of up to 8 MiB.
const smallRead = 4 << 20

// Set changes the rates, in bytes per second, also for calls in progress; 0: no bound.
func (r *Rates) Set(upload, download int64) {
	largest := int64(0)
	if upload > 0 {
		largest = max(min(upload, math.MaxInt64/putSeconds)*putSeconds, leastPut)
	}
	r.largestPut.Store(largest)
	r.upload.SetRate(upload)
	r.download.SetRate(download)
	r.small.SetRate(download)
}

// A Put moves its bytes at once, also below the rate: at most those of putSeconds, or leastPut.
const (
	putSeconds = 4
	leastPut   = 4 << 20
)

// LargestPut bounds the bytes that the next Put should have: what the upload rate allows in 4 seconds, or 4 MiB if that
// is more. 0: no bound.
func (r *Rates) LargestPut() int64 { return r.largestPut.Load() }

// Store is a store with rates.
type Store struct {
	inner target.Store
	rates *Rates
}

var (
	_ target.Store        = (*Store)(nil)
	_ target.FolderLister = (*Store)(nil)
	_ io.Closer           = (*Store)(nil)
)

// New returns inner with rates. Close closes inner.
func New(inner target.Store, rates *Rates) *Store { return &Store{inner, rates} }

// smallObject is larger than a lock, a key file or the config.
const smallObject = 4 << 10

// wait waits for n bytes of t.
func wait(ctx context.Context, t *block.Throttle, n int64) error {
	if n <= smallObject {
		t.Add(n)
		return nil
	}
	return t.Wait(ctx, n)
}

// Put implements target.Store.
func (s *Store) Put(ctx context.Context, name string, body []byte) error {
	if err := wait(ctx, &s.rates.upload, int64(len(body))); err != nil {
		return err
	}
	return s.inner.Put(ctx, name, body)
}

// longestRange is longer than every object of a repository.
const longestRange = 1 << 32

// Get implements target.Store. The length of an object that is read to its end is known only afterwards.
func (s *Store) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	if n >= 0 && n <= smallRead {
		return s.getSmall(ctx, name, off, n)
	}
	counted := n
	if n < 0 || n > longestRange {
		counted = 0
	}
	if err := s.rates.download.Wait(ctx, counted); err != nil {
		return nil, err
	}
	body, err := s.inner.Get(ctx, name, off, n)
	s.rates.download.Add(int64(len(body)) - counted)
	return body, err
}

// getSmall is Get for small reads. Their bytes delay the large reads that begin later.
func (s *Store) getSmall(ctx context.Context, name string, off, n int64) ([]byte, error) {
	if err := wait(ctx, &s.rates.small, n); err != nil {
		return nil, err
	}
	body, err := s.inner.Get(ctx, name, off, n)
	s.rates.small.Add(int64(len(body)) - n)
	s.rates.download.Add(int64(len(body)))
	return body, err
}

// Stat implements target.Store.
func (s *Store) Stat(ctx context.Context, name string) (target.Object, error) {
	return s.inner.Stat(ctx, name)
}

// List implements target.Store.
func (s *Store) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	return s.inner.List(ctx, prefix, each)
}

// ListFolders implements target.FolderLister.
func (s *Store) ListFolders(ctx context.Context, prefix string, each func(string) error) error {
	return target.ListFolders(ctx, s.inner, prefix, each)
}

// Delete implements target.Store.
func (s *Store) Delete(ctx context.Context, names ...string) error {
	return s.inner.Delete(ctx, names...)
}

// Close closes the inner store, if it can be closed.
func (s *Store) Close() error {
	if c, ok := s.inner.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
