package bounded

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block/suite"
)

// TestBoundedStoreKeepsTheContract: a bounded store around a folder store passes the contract of stores.
func TestBoundedStoreKeepsTheContract(t *testing.T) {
	suite.Slow(t)
	targettest.Run(t, func(t *testing.T) target.Store {
		root := t.TempDir()
		s, err := Open(t.Context(), root, func(ctx context.Context) (target.Store, error) { return folder.Open(ctx, root) })
		must(t, err)
		t.Cleanup(func() {
			must(t, s.Close())
			mustHaveNoCalls(t)
		})
		return s
	})
}

// TestHangingOperationsAreUnavailable: each operation of a store that never answers ends with an error of kind
// unavailable that names the store, and the goroutine of the operation ends with the inner call.
func TestHangingOperationsAreUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, inner := openStore(t, func(string, string) { <-release })
		for operation, err := range operations(t.Context(), s) {
			if !api.Is(err, api.Unavailable) || !strings.HasPrefix(err.Error(), t.Name()+": cannot ") {
				t.Errorf("%s: %v of kind %v", operation, err, api.KindOf(err))
			}
		}
		if n := inner.count(); n != 6 {
			t.Errorf("the inner store had %d operations, want 6", n)
		}
		close(release)
		synctest.Wait()
		mustHaveNoCalls(t)
		must(t, s.Close())
	})
}

// TestDeadlineGrowsWithTheWork: a transfer and a delete have more time for more bytes and names; the same delay is too
// long for a small operation.
func TestDeadlineGrowsWithTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := openStore(t, func(operation, _ string) {
			if operation != "delete" {
				<-time.After(answerTime + 30*time.Second)
			}
		})
		must(t, s.Put(t.Context(), "a", make([]byte, 32<<20)))
		_, err := s.Get(t.Context(), "a", 0, 32<<20)
		must(t, err)
		_, err = s.Get(t.Context(), "a", 0, -1)
		must(t, err)
		_, stat := s.Stat(t.Context(), "a")
		if small := s.Put(t.Context(), "b", []byte("b")); !api.Is(small, api.Unavailable) || !api.Is(stat, api.Unavailable) {
			t.Errorf("slow small operations: %v, %v, want errors of kind unavailable", small, stat)
		}
		<-time.After(answerTime) // both return
		synctest.Wait()
		must(t, s.Close())

		s, _ = openStore(t, func(string, string) { <-time.After(slowDelete - time.Millisecond) })
		names := make([]string, 1000) // more than a minute
		must(t, s.Delete(t.Context(), names...))
		must(t, s.Close())
	})
}

// TestEndOfContextEndsTheCallAtOnce: the caller has the context's error without a wait, although the inner call hangs.
func TestEndOfContextEndsTheCallAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, _ := openStore(t, func(string, string) { <-release })
		ctx, cancel := context.WithCancel(t.Context())
		start, ended := time.Now(), make(chan struct{})
		go func() {
			defer close(ended)
			if _, err := s.Stat(ctx, "a"); !errors.Is(err, context.Canceled) {
				t.Errorf("stat: %v", err)
			}
		}()
		synctest.Wait()
		cancel()
		<-ended
		if waited := time.Since(start); waited != 0 {
			t.Errorf("the clock of the bubble moved by %v", waited)
		}
		close(release)
		synctest.Wait()
		mustHaveNoCalls(t)
		must(t, s.Close())
	})
}

// TestInnerCallSeesTheAbandonment: the context of the inner call ends with the deadline, and after an error of a list's
// callback, so that an inner call that reads its context ends, too. The caller learns of the deadline and never of the
// inner context.
func TestInnerCallSeesTheAbandonment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := patientStore{&innerStore{objects: map[string][]byte{"a": nil, "b": nil}}}
		s, err := Open(t.Context(), t.Name(), func(context.Context) (target.Store, error) { return inner, nil })
		must(t, err)
		for range 100 { // as often the caller or the inner call ends first
			_, stat := s.Stat(t.Context(), "a")
			for _, err := range []error{stat, s.Put(t.Context(), "a", nil)} {
				if !api.Is(err, api.Unavailable) || errors.Is(err, context.Canceled) {
					t.Fatalf("the deadline has passed: %v", err)
				}
			}
			synctest.Wait()
		}
		enough := errors.New("enough")
		if err := s.List(t.Context(), "", func(target.Object) error { return enough }); !errors.Is(err, enough) {
			t.Errorf("list: %v", err)
		}
		synctest.Wait()
		mustHaveNoCalls(t)
		must(t, s.Close())
	})
}

// TestHangingCallsAreBounded: of many calls in a place, the inner store has at most mostCalls at once. While so many
// hang, a new call of any store in the place fails at once; a store in another place works. When the calls return, the
// place works again.
func TestHangingCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, inner := openStore(t, func(string, string) { <-release })
		var callers sync.WaitGroup
		for range 3 * mostCalls {
			callers.Go(func() {
				if _, err := s.Stat(t.Context(), "a"); !api.Is(err, api.Unavailable) {
					t.Errorf("stat: %v", err)
				}
			})
		}
		callers.Wait()
		start := time.Now()
		second, other := openStoreAt(t, t.Name())
		if second != nil || !api.Is(other, api.Unavailable) || !strings.Contains(other.Error(), "16 operations hang") {
			t.Errorf("a second store in the place: %v", other)
		}
		if _, err := s.Stat(t.Context(), "a"); !api.Is(err, api.Unavailable) ||
			!strings.Contains(err.Error(), "16 operations hang") {
			t.Errorf("stat while all hang: %v", err)
		}
		if waited := time.Since(start); waited != 0 || inner.count() != mostCalls {
			t.Errorf("the clock of the bubble moved by %v, the inner store had %d calls", waited, inner.count())
		}
		elsewhere, err := openStoreAt(t, "elsewhere")
		must(t, err)
		_, err = elsewhere.Stat(t.Context(), "a")
		must(t, err)
		must(t, elsewhere.Close())
		close(release)
		synctest.Wait()
		mustHaveNoCalls(t)
		_, err = s.Stat(t.Context(), "a")
		must(t, err)
		must(t, s.Close())
	})
}

func openStoreAt(t *testing.T, place string) (*Store, error) {
	return Open(t.Context(), place, func(context.Context) (target.Store, error) { return &innerStore{}, nil })
}

// TestCancelledCallsDoNotCountAsHanging: a call waits for cancelled calls that still run, instead of an error, so that
// a cancelled session can delete its lock.
func TestCancelledCallsDoNotCountAsHanging(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, _ := openStore(t, func(operation, _ string) {
			if operation == "stat" {
				<-release
			}
		}, "lock")
		ctx, cancel := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		for range mostCalls {
			callers.Go(func() { _, _ = s.Stat(ctx, "a") })
		}
		synctest.Wait()
		cancel()
		callers.Wait()
		var deleted error
		callers.Go(func() { deleted = s.Delete(t.Context(), "lock") })
		synctest.Wait()
		close(release)
		callers.Wait()
		must(t, deleted)
		must(t, s.Close())
	})
}

// TestHangingOpenIsUnavailable: Open ends although the inner store hangs while it opens, and the hanging goroutines of
// several Opens are bounded together.
func TestHangingOpenIsUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var opened atomic.Int32
		for range 2 * mostCalls {
			_, err := Open(t.Context(), t.Name(), func(context.Context) (target.Store, error) {
				opened.Add(1)
				<-release
				return &innerStore{}, nil
			})
			if !api.Is(err, api.Unavailable) {
				t.Errorf("open: %v", err)
			}
		}
		if n := opened.Load(); n != mostCalls {
			t.Errorf("%d Opens hang, want %d", n, mostCalls)
		}
		close(release)
		synctest.Wait()
		mustHaveNoCalls(t)
	})
}

// TestAbandonedPutIsUndone: an object does not appear after its caller had an error, and no other Put writes the object
// before. A Put that fails in the end deletes nothing.
func TestAbandonedPutIsUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, inner := openStore(t, func(operation, name string) {
			if operation == "put" && name != "b" {
				<-release
			}
		}, "full")
		late := s.Put(t.Context(), "a", []byte("late"))
		failed := s.Put(t.Context(), "full", []byte("late"))
		again := s.Put(t.Context(), "a", []byte("again"))
		for _, err := range []error{late, failed, again} {
			if !api.Is(err, api.Unavailable) {
				t.Errorf("put: %v", err)
			}
		}
		if !strings.Contains(again.Error(), "an earlier write of the object hangs") || inner.count() != 2 {
			t.Errorf("second put: %v after %d operations", again, inner.count())
		}
		must(t, s.Put(t.Context(), "b", nil))
		close(release)
		synctest.Wait()
		if got := inner.names(); !slices.Equal(got, []string{"b", "full"}) {
			t.Errorf("the store has %v, want b and full", got)
		}
		must(t, s.Put(t.Context(), "a", []byte("again")))
		if got := inner.names(); !slices.Equal(got, []string{"a", "b", "full"}) {
			t.Errorf("the store has %v, want a, b and full", got)
		}
		must(t, s.Close())
	})
}

// TestAbandonedPutIsUndoneByItsOwnFunction: the function of target.WithUndo corrects the object in place of the
// deletion, with the inner store, and its own Put is no longer undone by it.
func TestAbandonedPutIsUndoneByItsOwnFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, inner := openStore(t, func(operation, name string) {
			if operation == "put" && name == "a" {
				<-release
			}
		})
		undone := 0
		ctx := target.WithUndo(t.Context(), func(ctx context.Context, store target.Store) error {
			undone++
			return errors.Join(store.Put(ctx, "b", nil), target.Undo(ctx, store, "none"))
		})
		if err := s.Put(ctx, "a", nil); !api.Is(err, api.Unavailable) || undone != 0 {
			t.Errorf("put: %v, undone %d times", err, undone)
		}
		close(release)
		synctest.Wait()
		if got := inner.names(); undone != 1 || !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("undone %d times; the store has %v, want a and b", undone, got)
		}
		must(t, s.Close())
	})
}

// TestListHasTimeForEachObject: a long list with slow callbacks is whole, because its deadline moves with each object;
// a list that hangs after an object ends, and calls no callback afterwards.
func TestListHasTimeForEachObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, _ := openStore(t, func(operation, name string) {
			if operation == "next" {
				<-time.After(answerTime - time.Second)
			}
			if name == "hangs" {
				<-release
			}
		}, "a", "b", "c")
		var listed []string
		each := func(o target.Object) error {
			listed = append(listed, o.Name)
			<-time.After(5 * answerTime)
			return nil
		}
		must(t, s.List(t.Context(), "", each))
		if !slices.Equal(listed, []string{"a", "b", "c"}) {
			t.Errorf("the list has %v", listed)
		}
		s.inner.(*innerStore).objects = map[string][]byte{"a": nil, "hangs": nil, "later": nil}
		listed = nil
		if err := s.List(t.Context(), "", each); !api.Is(err, api.Unavailable) {
			t.Errorf("a list that hangs: %v", err)
		}
		close(release)
		synctest.Wait()
		must(t, s.Close())
		if !slices.Equal(listed, []string{"a"}) {
			t.Errorf("the list that hangs has %v, want a", listed)
		}
		mustHaveNoCalls(t)
	})
}

// TestCloseWaitsForCallsThatEnd: Close ends the calls in progress and waits for the inner calls that end; it does not
// wait for calls that hang, and says how many do. A closed store refuses calls.
func TestCloseWaitsForCallsThatEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s, inner := openStore(t, func(operation, _ string) {
			switch operation {
			case "get":
				<-release
			case "stat":
				<-time.After(closeTime / 2)
			}
		})
		if _, err := s.Get(t.Context(), "a", 0, 1); !api.Is(err, api.Unavailable) {
			t.Errorf("get: %v", err)
		}
		var caller sync.WaitGroup
		caller.Go(func() {
			if _, err := s.Stat(t.Context(), "a"); !api.Is(err, api.Unavailable) {
				t.Errorf("stat during Close: %v", err)
			}
		})
		synctest.Wait()
		start := time.Now()
		err := s.Close()
		if waited := time.Since(start); waited != closeTime/2 {
			t.Errorf("the clock of the bubble moved by %v during Close", waited)
		}
		if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "operations hang (1)") {
			t.Errorf("close: %v", err)
		}
		caller.Wait()
		before := inner.count()
		for operation, err := range operations(t.Context(), s) {
			if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "the store is closed") {
				t.Errorf("%s after Close: %v", operation, err)
			}
		}
		if inner.count() != before {
			t.Error("a closed store calls its inner store")
		}
		close(release)
		synctest.Wait()
		mustHaveNoCalls(t)
		must(t, s.Close())
	})
}

// closingStore counts its Close calls, and how many operations ran then.
type closingStore struct {
	*innerStore
	running, closed, during atomic.Int32
}

func (s *closingStore) Stat(ctx context.Context, name string) (target.Object, error) {
	s.running.Add(1)
	defer s.running.Add(-1)
	return s.innerStore.Stat(ctx, name)
}

func (s *closingStore) Close() error {
	s.closed.Add(1)
	s.during.Add(s.running.Load())
	return nil
}

// TestInnerStoreIsClosedAfterItsLastCall: the inner store is closed once, and not while a call of it still runs. A
// store that Open opened after the caller had an error is closed, too.
func TestInnerStoreIsClosedAfterItsLastCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		inner := &closingStore{innerStore: &innerStore{objects: map[string][]byte{},
			before: func(string, string) { <-release }}}
		s, err := Open(t.Context(), t.Name(), func(context.Context) (target.Store, error) { return inner, nil })
		must(t, err)
		if _, err := s.Stat(t.Context(), "a"); !api.Is(err, api.Unavailable) {
			t.Errorf("stat: %v", err)
		}
		if err := s.Close(); !api.Is(err, api.Unavailable) {
			t.Errorf("close while a call hangs: %v", err)
		}
		if n := inner.closed.Load(); n != 0 {
			t.Errorf("the inner store was closed %d times while a call hung", n)
		}
		late := &closingStore{innerStore: inner.innerStore}
		_, err = Open(t.Context(), t.Name(), func(context.Context) (target.Store, error) { <-release; return late, nil })
		if !api.Is(err, api.Unavailable) {
			t.Errorf("open: %v", err)
		}
		close(release)
		synctest.Wait()
		must(t, s.Close())
		if inner.closed.Load() != 1 || inner.during.Load() != 0 || late.closed.Load() != 1 {
			t.Errorf("the inner store was closed %d times, %d calls ran; the late store was closed %d times",
				inner.closed.Load(), inner.during.Load(), late.closed.Load())
		}
		mustHaveNoCalls(t)
	})
}
