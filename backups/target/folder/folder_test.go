package folder

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/suite"
)

// TestFolderKeepsTheContract: a folder store passes the contract of stores.
func TestFolderKeepsTheContract(t *testing.T) {
	suite.Slow(t)
	targettest.Run(t, func(t *testing.T) target.Store { return openStore(t, t.TempDir()) })
}

func openStore(t *testing.T, root string) *Store {
	t.Helper()
	s, err := Open(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// watchedFS calls write before each write and read before each read, and fails the operation with their errors. A nil
// read watches no reads.
type watchedFS struct {
	file.FS
	write func(h file.Handle, p []byte) error
	read  func(h file.Handle, p []byte) error
}

type watchedHandle struct {
	file.Handle
	fs watchedFS
}

func (w watchedFS) Open(name string, flag int, perm os.FileMode) (file.Handle, error) {
	h, err := w.FS.Open(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return watchedHandle{h, w}, nil
}

func (h watchedHandle) WriteAt(p []byte, off int64) (int, error) {
	if err := h.fs.write(h.Handle, p); err != nil {
		return 0, err
	}
	return h.Handle.WriteAt(p, off)
}

func (h watchedHandle) ReadAt(p []byte, off int64) (int, error) {
	if h.fs.read != nil {
		if err := h.fs.read(h.Handle, p); err != nil {
			return 0, err
		}
	}
	return h.Handle.ReadAt(p, off)
}

func isDirect(t *testing.T, h file.Handle) bool {
	flags, err := unix.FcntlInt(h.Fd(), unix.F_GETFL, 0)
	must(t, err)
	return flags&unix.O_DIRECT != 0
}

// TestAlignedBodiesPassThePageCache: on a file system with blocks, Put writes the whole blocks of an aligned body with
// direct I/O and the tail without, and a body of other memory without.
func TestAlignedBodiesPassThePageCache(t *testing.T) {
	var direct, buffered int
	s, err := openOn(t.Context(), watchedFS{FS: file.OS, write: func(h file.Handle, p []byte) error {
		switch isWhole := block.Aligned(p, 0) && len(p)%block.Size == 0; {
		case !isDirect(t, h):
			buffered += len(p)
		case !isWhole:
			return unix.EINVAL
		default:
			direct += len(p)
		}
		return nil
	}}, t.TempDir())
	must(t, err)
	body := targettest.Body(5<<20+100, 1)
	must(t, s.Put(t.Context(), "a", body))
	if direct != 5<<20 || buffered != 100 {
		t.Errorf("aligned: %d bytes direct, %d buffered", direct, buffered)
	}
	direct, buffered = 0, 0
	must(t, s.Put(t.Context(), "b", body[1:]))
	if direct != 0 || buffered != len(body)-1 {
		t.Errorf("not aligned: %d bytes direct, %d buffered", direct, buffered)
	}
}

// TestPutWithoutDirectIO: a file system that accepts the flag and refuses the write gets the body through the page
// cache.
func TestPutWithoutDirectIO(t *testing.T) {
	refused := 0
	s, err := openOn(t.Context(), watchedFS{FS: file.OS, write: func(h file.Handle, _ []byte) error {
		if isDirect(t, h) {
			refused++
			return unix.EINVAL
		}
		return nil
	}}, t.TempDir())
	must(t, err)
	body := targettest.Body(2<<20+9, 1)
	must(t, s.Put(t.Context(), "a", body))
	got, err := s.Get(t.Context(), "a", 0, -1)
	if err != nil || !bytes.Equal(got, body) || refused != 1 {
		t.Errorf("%d bytes, %v, after %d refusals", len(got), err, refused)
	}
}

// TestLargeGetsPassThePageCache: Get reads large ranges of any place with direct I/O, small ones without, and where the
// file system refuses direct I/O through the page cache.
func TestLargeGetsPassThePageCache(t *testing.T) {
	var direct, buffered, refused int
	refuse := false
	s, err := openOn(t.Context(), watchedFS{FS: file.OS, write: func(file.Handle, []byte) error { return nil },
		read: func(h file.Handle, _ []byte) error {
			switch {
			case !isDirect(t, h):
				buffered++
			case refuse:
				refused++
				return unix.EINVAL
			default:
				direct++
			}
			return nil
		}}, t.TempDir())
	must(t, err)
	body := targettest.Body(3<<20+77, 1)
	must(t, s.Put(t.Context(), "a", body))
	for _, refuse = range []bool{false, true} {
		direct, buffered, refused = 0, 0, 0
		large := [][2]int{{0, len(body)}, {1, len(body) - 1}, {4096, 1 << 20}, {4095, 1<<20 + 2}, {100, directFrom}}
		for _, r := range append(large, [2]int{5, directFrom - 1}) {
			got, err := s.Get(t.Context(), "a", int64(r[0]), int64(r[1]))
			if err != nil || !bytes.Equal(got, body[r[0]:r[0]+r[1]]) {
				t.Errorf("%d bytes from %d: got %d, %v", r[1], r[0], len(got), err)
			}
		}
		if refuse && (direct != 0 || refused != len(large) || buffered != len(large)+1) ||
			!refuse && (direct != len(large) || buffered != 1) {
			t.Errorf("direct I/O is refused: %v: %d reads direct, %d buffered, %d refused", refuse, direct, buffered, refused)
		}
	}
}

// TestPutEndsWithItsContext: the end of the context ends a Put between two writes, and leaves no file.
func TestPutEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	root, writes := t.TempDir(), 0
	s, err := openOn(ctx, watchedFS{FS: file.OS, write: func(file.Handle, []byte) error {
		writes++
		cancel()
		return nil
	}}, root)
	must(t, err)
	if err := s.Put(ctx, "a", targettest.Body(3*writeLen, 1)); !errors.Is(err, context.Canceled) || writes != 1 {
		t.Errorf("after %d writes: %v", writes, err)
	}
	if entries, err := os.ReadDir(filepath.Join(root, tmpDir)); err != nil || len(entries) != 0 {
		t.Errorf("temporary files: %v, %v", entries, err)
	}
}

// TestErrorsOfAFolderHaveAKind: an error names the store, the object and the cause once, has the kind of the cause, and
// a failed Put leaves no file.
func TestErrorsOfAFolderHaveAKind(t *testing.T) {
	for errno, kind := range map[unix.Errno]api.Kind{
		unix.ENOSPC: api.Full, unix.EDQUOT: api.Full, unix.EACCES: api.Denied, unix.EROFS: api.Denied,
		unix.EIO: api.Unavailable, unix.ESTALE: api.Unavailable, unix.EFBIG: api.Other,
	} {
		root := t.TempDir()
		s, err := openOn(t.Context(), watchedFS{FS: file.OS, write: func(file.Handle, []byte) error {
			return &os.PathError{Op: "write", Path: root + "/secret", Err: errno}
		}}, root)
		must(t, err)
		err = s.Put(t.Context(), "data/a", []byte("a"))
		want := "folder store " + root + ": cannot write object data/a: " + errno.Error()
		if !api.Is(err, kind) || !errors.Is(err, errno) || err.Error() != want {
			t.Errorf("%v: %q of kind %v, want %q of kind %v", errno, err, api.KindOf(err), want, kind)
		}
		if entries, err := os.ReadDir(filepath.Join(root, tmpDir)); err != nil || len(entries) != 0 {
			t.Errorf("%v: temporary files: %v, %v", errno, entries, err)
		}
	}
}

// TestMissingRootIsNotAnEmptyStore: without its root, as behind a lost mount, a store is unavailable in each operation,
// and no operation makes the root.
func TestMissingRootIsNotAnEmptyStore(t *testing.T) {
	root := filepath.Join(t.TempDir(), "mnt")
	if _, err := Open(t.Context(), root); !api.Is(err, api.Unavailable) {
		t.Errorf("open: %v", err)
	}
	must(t, os.Mkdir(root, 0o700))
	s := openStore(t, root)
	must(t, s.Put(t.Context(), "data/a", nil))
	must(t, os.RemoveAll(root))
	_, get := s.Get(t.Context(), "data/a", 0, -1)
	_, stat := s.Stat(t.Context(), "data/a")
	for name, err := range map[string]error{
		"get": get, "stat": stat,
		"put":    s.Put(t.Context(), "data/a", nil),
		"list":   s.List(t.Context(), "data/", func(target.Object) error { return nil }),
		"delete": s.Delete(t.Context(), "data/a"),
	} {
		if !api.Is(err, api.Unavailable) || !strings.HasPrefix(err.Error(), "folder store "+root+": cannot open") {
			t.Errorf("%s: %v of kind %v", name, err, api.KindOf(err))
		}
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("the root exists: %v", err)
	}
}

// TestFoldersMayBeRemoved: Put makes a folder again that another program removed.
func TestFoldersMayBeRemoved(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	must(t, s.Put(t.Context(), "data/ab/a", nil))
	must(t, os.RemoveAll(filepath.Join(root, "data")))
	must(t, os.RemoveAll(filepath.Join(root, tmpDir)))
	must(t, s.Put(t.Context(), "data/ab/a", []byte("a")))
	if got := targettest.List(t, s, ""); got["data/ab/a"].Size != 1 {
		t.Errorf("the list has %v", got)
	}
}

// TestOnlyFilesAreObjects: a list skips files of other programs whose names no object has, and a pipe; Get finds no
// object in a pipe and does not wait for it. A symbolic link ends a list, because objects behind the link would be
// missing.
func TestOnlyFilesAreObjects(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	must(t, s.Put(t.Context(), "data/a", []byte("a")))
	must(t, os.Mkdir(filepath.Join(root, "lost+found"), 0o700))
	must(t, os.WriteFile(filepath.Join(root, "lost+found", "x"), nil, 0o600))
	must(t, os.WriteFile(filepath.Join(root, "data", ".nfs01"), nil, 0o600))
	must(t, unix.Mkfifo(filepath.Join(root, "pipe"), 0o600))
	if got := targettest.List(t, s, ""); len(got) != 1 {
		t.Errorf("the list has %v, want data/a alone", got)
	}
	if _, err := s.Get(t.Context(), "pipe", 0, -1); !api.Is(err, api.NotFound) {
		t.Errorf("get of a pipe: %v", err)
	}
	must(t, os.Symlink("data", filepath.Join(root, "index")))
	if err := s.List(t.Context(), "index", func(target.Object) error { return nil }); !api.Is(err, api.Unsupported) {
		t.Errorf("list of a symbolic link: %v", err)
	}
}
