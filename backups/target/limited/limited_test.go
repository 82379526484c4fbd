package limited

import (
	"bytes"
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block/suite"
)

func open(t *testing.T, rates *Rates) *Store {
	t.Helper()
	inner, err := folder.Open(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return New(inner, rates)
}

// TestLimitedKeepsTheContract: a store with rates passes the contract of stores.
func TestLimitedKeepsTheContract(t *testing.T) {
	suite.Long(t)
	targettest.Run(t, func(t *testing.T) target.Store {
		rates := &Rates{}
		rates.Set(1<<40, 1<<40)
		return open(t, rates)
	})
}

// TestRatesHoldForAllUsers: by the clock of the throttles, the objects of several users of one target take the time of
// the rate, each direction its own, until the rate changes.
func TestRatesHoldForAllUsers(t *testing.T) {
	body := targettest.Body(1<<20, 1)
	synctest.Test(t, func(t *testing.T) {
		rates := &Rates{}
		rates.Set(1<<20, 2<<20)
		s := open(t, rates)
		each := func(do func(ctx context.Context, name string) error) time.Duration {
			began := time.Now()
			g, ctx := errgroup.WithContext(t.Context())
			for _, name := range []string{"a", "b", "c", "d", "e"} {
				g.Go(func() error { return do(ctx, name) })
			}
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			return time.Since(began).Round(time.Millisecond)
		}
		put := func(ctx context.Context, name string) error { return s.Put(ctx, name, body) }
		get := func(ctx context.Context, name string) error {
			got, err := s.Get(ctx, name, 0, int64(len(body)))
			if err == nil && !bytes.Equal(got, body) {
				t.Errorf("object %s: other bytes", name)
			}
			return err
		}
		if took := each(put); took != 4*time.Second { // the bytes of the last one count for the next
			t.Errorf("5 MiB at 1 MiB/s took %v", took)
		}
		if took := each(get); took != 2*time.Second {
			t.Errorf("5 MiB at 2 MiB/s took %v", took)
		}
		time.Sleep(time.Second) // of the test's clock: nothing is owed any more
		took := each(func(ctx context.Context, name string) error {
			if name == "a" {
				time.Sleep(2 * time.Second)
				rates.Set(0, 0)
				return nil
			}
			return put(ctx, name)
		})
		if took != 2*time.Second {
			t.Errorf("4 MiB at 1 MiB/s, and no limit after 2 s, took %v", took)
		}
		began := time.Now()
		rates.Set(0, 1<<20)
		for range 3 {
			if _, err := s.Get(t.Context(), "b", 0, -1); err != nil { // of a length that nobody knows before
				t.Fatal(err)
			}
		}
		if took := time.Since(began).Round(time.Millisecond); took != 2*time.Second {
			t.Errorf("3 objects of 1 MiB at 1 MiB/s took %v", took)
		}
	})
}

// TestLocksDoNotWaitForPacks: packs wait for days on a slow line, and a lock is written and read at once meanwhile.
func TestLocksDoNotWaitForPacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rates := &Rates{}
		rates.Set(1, 1)
		s := open(t, rates)
		ctx, cancel := context.WithCancel(t.Context())
		var packs errgroup.Group
		for _, name := range []string{"a", "b", "c"} {
			packs.Go(func() error { return s.Put(ctx, name, targettest.Body(1<<20, 1)) })
		}
		synctest.Wait()
		began, lock := time.Now(), targettest.Body(300, 2)
		if err := s.Put(t.Context(), "lock", lock); err != nil {
			t.Error(err)
		}
		if got, err := s.Get(t.Context(), "lock", 0, 300); err != nil || !bytes.Equal(got, lock) {
			t.Errorf("the lock is %d other bytes, or %v", len(got), err)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("the lock waited %v", took)
		}
		cancel()
		if err := packs.Wait(); err == nil {
			t.Error("no pack had to wait")
		}
	})
}

// TestSmallReadsGoFirst: small reads do not wait for the large reads of a restore, together keep the rate, and count
// for later large reads.
func TestSmallReadsGoFirst(t *testing.T) {
	large, small := targettest.Body(8<<20, 1), targettest.Body(2<<20, 2)
	synctest.Test(t, func(t *testing.T) {
		rates := &Rates{}
		s := open(t, rates)
		for name, body := range map[string][]byte{"large": large, "small": small} {
			if err := s.Put(t.Context(), name, body); err != nil {
				t.Fatal(err)
			}
		}
		rates.Set(0, 1<<20)
		began := time.Now()
		get := func(name string, n int) time.Duration {
			if got, err := s.Get(t.Context(), name, 0, int64(n)); err != nil || len(got) != n {
				t.Errorf("object %s: %d bytes, %v", name, len(got), err)
			}
			return time.Since(began).Round(time.Millisecond)
		}
		ends := make(chan time.Duration, 3)
		for range 3 {
			go func() { ends <- get("large", len(large)) }()
		}
		synctest.Wait() // the queue has 16 MiB
		if first, second := get("small", len(small)), get("small", len(small)); first != 0 || second != 2*time.Second {
			t.Errorf("small reads of 2 MiB at 1 MiB/s ended after %v and %v, want 0 and 2 s", first, second)
		}
		for range 3 {
			<-ends
		}
		if next := get("large", len(large)); next != 28*time.Second { // 24 MiB of large reads, and 4 MiB of small ones
			t.Errorf("the next large read ended after %v, want 28 s", next)
		}
	})
}

// TestLargestPutFollowsTheRate: an object has at most the bytes of 4 seconds, and 4 MiB at a lower rate.
func TestLargestPutFollowsTheRate(t *testing.T) {
	var rates Rates
	for _, c := range []struct{ rate, want int64 }{
		{0, 0}, {1, 4 << 20}, {1 << 20, 4 << 20}, {2 << 20, 8 << 20}, {math.MaxInt64, math.MaxInt64 / 4 * 4}, {-1, 0},
	} {
		rates.Set(c.rate, 1)
		if got := rates.LargestPut(); got != c.want {
			t.Errorf("%d bytes per second: %d bytes, want %d", c.rate, got, c.want)
		}
	}
}
