// Package file is sparse files: as a block.Source, as a block.Sink, and behind a small seam (FS, Handle). All writers
// of on-disk formats use the seam, so that tests can put a back end under the writers that loses unsynced data
// (package lossy). The package starts no goroutines.
package file

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// FS is the part of a file system that formats need. Names are paths; nothing here follows from the working directory.
type FS interface {
	// Open opens a file; flags as in os.OpenFile, O_CLOEXEC is added. A new file is durable after Datasync of it and
	// SyncDir of its folder.
	Open(name string, flag int, perm fs.FileMode) (Handle, error)
	// Mkdir makes a folder, durable after SyncDir of its parent.
	Mkdir(name string, perm fs.FileMode) error
	// Rename replaces atomically, durable after SyncDir of the folder of the new name.
	Rename(from, to string) error
	// Link gives a file a second name, durable after SyncDir of the folder of the new name.
	Link(from, to string) error
	// Remove removes a file or an empty folder, durable after SyncDir of its folder.
	Remove(name string) error
	ReadDir(name string) ([]fs.DirEntry, error)
	// SyncDir makes the names in a folder durable.
	SyncDir(name string) error
}

// Handle is an open file. Several goroutines may call ReadAt and WriteAt at once. A writer through Fd bypasses the
// seam.
type Handle interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Fd() uintptr
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
	Chmod(mode fs.FileMode) error
	// Punch makes a hole; the size stays.
	Punch(off, n int64) error
	// CopyFrom copies a range of another file of the same file system to the same place here, by sharing its blocks
	// where the file system can.
	CopyFrom(from Handle, off, n int64) error
	// Datasync returns once all earlier writes, holes and sizes survive power loss.
	Datasync() error
	// Writeout sends the written data of a range to the disk, and waits, so that a later Datasync has little left to
	// do. Writeout makes nothing durable.
	Writeout(off, n int64) error
}

// OS is the real file system.
var OS FS = osFS{}

type osFS struct{}

type osFile struct{ *os.File }

func (osFS) Open(name string, flag int, perm fs.FileMode) (Handle, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Mkdir(name string, perm fs.FileMode) error  { return os.Mkdir(name, perm) }
func (osFS) Rename(from, to string) error               { return os.Rename(from, to) }
func (osFS) Link(from, to string) error                 { return os.Link(from, to) }
func (osFS) Remove(name string) error                   { return os.Remove(name) }
func (osFS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }

func (osFS) SyncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func (f osFile) Punch(off, n int64) error {
	if n <= 0 {
		return nil
	}
	err := retry(func() error {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	})
	if err != nil {
		return &fs.PathError{Op: "punch hole", Path: f.Name(), Err: err}
	}
	return nil
}

func (f osFile) CopyFrom(from Handle, off, n int64) error {
	for n > 0 {
		r, w := off, off
		var done int
		err := retry(func() (err error) {
			done, err = unix.CopyFileRange(int(from.Fd()), &r, int(f.Fd()), &w, int(min(n, 1<<30)), 0)
			return err
		})
		if err == nil && done == 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return &fs.PathError{Op: "copy range", Path: f.Name(), Err: err}
		}
		off, n = off+int64(done), n-int64(done)
	}
	return nil
}

func (f osFile) Datasync() error {
	if err := retry(func() error { return unix.Fdatasync(int(f.Fd())) }); err != nil {
		return &fs.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return nil
}

func (f osFile) Writeout(off, n int64) error {
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if err := retry(func() error { return unix.SyncFileRange(int(f.Fd()), off, n, all) }); err != nil {
		return &fs.PathError{Op: "sync_file_range", Path: f.Name(), Err: err}
	}
	return nil
}

func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// NextData is the first range of data at or after off, cut at size; off == size when there is none.
func NextData(fd int, off, size int64) (from, to int64, err error) {
	if off >= size {
		return size, size, nil
	}
	from, err = unix.Seek(fd, off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return size, size, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("SEEK_DATA at %d: %w", off, err)
	}
	if from >= size {
		return size, size, nil
	}
	to, err = unix.Seek(fd, from, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, fmt.Errorf("SEEK_HOLE at %d: %w", from, err)
	}
	return from, min(to, size), nil
}

// RemoveAll removes name and what is below it; nothing of that name is no error.
func RemoveAll(fsys FS, name string) error {
	err := fsys.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	entries, derr := fsys.ReadDir(name)
	if derr != nil {
		if errors.Is(derr, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	for _, e := range entries {
		if err := RemoveAll(fsys, name+"/"+e.Name()); err != nil {
			return err
		}
	}
	if err := fsys.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
