package archive

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// far is where a ring keeps what it overwrites, for a window that is larger than memory allows: a file without a name,
// which is gone when it is closed, also by a crash. It holds the last size bytes; the byte at offset n of the stream is
// at n modulo size.
type far struct {
	dir  string
	f    *os.File // nil until the ring is full for the first time
	size int64
}

func (f *far) open() error {
	dir := f.dir
	if dir == "" {
		dir = os.TempDir()
	}
	var err error
	f.f, err = os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) {
		// Some file systems make no nameless files.
		if f.f, err = os.CreateTemp(dir, ".window-"); err == nil {
			err = os.Remove(f.f.Name())
		}
	}
	if err != nil {
		return api.Errorf(api.Other, "no scratch file for a window that does not fit into memory: %w", err)
	}
	return nil
}

func (f *far) close() {
	if f.f != nil {
		_ = f.f.Close()
	}
}

// each cuts the bytes from off on where the file wraps around.
func (f *far) each(p []byte, off int64, do func([]byte, int64) (int, error)) error {
	for len(p) > 0 {
		at := off % f.size
		n := int(min(int64(len(p)), f.size-at))
		if _, err := do(p[:n], at); err != nil {
			return api.Errorf(api.Other, "scratch file for a window that does not fit into memory: %w", err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (f *far) write(p []byte, off int64) error { return f.each(p, off, f.f.WriteAt) }
func (f *far) read(p []byte, off int64) error  { return f.each(p, off, f.f.ReadAt) }
