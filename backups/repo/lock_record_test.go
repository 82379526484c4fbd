package repo

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target/folder"
)

// TestLocksOfAKilledProcessAreReleased: a process that is killed with its session leaves a lock. The next process of
// the machine deletes the lock at once, but not that of a session which runs.
func TestLocksOfAKilledProcessAreReleased(t *testing.T) {
	if dir := os.Getenv("DROVER_TEST_LOCK"); dir != "" {
		holdLock(t, dir)
	}
	dir := t.TempDir()
	store := newMemoryStore()
	newRepository(t, store)
	path := store.save(t)
	must(t, os.Mkdir(dir+"/cache", 0o700))
	must(t, os.Rename(path, dir+"/store"))
	child := exec.Command(os.Args[0], "-test.run=^TestLocksOfAKilledProcessAreReleased$")
	child.Env = append(os.Environ(), "DROVER_TEST_LOCK="+dir)
	in, err := child.StdinPipe()
	must(t, err)
	defer in.Close()
	out, err := child.StdoutPipe()
	must(t, err)
	must(t, child.Start())
	said := make([]byte, len("locked"))
	if _, err := io.ReadFull(out, said); err != nil || string(said) != "locked" {
		t.Fatalf("the child said %q, %v", said, err)
	}
	r := openShared(t, dir)
	if n, err := r.ReleaseLeftLocks(t.Context()); n != 0 || err != nil {
		t.Errorf("%d records of a session that runs were released, %v", n, err)
	}
	if _, err := r.Lock(t.Context(), Exclusive); !api.Is(err, api.Busy) {
		t.Errorf("an exclusive lock beside the child's: %v, want an error of kind busy", err)
	}
	must(t, child.Process.Kill())
	_ = child.Wait() // killed
	if _, err := r.Lock(t.Context(), Exclusive); !api.Is(err, api.Busy) {
		t.Errorf("the killed child left no lock: %v", err)
	}
	if n, err := r.ReleaseLeftLocks(t.Context()); n != 1 || err != nil {
		t.Errorf("%d records released, %v; want 1", n, err)
	}
	l, err := r.Lock(t.Context(), Exclusive)
	must(t, err)
	must(t, l.Close(t.Context()))
	if HasLockRecords(dir+"/cache", r.ID()) {
		t.Error("records are left")
	}
}

// TestLockOfALeftRestoreStays: the lock of a restore that was left, as by a restart, stays for other owners until the
// restore runs again, or until the lock is stale.
func TestLockOfALeftRestoreStays(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	other := *r
	other.options.Owner = "other"
	id := blob.Sum([]byte("restored"))
	leave := func() {
		t.Helper()
		l, err := r.LockSnapshot(t.Context(), id)
		must(t, err)
		must(t, l.Leave())
		if n, err := r.ReleaseLeftLocks(t.Context()); n != 0 || err != nil {
			t.Errorf("%d records released, %v", n, err)
		}
		if got, err := other.RestoredByOthers(t.Context()); err != nil || got[id] == "" {
			t.Errorf("others restore %v, %v", got, err)
		}
	}
	leave()
	again, err := r.LockSnapshot(t.Context(), id)
	must(t, err)
	if n := len(store.names(locksFolder)); n != 1 {
		t.Errorf("%d locks of a restore that runs again, want 1", n)
	}
	must(t, again.Close(t.Context()))
	leave()
	records, err := os.ReadDir(r.recordsPath())
	must(t, err)
	before := time.Now().Add(-lockStale)
	for _, e := range records {
		must(t, os.Chtimes(filepath.Join(r.recordsPath(), e.Name()), before, before))
	}
	if n, err := r.ReleaseLeftLocks(t.Context()); n != 1 || err != nil || len(store.names(locksFolder)) != 0 {
		t.Errorf("after 30 minutes %d records released, %v; locks %v", n, err, store.names(locksFolder))
	}
}

// holdLock is the child: it locks, says so, and waits for its end.
func holdLock(t *testing.T, dir string) {
	if _, err := openShared(t, dir).Lock(t.Context(), Shared); err != nil {
		t.Fatal(err)
	}
	_, _ = os.Stdout.WriteString("locked")
	_, _ = io.ReadAll(os.Stdin)
	os.Exit(0)
}

func openShared(t *testing.T, dir string) *Repository {
	t.Helper()
	store, err := folder.Open(t.Context(), dir+"/store")
	must(t, err)
	r, err := Open(t.Context(), store, password, Options{Cache: dir + "/cache"})
	must(t, err)
	return r
}

// TestRecordNamesALockBeforeTheLockExists: after a kill at any operation of a session, the record has the names of all
// locks in the store.
func TestRecordNamesALockBeforeTheLockExists(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	checked := 0
	store.after = func(operation, name string) error {
		if operation != "put" || !strings.HasPrefix(name, locksFolder) {
			return nil
		}
		checked++
		found := false
		records, err := os.ReadDir(r.recordsPath())
		must(t, err)
		for _, e := range records {
			content, err := os.ReadFile(r.recordsPath() + "/" + e.Name())
			must(t, err)
			found = found || strings.Contains(string(content), strings.TrimPrefix(name, locksFolder)+"\n")
		}
		if !found {
			t.Errorf("no record names %s", name)
		}
		return nil
	}
	l, err := r.Lock(t.Context(), Shared)
	must(t, err)
	_, err = l.refresh(t.Context())
	must(t, err)
	must(t, l.Close(t.Context()))
	if checked != 2 || HasLockRecords(r.options.Cache, r.ID()) {
		t.Errorf("%d locks were written, want 2; records are left: %v", checked, HasLockRecords(r.options.Cache, r.ID()))
	}
}
