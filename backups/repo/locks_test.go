package repo

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/suite"
)

// TestLocksAreListed: the list tells sessions of Drover from those of other programs, names an unreadable lock, and
// writes nothing.
func TestLocksAreListed(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	sweep, err := r.Lock(t.Context(), Sweeping)
	must(t, err)
	content, err := json.Marshal(lockFile{Time: time.Now(), Exclusive: false, Hostname: "laptop", Username: "anna", PID: 7})
	must(t, err)
	id, sealed := r.sealFile(content)
	must(t, store.Put(t.Context(), locksFolder+id.String(), sealed))
	broken := []byte("no lock")
	must(t, store.Put(t.Context(), locksFolder+blob.Sum(broken).String(), broken))
	store.before = func(operation, _ string) error {
		if operation == "put" || operation == "delete" {
			t.Errorf("the list calls %s", operation)
		}
		return nil
	}
	locks, total, err := r.ListLocks(t.Context(), 10)
	must(t, err)
	store.before = nil
	if total != 3 || len(locks) != 3 {
		t.Fatalf("%d of %d locks, want 3", len(locks), total)
	}
	for _, l := range locks {
		switch {
		case l.Err != nil:
			if l.Name != blob.Sum(broken).String() {
				t.Errorf("unreadable: %+v", l)
			}
		case l.Drover:
			if !l.Sweep || l.Exclusive || l.PID != os.Getpid() || l.Since.IsZero() || l.Refreshed.IsZero() || l.Stale {
				t.Errorf("a sweep: %+v", l)
			}
		case l.Hostname != "laptop" || l.Username != "anna" || l.PID != 7 || !l.Since.IsZero():
			t.Errorf("another program: %+v", l)
		}
	}
	if locks, total, err := r.ListLocks(t.Context(), 1); len(locks) != 1 || total != 3 || err != nil {
		t.Errorf("a bounded list: %d of %d, %v", len(locks), total, err)
	}
	must(t, sweep.Close(t.Context()))
}

// TestTimesOfTheStoreAreBounded: a lock and a snapshot with times that no object can have are listed with times that an
// object can have.
func TestTimesOfTheStoreAreBounded(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	late := time.Date(9999, 12, 31, 23, 0, 0, 0, time.FixedZone("", -23*3600))
	early := time.Date(0, 1, 1, 0, 0, 0, 0, time.FixedZone("", 23*3600))
	content, err := json.Marshal(lockFile{Time: late, Since: early})
	must(t, err)
	id, sealed := r.sealFile(content)
	must(t, store.Put(t.Context(), locksFolder+id.String(), sealed))
	locks, _, err := r.ListLocks(t.Context(), 1)
	must(t, err)
	if len(locks) != 1 || !locks[0].Since.IsZero() {
		t.Errorf("the locks are %+v", locks)
	}
	if l, err := r.readLock(t.Context(), namedFile{target.Object{Name: locksFolder + id.String(),
		Size: int64(len(sealed))}, id}); err != nil || l.Time.UTC().Year() != 9999 {
		t.Errorf("the lock is %+v, %v", l, err)
	}
	id, err = r.SaveSnapshot(t.Context(), Snapshot{Time: late, Tree: &blob.ID{}, Paths: []string{"/"}})
	must(t, err)
	f, err := r.FindSnapshot(t.Context(), id)
	must(t, err)
	if s, err := r.LoadSnapshot(t.Context(), f); err != nil || s.Time.UTC().Year() != 9999 {
		t.Errorf("the snapshot is %+v, %v", s, err)
	}
}

// TestOnlyStaleLocksAreRemoved: a lock is removed after 30 minutes of the store's clock, beside an exclusive session, too.
// No lock of the removal stays.
func TestOnlyStaleLocksAreRemoved(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		dead, err := (&Lock{r: r, mode: Shared}).save(t.Context())
		must(t, err)
		<-time.After(lockStale - time.Second)
		if n, err := r.RemoveStaleLocks(t.Context()); n != 0 || err != nil {
			t.Errorf("just before 30 minutes: %d removed, %v", n, err)
		}
		alive, err := (&Lock{r: r, mode: Exclusive}).save(t.Context())
		must(t, err)
		<-time.After(2 * time.Second)
		if n, err := r.RemoveStaleLocks(t.Context()); n != 1 || err != nil {
			t.Errorf("%d removed, %v, want the lock %.8s", n, err, dead)
		}
		if left := store.names(locksFolder); len(left) != 1 || left[0] != locksFolder+alive.String() {
			t.Errorf("left are %v, want the young lock", left)
		}
	})
}

// TestRestoresOfOthersAreKnown: an owner learns which snapshots the sessions of others restore, also those of a process
// that was killed, until the lock is stale; and leaves no lock.
func TestRestoresOfOthersAreKnown(t *testing.T) {
	inBubble(t, func(t *testing.T, store *memoryStore, r *Repository) {
		other, mine := *r, *r
		other.options.Owner, mine.options.Owner = "other", "mine"
		restored, own := blob.Sum([]byte("restored")), blob.Sum([]byte("own"))
		l, err := mine.LockSnapshot(t.Context(), own)
		must(t, err)
		plain, err := other.Lock(t.Context(), Shared)
		must(t, err)
		_, err = (&Lock{r: &other, mode: Shared, restore: restored.String()}).save(t.Context())
		must(t, err)
		locks := len(store.names(locksFolder))
		got, err := mine.RestoredByOthers(t.Context())
		must(t, err)
		if len(got) != 1 || got[restored] == "" {
			t.Errorf("others restore %v, want %.8s", got, restored)
		}
		if n := len(store.names(locksFolder)); n != locks {
			t.Errorf("%d locks, want %d", n, locks)
		}
		<-time.After(lockStale + time.Minute)
		if got, err := mine.RestoredByOthers(t.Context()); err != nil || len(got) != 0 {
			t.Errorf("after 31 minutes others restore %v, %v", got, err)
		}
		must(t, plain.Close(t.Context()))
		must(t, l.Close(t.Context()))
	})
}

// TestKeyFileOutlivesTheFolder: restic opens a repository that lost all its key files with one that was read before, and
// with its password alone.
func TestKeyFileOutlivesTheFolder(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	must(t, Init(t.Context(), store, "of the Secret", Options{}))
	r, err := Open(t.Context(), store, "of the Secret", Options{})
	must(t, err)
	if _, _, err := r.KeyFile(t.Context(), password); !api.Is(err, api.NotFound) {
		t.Errorf("an unknown password: %v, want an error of kind not found", err)
	}
	must(t, r.AddPassword(t.Context(), password))
	name, content, err := r.KeyFile(t.Context(), password)
	must(t, err)
	folder := store.save(t)
	must(t, os.RemoveAll(filepath.Join(folder, "keys")))
	must(t, os.Mkdir(filepath.Join(folder, "keys"), 0o700))
	if _, err := restic(t, folder, "cat", "config"); err == nil {
		t.Fatal("restic opens a repository without key files")
	}
	must(t, os.WriteFile(filepath.Join(folder, "keys", name), content, 0o600))
	mustRestic(t, folder, "cat", "config")
	mustCheck(t, folder)
}
