// Package stack owns what is on a disk: layers, the heads of replicas on top of them, and the records of images. It is
// the only writer of the formats that docs/formats.md describes.
//
// Invariants: a finished layer is never written again and its uid means one content for ever. A replica's stack.json
// and an image's image.json name layers; what they do not name is garbage, and is collected only while every one of
// them can be read. Naming and collecting take the disk's lock, a flock, so several processes can work on one disk.
// A replica has one opener, and a new opener waits for the disk I/O of a dead one.
//
// The data path of a Replica belongs to the thread of its loop; what blocks runs in the replica's worker goroutine,
// which Close ends and waits for. A Disk's background removals are awaited by Disk.Close.
package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Disk is one folder of a node that holds layers, replicas and images.
type Disk struct {
	root     string
	uid      string
	fs       file.FS
	direct   int                      // O_DIRECT where the file system has it
	lifetime func() (lifetime, error) // of the disk's file system
	others   func() []*Disk           // the machine's other disks, for layers that are not here yet
	fetch    FetchFunc                // reads layers from sources; nil: none are read
	reading  chan struct{}            // reads of layers for other disks
	window   int64                    // mergeWindow, but in tests
	piece    int                      // mapPiece, but in tests
	early    int64                    // syncEvery, but in tests

	openMu   sync.Mutex
	open     map[*Replica]bool // by this Disk
	onDamage atomic.Pointer[func(layer string)]

	hopelessMu sync.Mutex
	hopeless   map[chunkOf]bool // damaged, and nobody has what was there

	names      namings
	reserve    reserve
	thirst     thirst
	scratch    scratch
	background sync.WaitGroup
}

var _ block.Layers = (*Disk)(nil)

type diskRecord struct {
	UID string `json:"uid"`
}

const (
	diskFile   = "drover-disk.json"
	formatDisk = "drover-disk"
	lockFile   = "lock"
	layersDir  = "layers"
	replicaDir = "replicas"
	imagesDir  = "images"
	trashDir   = "trash"
)

// Add makes the folder at path a disk of Drover, or opens it if it is one already. The file system below must pass the
// probe.
func Add(ctx context.Context, path string) (*Disk, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	if err := Probe(ctx, path); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	if err := initDisk(file.OS, path); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, classify(err))
	}
	return Open(path)
}

// initDisk writes drover-disk.json, the commit point of a new disk, unless it is there.
func initDisk(fsys file.FS, path string) error {
	h, err := fsys.Open(filepath.Join(path, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := flock(h, unix.LOCK_EX); err != nil {
		return err
	}
	var rec diskRecord
	err = format.ReadMeta(fsys, filepath.Join(path, diskFile), formatDisk, &rec)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, dir := range []string{layersDir, replicaDir, imagesDir, trashDir} {
		name := filepath.Join(path, dir)
		if err := fsys.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if entries, err := fsys.ReadDir(name); err != nil {
			return err
		} else if len(entries) > 0 {
			return api.Errorf(api.Corrupt, "%s is missing, but %s is not empty: this was a disk of Drover; bring %s back, "+
				"or empty the folder to start anew", diskFile, dir, diskFile)
		}
	}
	return format.WriteMeta(fsys, filepath.Join(path, diskFile), formatDisk, diskRecord{string(api.NewUID())})
}

// Open opens a disk that Add has made.
func Open(path string) (*Disk, error) { return openOn(file.OS, path) }

func openOn(fsys file.FS, path string) (*Disk, error) {
	var rec diskRecord
	if err := format.ReadMeta(fsys, filepath.Join(path, diskFile), formatDisk, &rec); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, api.Errorf(api.NotFound, "disk %s: it is not a disk of Drover, or is not mounted: %w", path, err)
		}
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	if err := api.UID(rec.UID).Validate(); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	d := &Disk{root: path, uid: rec.UID, fs: fsys, direct: unix.O_DIRECT, window: mergeWindow,
		piece: mapPiece, early: syncEvery, others: noDisks, reading: make(chan struct{}, readsAtOnce)}
	d.lifetime = func() (lifetime, error) { return currentLifetime(path) }
	h, err := fsys.Open(filepath.Join(path, diskFile), os.O_RDONLY|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) {
		d.direct = 0
	} else if err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	} else {
		h.Close()
	}
	return d, nil
}

// UID implements block.Layers.
func (d *Disk) UID() string { return d.uid }

// Path is the disk's folder.
func (d *Disk) Path() string { return d.root }

// Close waits for the removals that go on in the background. Replicas and layers stay open.
func (d *Disk) Close() error {
	d.background.Wait()
	return nil
}

// Statfs is the room on the disk's file system, in bytes, and the file system's type.
func (d *Disk) Statfs() (capacity, available int64, fsType string, err error) {
	var st unix.Statfs_t
	if err := retryEINTR(func() error { return unix.Statfs(d.root, &st) }); err != nil {
		return 0, 0, "", fmt.Errorf("disk %s: statfs: %w", d.root, err)
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, fsName(st.Type), nil
}

func fsName(magic int64) string {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	case 0x2fc12fc1:
		return "zfs"
	}
	return fmt.Sprintf("0x%x", magic)
}

func (d *Disk) path(elem ...string) string {
	return filepath.Join(append([]string{d.root}, elem...)...)
}

// lock is held while layers are named or collected, across processes.
func (d *Disk) lock() (unlock func(), err error) {
	h, err := d.fs.Open(d.path(lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(h, unix.LOCK_EX); err != nil {
		h.Close()
		return nil, err
	}
	return func() { h.Close() }, nil
}

func flock(h file.Handle, how int) error {
	err := retryEINTR(func() error { return unix.Flock(int(h.Fd()), how) })
	if err != nil {
		return fmt.Errorf("flock: %w", err)
	}
	return nil
}

func retryEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// classify gives the kernel's errors the kind that callers decide by.
func classify(err error) error {
	var e *api.Error
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return api.Errorf(api.Full, "no room on the disk: %w", err)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EIO):
		return api.Errorf(api.Unavailable, "the disk does not work: %w", err)
	}
	return err
}

// discard removes a folder that was renamed into the trash, in the background. What a crash leaves, Collect removes.
func (d *Disk) discard(names []string) {
	if len(names) == 0 {
		return
	}
	d.background.Go(func() {
		for _, name := range names {
			if err := d.emptyTrash(name); err != nil {
				slog.Warn("trash is not removed yet; the next collection tries again", "disk", d.root, "name", name,
					"error", err)
			}
		}
	})
}
