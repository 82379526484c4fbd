package folder

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/file/lossy"
	"drover.io/drover/block/suite"
)

// The bodies of the objects: old/config has oldBody and old/gone goneBody before the work.
var (
	oldBody  = targettest.Body(2*block.Size+7, 1)
	newBody  = targettest.Body(3*block.Size+100, 2)
	goneBody = targettest.Body(block.Size, 3)
)

// promise records which calls have returned without an error.
type promise struct {
	pack, config, gone, index bool
}

// work puts, replaces and deletes objects until an operation fails.
func work(t *testing.T, f *lossy.FS, root string) (p promise) {
	// Another process makes two folders and has not synced them.
	for _, dir := range []string{"data", "data/ab"} {
		if f.Mkdir(filepath.Join(root, dir), 0o700) != nil {
			return
		}
	}
	s, err := openOn(t.Context(), f, root)
	if err != nil {
		return
	}
	if p.pack = s.Put(t.Context(), "data/ab/pack", newBody) == nil; !p.pack {
		return
	}
	if p.config = s.Put(t.Context(), "old/config", newBody) == nil; !p.config {
		return
	}
	if p.gone = s.Delete(t.Context(), "old/gone") == nil; !p.gone {
		return
	}
	p.index = s.Put(t.Context(), "index/deep/er", newBody) == nil
	return
}

// TestPutSurvivesPowerLoss cuts the power after every change of a file or name. An object whose Put returned is whole
// after the loss, an object whose Delete returned is gone, every other object is whole, old or absent, and the list
// shows nothing else.
func TestPutSurvivesPowerLoss(t *testing.T) {
	suite.Slow(t)
	outcomes := suite.Count(t, "DROVER_OUTCOMES", 8, 40)
	rng := rand.New(rand.NewPCG(suite.Seed(t), 0))
	steps := 0
	for killed := true; killed; steps++ {
		for range outcomes {
			killed = losePower(t, steps, rng)
		}
	}
	t.Logf("%d places of a power loss", steps)
	if steps < 20 {
		t.Errorf("only %d changes were seen", steps)
	}
}

// losePower reports whether the power failed within the work.
func losePower(t *testing.T, after int, rng *rand.Rand) (killed bool) {
	base := t.TempDir()
	root, later := filepath.Join(base, "a"), filepath.Join(base, "b")
	must(t, os.Mkdir(root, 0o700))
	before := openStore(t, root)
	must(t, before.Put(t.Context(), "old/config", oldBody))
	must(t, before.Put(t.Context(), "old/gone", goneBody))
	f, err := lossy.New(root)
	must(t, err)
	defer f.Close()
	f.KillAfter(after)
	p := work(t, f, root)
	killed = f.Killed()
	must(t, f.Crash(rng, later))

	s := openStore(t, later)
	objects := targettest.List(t, s, "")
	for _, c := range []struct {
		name     string
		promised bool
		bodies   [][]byte // allowed ones; nil is absent
		final    []byte   // after the promise
	}{
		{"data/ab/pack", p.pack, [][]byte{nil, newBody}, newBody},
		{"old/config", p.config, [][]byte{oldBody, newBody}, newBody},
		{"old/gone", p.gone, [][]byte{goneBody, nil}, nil},
		{"index/deep/er", p.index, [][]byte{nil, newBody}, newBody},
	} {
		var got []byte
		if o, listed := objects[c.name]; listed {
			if got, err = s.Get(t.Context(), c.name, 0, -1); err != nil || int64(len(got)) != o.Size {
				t.Fatalf("after %d changes: the list shows %+v, Get returns %d bytes, %v", after, o, len(got), err)
			}
			delete(objects, c.name)
		}
		allowed := c.bodies
		if c.promised {
			allowed = [][]byte{c.final}
		}
		found := false
		for _, body := range allowed {
			found = found || (got == nil) == (body == nil) && bytes.Equal(got, body)
		}
		if !found {
			t.Fatalf("after %d changes, promised %v: %s has %d bytes, neither old nor new", after, c.promised, c.name, len(got))
		}
	}
	if len(objects) != 0 {
		t.Fatalf("after %d changes: the list shows %v", after, objects)
	}
	must(t, s.Put(t.Context(), "data/ab/next", newBody))
	return killed
}

// TestOldTemporaryFilesAreRemoved: Open removes a temporary file that is older than a day by the clock of the file
// system, keeps a younger one, which another process may be writing, and a list shows neither.
func TestOldTemporaryFilesAreRemoved(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	must(t, s.Put(t.Context(), "data/a", []byte("a")))
	old, young := filepath.Join(root, tmpDir, "old"), filepath.Join(root, tmpDir, "young")
	for _, name := range []string{old, young} {
		must(t, os.WriteFile(name, []byte("torn"), 0o600))
	}
	st, err := os.Stat(young)
	must(t, err)
	must(t, os.Chtimes(old, st.ModTime(), st.ModTime().Add(-abandonedAfter-1e9)))
	if got := fmt.Sprint(targettest.List(t, s, "")); len(targettest.List(t, s, "")) != 1 {
		t.Errorf("the list shows %s, want data/a alone", got)
	}
	openStore(t, root)
	if _, err := os.Stat(old); !os.IsNotExist(err) {
		t.Errorf("the old temporary file: %v, want none", err)
	}
	if entries, err := os.ReadDir(filepath.Join(root, tmpDir)); err != nil || len(entries) != 1 {
		t.Errorf("temporary files: %v, %v; want the young one alone", entries, err)
	}
}

// refusingFS is a file system in which nothing can be made or removed.
type refusingFS struct {
	file.FS
	errno unix.Errno
}

func (f refusingFS) Open(name string, flag int, perm os.FileMode) (file.Handle, error) {
	if flag&os.O_CREATE != 0 {
		return nil, &os.PathError{Op: "open", Path: name, Err: f.errno}
	}
	return f.FS.Open(name, flag, perm)
}

func (f refusingFS) Remove(name string) error {
	return &os.PathError{Op: "remove", Path: name, Err: f.errno}
}

// TestFolderThatCannotBeWrittenIsOpened: a folder with temporary files of a process that died is opened and read,
// although the file system refuses writes and removals, or has no room. A folder that does not answer is not.
func TestFolderThatCannotBeWrittenIsOpened(t *testing.T) {
	root := t.TempDir()
	must(t, openStore(t, root).Put(t.Context(), "data/a", []byte("a")))
	must(t, os.WriteFile(filepath.Join(root, tmpDir, "old"), []byte("torn"), 0o600))
	for _, errno := range []unix.Errno{unix.EROFS, unix.EACCES, unix.EPERM, unix.ENOSPC, unix.EDQUOT} {
		s, err := openOn(t.Context(), refusingFS{file.OS, errno}, root)
		if err != nil {
			t.Errorf("%v: %v", errno, err)
			continue
		}
		if got, err := s.Get(t.Context(), "data/a", 0, -1); err != nil || string(got) != "a" {
			t.Errorf("%v: %q, %v", errno, got, err)
		}
	}
	if _, err := openOn(t.Context(), refusingFS{file.OS, unix.ESTALE}, root); !api.Is(err, api.Unavailable) {
		t.Errorf("a folder that does not answer: %v", err)
	}
}
