package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Disk is one folder of a node with layers, replicas and images.
type Disk struct {
	*layer.Store
	lifetime func() (diskfs.Lifetime, error) // of the disk's file system
	window   int64                           // mergeWindow, but in tests
	piece    int                             // mapPiece, but in tests

	open       openReplicas
	references references
	reserve    reserve
	scratch    scratch
}

var _ block.DigestLayers = (*Disk)(nil)

type diskRecord struct {
	UID string `json:"uid"`
}

const (
	diskFile   = "drover-disk.json"
	formatDisk = "drover-disk"
	replicaDir = "replicas"
	imagesDir  = "images"
	trashDir   = "trash"
)

// Add makes the folder at path a disk of Drover, or opens an existing disk. The file system must pass the probe.
func Add(ctx context.Context, path string) (*Disk, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	if err := Probe(ctx, path); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	if err := initDisk(file.OS, path); err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, diskfs.Classify(err))
	}
	return Open(path)
}

// initDisk writes drover-disk.json, the commit point of a new disk, unless it is there.
func initDisk(fsys file.FS, path string) error {
	h, err := fsys.Open(filepath.Join(path, layer.LockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := diskfs.Flock(h, unix.LOCK_EX); err != nil {
		return err
	}
	var rec diskRecord
	err = format.ReadMeta(fsys, filepath.Join(path, diskFile), formatDisk, &rec)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, dir := range []string{layer.Dir, replicaDir, imagesDir, trashDir} {
		name := filepath.Join(path, dir)
		if err := fsys.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if entries, err := fsys.ReadDir(name); err != nil {
			return err
		} else if len(entries) > 0 {
			return api.Errorf(api.Corrupt, "%s is missing, but %s is not empty: this was a disk of Drover; bring %s back, "+
				"or empty the folder to start again", diskFile, dir, diskFile)
		}
	}
	if err := diskfs.WriteHoles(fsys, path); err != nil {
		return err
	}
	if err := diskfs.CheckHoles(fsys, path); err != nil {
		return err
	}
	return format.WriteMeta(fsys, filepath.Join(path, diskFile), formatDisk, diskRecord{string(api.NewUID())})
}

// Open opens an existing disk.
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
	err := diskfs.CheckHoles(fsys, path)
	if errors.Is(err, fs.ErrNotExist) {
		err = addHoles(fsys, path)
	}
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	}
	d := &Disk{window: mergeWindow, piece: mapPiece}
	d.lifetime = func() (diskfs.Lifetime, error) { return diskfs.CurrentLifetime(path) }
	direct := unix.O_DIRECT
	h, err := fsys.Open(filepath.Join(path, diskFile), os.O_RDONLY|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) {
		direct = 0
	} else if err != nil {
		return nil, fmt.Errorf("disk %s: %w", path, err)
	} else {
		h.Close()
	}
	d.Store = layer.NewStore(fsys, path, rec.UID, direct, records{d}, &d.open)
	return d, nil
}

// addHoles makes the holes file of a disk of an earlier version. A full or read-only disk does without, and a later
// open tries again; so does a disk that another process has locked.
func addHoles(fsys file.FS, path string) error {
	h, err := fsys.Open(filepath.Join(path, layer.LockFile), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // unmounted meanwhile
	}
	if err == nil {
		defer h.Close()
		if diskfs.TryLock(h, unix.LOCK_EX) != nil {
			return nil
		}
		err = diskfs.WriteHoles(fsys, path)
	}
	if diskfs.NoRoom(err) || errors.Is(err, unix.EROFS) {
		return nil
	}
	return err
}

// Close waits for removals in the background. Replicas and layers stay open.
func (d *Disk) Close() error {
	d.Wait()
	return nil
}
