package cache

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/backups/repo/blob"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func id(i int) blob.ID { return blob.Sum(fmt.Append(nil, i)) }

func has(f *Folder, i int, want string, off int64) bool {
	b := make([]byte, len(want))
	return f.ReadAt(id(i), b, off) && string(b) == want
}

// TestPartsAreKept: parts of an object are read at their offsets, by another process, too; between the parts are zeros,
// and behind the last one is nothing.
func TestPartsAreKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b")
	f := New(path, 1<<20)
	if has(f, 1, "x", 0) {
		t.Error("an empty folder has an object")
	}
	f.WriteAt(id(1), []byte("late"), 10_000)
	f.WriteAt(id(1), []byte("early"), 10)
	again := New(path, 1<<20)
	for off, want := range map[int64]string{10_000: "late", 10: "early", 15: "\x00\x00", 10_002: "te"} {
		if !has(again, 1, want, off) {
			t.Errorf("offset %d: no %q", off, want)
		}
	}
	if has(again, 1, "te\x00", 10_002) || has(again, 2, "x", 0) {
		t.Error("the folder has bytes that nobody wrote")
	}
	must(t, os.RemoveAll(path))
	if has(f, 1, "late", 10_000) {
		t.Error("a removed folder has an object")
	}
	f.WriteAt(id(1), []byte("new"), 0)
	if !has(f, 1, "new", 0) {
		t.Error("the folder was not made again")
	}
}

// TestFullFolderKeepsWhatWasUsed: a full folder takes no more objects while those it has were used lately, and later
// replaces the objects that were not used for longest.
func TestFullFolderKeepsWhatWasUsed(t *testing.T) {
	path := t.TempDir()
	const room = 16
	f := New(path, room*blockSize)
	for i := range 2 * room {
		f.WriteAt(id(i), []byte("x"), 0)
	}
	for i := range 2 * room {
		if has(f, i, "x", 0) != (i < room) {
			t.Errorf("object %d: kept %v", i, i >= room)
		}
	}
	old := time.Now().Add(-2 * unusedTime)
	for i := range room {
		must(t, os.Chtimes(f.file(id(i)), old, old.Add(time.Duration(i)*time.Minute)))
	}
	if !has(f, 0, "x", 0) { // the use counts
		t.Error("object 0 is gone")
	}
	f = New(path, room*blockSize)
	f.WriteAt(id(100), []byte("x"), 0)
	for i, want := range map[int]bool{0: true, 1: false, room / 4: false, room - 1: true, 100: true} {
		if has(f, i, "x", 0) != want {
			t.Errorf("object %d: kept %v, want %v", i, !want, want)
		}
	}
}

// TestUnusableFolderIsNoError: a folder that cannot be made keeps nothing.
func TestUnusableFolderIsNoError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(path, nil, 0o600))
	f := New(filepath.Join(path, "folder"), 1<<20)
	f.WriteAt(id(1), []byte("x"), 0)
	if has(f, 1, "x", 0) {
		t.Error("a file has objects")
	}
}

// TestManyWritersOfAnObject: goroutines of two processes that write and read the same parts at once leave the parts
// whole.
func TestManyWritersOfAnObject(t *testing.T) {
	path := t.TempDir()
	part := bytes.Repeat([]byte("part"), 1000)
	var group errgroup.Group
	for range 2 {
		f := New(path, 1<<20)
		for range 4 {
			group.Go(func() error {
				for i := range 10 {
					f.WriteAt(id(i), part, int64(i)*100)
					f.ReadAt(id(i), make([]byte, 10), 0)
				}
				return nil
			})
		}
	}
	must(t, group.Wait())
	for i := range 10 {
		if !has(New(path, 1<<20), i, string(part), int64(i)*100) {
			t.Errorf("object %d is damaged", i)
		}
	}
}
