package repo

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// TestLocksExclude: shared locks go along with each other; an exclusive one excludes every other, and the message names
// the holder. A refused session leaves no lock.
func TestLocksExclude(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	other, err := Open(t.Context(), store, password, Options{Hostname: "node-2", Username: "sweeper"})
	must(t, err)
	shared, err := r.Lock(t.Context(), Shared)
	must(t, err)
	second, err := other.Lock(t.Context(), Shared)
	must(t, err)
	if _, err := other.Lock(t.Context(), Exclusive); !api.Is(err, api.Busy) ||
		!strings.Contains(err.Error(), `"drover" on host "node-1"`) &&
			!strings.Contains(err.Error(), `"sweeper" on host "node-2"`) {
		t.Errorf("an exclusive lock beside shared ones: %v, want an error of kind busy that names the holder", err)
	}
	must(t, shared.Close(t.Context()))
	must(t, second.Close(t.Context()))
	if left := store.names(locksFolder); len(left) != 0 {
		t.Errorf("locks are left: %v", left)
	}
	exclusive, err := other.Lock(t.Context(), Exclusive)
	must(t, err)
	for _, want := range []LockMode{Shared, Exclusive, Sweeping} {
		if _, err := r.Lock(t.Context(), want); !api.Is(err, api.Busy) ||
			!strings.Contains(err.Error(), `"sweeper" on host "node-2"`) {
			t.Errorf("a lock beside an exclusive one: %v, want an error of kind busy that names the holder", err)
		}
	}
	if left := store.names(locksFolder); len(left) != 1 {
		t.Errorf("%d locks, want the exclusive one alone", len(left))
	}
	must(t, exclusive.Close(t.Context()))
	if exclusive.Context().Err() == nil {
		t.Error("the session's context does not end with Close")
	}
}

// TestTwoExclusiveLocksNeverHold: of two sessions in any interleaving, at most a single session locks.
func TestTwoExclusiveLocksNeverHold(t *testing.T) {
	for point := range 6 {
		store := newMemoryStore()
		r := newRepository(t, store)
		var count atomic.Int32
		var inner *Lock
		store.before = func(string, string) error {
			if int(count.Add(1)) == point+1 {
				inner, _ = r.Lock(t.Context(), Exclusive)
			}
			return nil
		}
		outer, err := r.Lock(t.Context(), Exclusive)
		if err == nil && inner != nil {
			t.Errorf("both sessions lock, the second one from operation %d of the first", point)
		}
		for _, l := range []*Lock{outer, inner} {
			if l != nil {
				must(t, l.Close(t.Context()))
			}
		}
	}
}

// TestRefreshedLockIsSeen: a lock that the holder refreshes between List and Get of another session still excludes the
// other session.
func TestRefreshedLockIsSeen(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	holder, err := r.Lock(t.Context(), Exclusive)
	must(t, err)
	refreshed := false
	store.before = func(operation, name string) error {
		if operation == "get" && !refreshed {
			refreshed = true
			_, err := holder.refresh(t.Context())
			return err
		}
		return nil
	}
	if _, err := r.Lock(t.Context(), Shared); !api.Is(err, api.Busy) || !refreshed {
		t.Errorf("%v, want an error of kind busy", err)
	}
	must(t, holder.Close(t.Context()))
}

// inBubble runs a test with a clock of its own, and with the store's clock a day ahead.
func inBubble(t *testing.T, test func(t *testing.T, store *memoryStore, r *Repository)) {
	store := newMemoryStore()
	r := newRepository(t, store)
	synctest.Test(t, func(t *testing.T) {
		store.skew = 24 * time.Hour
		test(t, store, r)
	})
}

// TestStaleLockIsJudgedByTheStoresClock: a session deletes a lock without a refresh for 30 minutes of the store's
// clock, and respects a younger lock; the time in the lock does not matter.
func TestStaleLockIsJudgedByTheStoresClock(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		_, err := (&Lock{r: r, mode: Exclusive}).save(t.Context()) // of a dead session
		must(t, err)
		<-time.After(lockStale - time.Second)
		if _, err := r.Lock(t.Context(), Shared); !api.Is(err, api.Busy) {
			t.Errorf("beside a lock just before 30 minutes: %v, want an error of kind busy", err)
		}
		<-time.After(2 * time.Second)
		l, err := r.Lock(t.Context(), Exclusive)
		must(t, err)
		if n := len(store.names(locksFolder)); n != 1 {
			t.Errorf("%d locks, want the stale one deleted", n)
		}
		must(t, l.Close(t.Context()))
	})
}

// TestLockIsRefreshed: a session of hours keeps a single lock, never older than five minutes.
func TestLockIsRefreshed(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		l, err := r.Lock(t.Context(), Shared)
		must(t, err)
		for range 100 {
			<-time.After(2 * time.Minute)
			synctest.Wait()
			names := store.names(locksFolder)
			if len(names) != 1 {
				t.Fatalf("locks: %v, want one", names)
			}
			o, err := store.Stat(t.Context(), names[0])
			must(t, err)
			if age := time.Since(o.Modified.Add(-store.skew)); age > refreshStep {
				t.Fatalf("the lock is %v old", age)
			}
		}
		must(t, l.Session())
		must(t, l.Close(t.Context()))
		if left := store.names(locksFolder); len(left) != 0 {
			t.Errorf("locks are left: %v", left)
		}
	})
}

// TestLostLockEndsTheSession: the session ends when somebody removes the lock, or when the store fails for 20 minutes,
// but not when the store fails for less.
func TestLostLockEndsTheSession(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		var failing atomic.Bool
		store.before = func(string, string) error {
			if failing.Load() {
				return api.Errorf(api.Unavailable, "the store is away")
			}
			return nil
		}
		l, err := r.Lock(t.Context(), Shared)
		must(t, err)
		for range 5 {
			failing.Store(true)
			<-time.After(14 * time.Minute)
			failing.Store(false)
			<-time.After(refreshStep + time.Second)
			synctest.Wait()
			must(t, l.Session())
		}
		begin := time.Now()
		failing.Store(true)
		<-l.Context().Done()
		if after := time.Since(begin); after > lockStale-refreshStep {
			t.Errorf("the session ended %v after the store failed: others may count the lock as stale", after)
		}
		if err := l.Session(); !api.Is(err, api.Unavailable) {
			t.Errorf("the session ended with %v, want an error of kind unavailable", err)
		}
		failing.Store(false)
		must(t, l.Close(t.Context()))

		l, err = r.Lock(t.Context(), Shared)
		must(t, err)
		must(t, store.Delete(t.Context(), store.names(locksFolder)...))
		<-l.Context().Done()
		if err := l.Session(); !strings.Contains(err.Error(), "removed") {
			t.Errorf("the session ended with %v, want that the lock was removed", err)
		}
		must(t, l.Close(t.Context()))
		if left := store.names(locksFolder); len(left) != 0 {
			t.Errorf("locks are left: %v", left)
		}
	})
}

// TestHangingStoreEndsTheSession: a store that does not answer cannot keep the session alive beyond its lock.
func TestHangingStoreEndsTheSession(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		l, err := r.Lock(t.Context(), Shared)
		must(t, err)
		l.r = &Repository{store: hangingStore{store}, key: r.key, config: r.config}
		begin := time.Now()
		<-l.Context().Done()
		if after := time.Since(begin); after > lockStale-refreshStep {
			t.Errorf("the session ended after %v", after)
		}
		l.r = r
		must(t, l.Close(t.Context()))
	})
}

// TestLockWithoutPermissionToDelete: a store that permits no deletion keeps old locks, and sessions work.
func TestLockWithoutPermissionToDelete(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		store.before = func(operation, _ string) error {
			if operation == "delete" {
				return api.Errorf(api.Denied, "no permission")
			}
			return nil
		}
		l, err := r.Lock(t.Context(), Shared)
		must(t, err)
		<-time.After(time.Hour)
		must(t, l.Session())
		must(t, l.Close(t.Context()))
		l, err = r.Lock(t.Context(), Shared)
		must(t, err)
		must(t, l.Close(t.Context()))
	})
}

// TestSnapshotIsReadWithoutALockWhereWritesAreRefused: a store that refuses writes, or has no room, takes no lock, and a
// session still reads a snapshot: it ends with Close, respects exclusive locks at its begin and later. Sessions that
// write, and those in a store that does not answer, need the lock.
func TestSnapshotIsReadWithoutALockWhereWritesAreRefused(t *testing.T) {
	for _, kind := range []api.Kind{api.Denied, api.Full} {
		inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
			refuse := func(kind api.Kind) {
				store.before = func(operation, _ string) error {
					if operation == "put" || operation == "delete" {
						return api.Errorf(kind, "the store is not writable")
					}
					return nil
				}
			}
			refuse(kind)
			if _, err := r.Lock(t.Context(), Shared); !api.Is(err, kind) {
				t.Errorf("a session that writes: %v, want kind %v", err, kind)
			}
			l, err := r.LockSnapshot(t.Context(), blob.ID{})
			must(t, err)
			must(t, l.Confirm(t.Context()))
			<-time.After(2 * lockStale)
			must(t, l.Session())
			store.before = nil
			_, err = r.Lock(t.Context(), Exclusive)
			must(t, err)
			refuse(kind)
			if err := l.Confirm(t.Context()); !IsLocked(err) {
				t.Errorf("beside an exclusive lock: %v", err)
			}
			must(t, l.Close(t.Context()))
			if l.Context().Err() == nil {
				t.Error("the session's context does not end with Close")
			}
			if _, err := r.LockSnapshot(t.Context(), blob.ID{}); !IsLocked(err) {
				t.Errorf("a new session beside an exclusive lock: %v", err)
			}
			refuse(api.Unavailable)
			if _, err := r.LockSnapshot(t.Context(), blob.ID{}); !api.Is(err, api.Unavailable) {
				t.Errorf("a store that does not answer: %v", err)
			}
		})
	}
}

// TestUnreadableLockIsRespected: a damaged lock may be exclusive, so no session locks.
func TestUnreadableLockIsRespected(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	id, err := (&Lock{r: r}).save(t.Context())
	must(t, err)
	store.change(locksFolder+id.String(), flipLast)
	if _, err := r.Lock(t.Context(), Shared); !api.Is(err, api.Busy) || !strings.Contains(err.Error(), id.String()) {
		t.Errorf("%v, want an error of kind busy that names the object", err)
	}
}

// Session returns why the session ended, or nil.
func (l *Lock) Session() error {
	if err := context.Cause(l.Context()); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
