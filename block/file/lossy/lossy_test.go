package lossy

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/block/file"
)

func open(t *testing.T, f file.FS, name string) file.Handle {
	t.Helper()
	h, err := f.Open(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// outcomes runs build on many disks, crashes each, and counts what show says about them.
func outcomes(t *testing.T, build func(f *FS, root string), show func(root string) string) map[string]int {
	t.Helper()
	seen := make(map[string]int)
	for seed := range uint64(60) {
		root := t.TempDir()
		f, err := New(root)
		must(t, err)
		build(f, root)
		into := filepath.Join(t.TempDir(), "after")
		must(t, f.Crash(rand.New(rand.NewPCG(seed, 1)), into), f.Close())
		seen[show(into)]++
	}
	return seen
}

func text(name string) string {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return "none"
	}
	return string(bytes.TrimRight(b, "\x00"))
}

func TestWhatIsSyncedStays(t *testing.T) {
	seen := outcomes(t, func(f *FS, root string) {
		h := open(t, f, root+"/a.tmp")
		h.WriteAt([]byte("old"), 0)
		must(t, h.Datasync(), f.Rename(root+"/a.tmp", root+"/a"), f.SyncDir(root))
	}, func(root string) string { return text(root+"/a") + "," + text(root+"/a.tmp") })
	if len(seen) != 1 || seen["old,none"] == 0 {
		t.Fatal(seen)
	}
}

func TestWhatIsNotSyncedMayGo(t *testing.T) {
	seen := outcomes(t, func(f *FS, root string) {
		h := open(t, f, root+"/a")
		h.WriteAt([]byte("old"), 0)
		must(t, h.Datasync(), f.SyncDir(root))
		g := open(t, f, root+"/a.tmp") // the mistake: renamed without a sync
		g.WriteAt([]byte("new"), 0)
		must(t, f.Rename(root+"/a.tmp", root+"/a"))
	}, func(root string) string { return text(root + "/a") })
	for _, want := range []string{"old", "new", ""} {
		if seen[want] == 0 {
			t.Errorf("never saw %q: %v", want, seen)
		}
	}
	if seen["none"] > 0 {
		t.Errorf("the old name went: %v", seen)
	}
}

func TestHolesAreLostToo(t *testing.T) {
	seen := outcomes(t, func(f *FS, root string) {
		h := open(t, f, root+"/a")
		h.WriteAt(bytes.Repeat([]byte("x"), 8192), 0)
		must(t, h.Datasync(), f.SyncDir(root), h.Punch(0, 4096))
	}, func(root string) string {
		g, err := os.Open(root + "/a")
		must(t, err)
		defer g.Close()
		from, _, err := file.NextData(int(g.Fd()), 0, 8192)
		must(t, err)
		return map[int64]string{0: "data", 4096: "hole"}[from]
	})
	if seen["data"] == 0 || seen["hole"] == 0 || len(seen) != 2 {
		t.Fatal(seen)
	}
}

func TestKill(t *testing.T) {
	root := t.TempDir()
	f, err := New(root)
	must(t, err)
	defer f.Close()
	f.KillAfter(2)
	h := open(t, f, root+"/a")
	if _, err := h.WriteAt([]byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	if err := h.Datasync(); !errors.Is(err, ErrKilled) || !f.Killed() {
		t.Fatalf("third change: %v", err)
	}
}

// A second name of a file is the same file after a crash too, and is there for sure once its folder is synced.
func TestLink(t *testing.T) {
	seen := outcomes(t, func(f *FS, root string) {
		must(t, f.Mkdir(root+"/d", 0o700), f.SyncDir(root))
		h := open(t, f, root+"/a")
		h.WriteAt([]byte("old"), 0)
		must(t, h.Datasync(), f.SyncDir(root), f.Link(root+"/a", root+"/d/b"))
		h.WriteAt([]byte("new"), 0)
	}, func(root string) string {
		a, b := text(root+"/a"), text(root+"/d/b")
		if b != "none" && b != a {
			t.Fatalf("two files of one: %q, %q", a, b)
		}
		return b
	})
	if seen["none"] == 0 || seen["old"] == 0 || seen["new"] == 0 {
		t.Fatal(seen)
	}
	seen = outcomes(t, func(f *FS, root string) {
		h := open(t, f, root+"/a")
		h.WriteAt([]byte("old"), 0)
		must(t, h.Datasync(), f.Link(root+"/a", root+"/b"), f.SyncDir(root), f.Remove(root+"/a"), f.SyncDir(root))
	}, func(root string) string { return text(root+"/a") + "," + text(root+"/b") })
	if len(seen) != 1 || seen["none,old"] == 0 {
		t.Fatal(seen)
	}
}

// TestCloseClosesWhatTheProgramLeftOpen: a program that lost power closes nothing, and tests cut the power a thousand times.
func TestCloseClosesWhatTheProgramLeftOpen(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(entries)
	}
	before := count()
	dir := t.TempDir()
	f, err := New(dir)
	must(t, err)
	for _, name := range []string{"kept", "removed"} {
		_, err := f.Open(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
		must(t, err)
	}
	must(t, f.Remove(filepath.Join(dir, "removed")), f.Close(), f.Close())
	if after := count(); after != before {
		t.Errorf("%d files are open, %d before", after, before)
	}
}
