package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
)

// Names on a disk.
const (
	Dir      = "layers"
	LockFile = "lock"
)

// Store holds the layers of one disk: finished and frozen layers in layers/, hydrated layers in hydrating/.
type Store struct {
	Root     string
	uid      string
	FS       file.FS
	Direct   int // O_DIRECT where the file system has it
	records  Records
	Observer Observer

	others  func() []*Store // the machine's other disks, sources of layers
	fetch   FetchFunc       // reads layers from sources; nil: no hydration
	reading chan struct{}   // reads of layers for other disks
	Early   int64           // syncEvery, but in tests

	hopelessMu sync.Mutex
	hopeless   map[ChunkOf]bool // damaged chunks that no member can repair

	hydrations hydrations
	background sync.WaitGroup
}

// Records answers questions about the records of the disk that name layers.
type Records interface {
	// Named returns the layers that any record names, and fails while a record is unreadable.
	Named() (map[string]bool, error)
	// IsNamed reports whether any record names the layer, and fails if only an unreadable record may.
	IsNamed(uid string) (bool, error)
	// SyncRecords makes the present records durable.
	SyncRecords(ctx context.Context) error
	// MergeIn returns the merge in progress in a replica; nil: no merge. The error for a missing replica wraps
	// fs.ErrNotExist.
	MergeIn(replica string) (*Merge, error)
}

// Observer is notified of changes of a layer that replicas may have open.
type Observer interface {
	// Finished: the layer has its map and its digests now.
	Finished(uid string) error
	// Damaged: list is the known damage of the layer now.
	Damaged(uid string, list []Damage)
	// Hopeless: no replica has the content of a damaged chunk of the layer.
	Hopeless(uid string)
}

// NewStore opens the layers of the disk at path. direct is O_DIRECT if the file system has direct I/O, else 0. The
// store calls records and observer only later.
func NewStore(fsys file.FS, path, uid string, direct int, r Records, o Observer) *Store {
	return &Store{Root: path, uid: uid, FS: fsys, Direct: direct, Early: syncEvery, others: noDisks,
		reading: make(chan struct{}, readsAtOnce), records: r, Observer: o}
}

// Go runs fn in a goroutine that Wait waits for.
func (d *Store) Go(fn func()) { d.background.Go(fn) }

// Wait waits for all functions in the background.
func (d *Store) Wait() { d.background.Wait() }

// SyncDirs makes the names in several folders durable.
func (d *Store) SyncDirs(names ...string) error {
	fns := make([]func() error, len(names))
	for i, name := range names {
		fns[i] = func() error { return d.FS.SyncDir(name) }
	}
	return diskfs.AtOnce(fns...)
}

// UID implements block.Layers.
func (d *Store) UID() string { return d.uid }

// Path is the disk's folder.
func (d *Store) Path() string { return d.Root }

// Statfs is the room on the disk's file system, in bytes, and the file system's type.
func (d *Store) Statfs() (capacity, available int64, fsType string, err error) {
	var st unix.Statfs_t
	if err := diskfs.RetryEINTR(func() error { return unix.Statfs(d.Root, &st) }); err != nil {
		return 0, 0, "", fmt.Errorf("disk %s: statfs: %w", d.Root, err)
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, diskfs.FSName(st.Type), nil
}

// Join is the path of a file of the disk.
func (d *Store) Join(elem ...string) string {
	return filepath.Join(append([]string{d.Root}, elem...)...)
}

// Lock takes the disk's lock, which processes hold while they name or collect layers. If the file system of the disk
// was unmounted, Lock fails, and makes no file in the mount point.
func (d *Store) Lock() (unlock func(), err error) {
	h, err := d.FS.Open(d.Join(LockFile), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if mounted, merr := d.Exists(d.Join(Dir)); mounted && merr == nil {
			h, err = d.FS.Open(d.Join(LockFile), os.O_RDWR|os.O_CREATE, 0o600)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := diskfs.Flock(h, unix.LOCK_EX); err != nil {
		h.Close()
		return nil, err
	}
	return func() { h.Close() }, nil
}

// Locked reports whether a process has a flock on the file, other than a process between fork and exec.
func (d *Store) Locked(name string) (bool, error) { return d.lockedBy(name, diskfs.TryLock) }

// LockedNow is Locked without a wait: it may report the lock of a process between fork and exec.
func (d *Store) LockedNow(name string) (bool, error) {
	return d.lockedBy(name, func(h file.Handle, how int) error { return diskfs.Flock(h, how|unix.LOCK_NB) })
}

func (d *Store) lockedBy(name string, try func(file.Handle, int) error) (bool, error) {
	h, err := d.FS.Open(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer h.Close()
	err = try(h, unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

// Exists reports whether a file or folder exists.
func (d *Store) Exists(name string) (bool, error) {
	h, err := d.FS.Open(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, h.Close()
}

// FileID tells a file from its predecessors of the same name. Records are replaced, never changed in place.
type FileID struct {
	dev, ino     uint64
	size         int64
	mtime, ctime int64
}

// SteadyAge is the age from which the times of a file tell the file from its successor.
const SteadyAge = 2 * time.Second

// FileID returns the identity of a file; steady reports whether the identity tells the file from its successor.
func (d *Store) FileID(name string) (id FileID, steady bool, err error) {
	return d.FileIDAt(unix.AT_FDCWD, name)
}

// FileIDAt is FileID of a name in the open folder at.
func (d *Store) FileIDAt(at int, name string) (id FileID, steady bool, err error) {
	if d.FS == file.OS { // without an open file: callers ask for every record on the disk
		var st unix.Stat_t
		if err := diskfs.RetryEINTR(func() error { return unix.Fstatat(at, name, &st, 0) }); err != nil {
			return id, false, err
		}
		id = FileID{st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
	} else {
		h, err := d.FS.Open(name, os.O_RDONLY, 0)
		if err != nil {
			return id, false, err
		}
		defer h.Close()
		info, err := h.Stat()
		if err != nil {
			return id, false, err
		}
		st, is := info.Sys().(*syscall.Stat_t)
		if !is {
			return id, false, nil
		}
		id = FileID{st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
	}
	return id, time.Since(time.Unix(0, id.ctime)) > SteadyAge, nil
}

// OpenFolder opens a folder for FileIDAt of many names, which then resolves the path of the folder only once. If the
// folder cannot be opened, at is AT_FDCWD.
func (d *Store) OpenFolder(dir string) (at int, closeIt func()) {
	if d.FS == file.OS {
		if at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			return at, func() { _ = unix.Close(at) }
		}
	}
	return unix.AT_FDCWD, func() {}
}
