package semaphore

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestJobsNeverExceedTheLimitAndAllRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Set[string]
		var jobs sync.WaitGroup
		var now, most, all atomic.Int32
		for range 50 {
			jobs.Go(func() {
				release, err := s.Acquire(t.Context(), "x", Limit(3))
				if err != nil {
					t.Error(err)
					return
				}
				defer release()
				all.Add(1)
				if n := now.Add(1); n > most.Load() {
					most.Store(n)
				}
				<-time.After(time.Millisecond)
				now.Add(-1)
			})
		}
		jobs.Wait()
		if most.Load() != 3 || all.Load() != 50 || len(s.all) != 0 {
			t.Errorf("%d jobs at once, %d in all, %d semaphores left", most.Load(), all.Load(), len(s.all))
		}
	})
}

func TestKeysAreIndependent(t *testing.T) {
	var s Set[string]
	release, ok := s.TryAcquire("y", 1)
	if !ok {
		t.Fatal("a free semaphore refuses a job")
	}
	if _, ok := s.TryAcquire("y", 1); ok {
		t.Error("two jobs hold a semaphore of limit 1")
	}
	if other, ok := s.TryAcquire("z", 1); !ok {
		t.Error("a key blocks another key")
	} else {
		other()
	}
	release()
	release() // a second call does nothing
	if again, ok := s.TryAcquire("y", 1); !ok {
		t.Error("a released semaphore refuses a job")
	} else {
		again()
	}
	if len(s.all) != 0 {
		t.Errorf("%d semaphores left", len(s.all))
	}
}

// A job that waits reads its limit again after each release, so that a larger limit admits the job without the end of
// all jobs before it, and a smaller limit delays the job.
func TestWaitingJobsFollowAChangedLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Set[int]
		var limit atomic.Int32
		limit.Store(2)
		read := func() int { return int(limit.Load()) }
		var held []func()
		for range 2 {
			release, err := s.Acquire(t.Context(), 1, read)
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, release)
		}
		var admitted atomic.Bool
		go func() {
			release, err := s.Acquire(t.Context(), 1, read)
			if err != nil {
				t.Error(err)
				return
			}
			admitted.Store(true)
			release()
		}()
		synctest.Wait()
		limit.Store(1)
		held[0]()
		synctest.Wait()
		if admitted.Load() {
			t.Error("a job was admitted above its smaller limit")
		}
		held[1]()
		synctest.Wait()
		if !admitted.Load() {
			t.Error("a job waits for a free semaphore")
		}
	})
}

func TestAcquireEndsWithTheContext(t *testing.T) {
	var s Set[string]
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Acquire(ctx, "y", Limit(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled job acquires a free semaphore: %v", err)
	}
	release, _ := s.TryAcquire("y", 1)
	defer release()
	ctx, cancel = context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := s.Acquire(ctx, "y", Limit(1))
		ended <- err
	}()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled job waits on: %v", err)
	}
}
