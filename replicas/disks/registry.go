package disks

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// RegistryOptions say how a Registry opens disks.
type RegistryOptions struct {
	// Instance tells this Drover from others on the machine, in words; the Registry locks every disk for the instance.
	// Empty: the Registry takes no locks.
	Instance string
	// VolumeBelow returns the device path if a folder is on a Drover volume, where no disk may be. Nil: not checked.
	VolumeBelow func(path string) (string, error)
	// Beside lists the other disks of the machine, which may have layers that a disk lacks, and Fetch reads such layers
	// from their sources, for a disk that lacks them. Nil: layers that a disk lacks are looked at on the other open disks,
	// and nothing of them is kept.
	Beside func(disk *stack.Disk) []*stack.Disk
	Fetch  func(ctx context.Context, disk *stack.Disk, l stack.RemoteLayer, off int64, buf []byte,
		check func([]byte) error) error
	OnDamage func(disk *stack.Disk, layer string) // is called when a read finds damage in a layer; nil: not called
}

// Registry holds the open disks of this machine, by path and by UID.
type Registry struct {
	RegistryOptions
	mu    sync.Mutex
	paths map[string]*stack.Disk
	uids  map[api.UID]*stack.Disk
	locks map[string]*os.File    // by path; an open file holds the lock of the instance
	opens map[string]*sync.Mutex // by path; held over the I/O of an open, which hangs for as long as the disk does

	once   sync.Once
	probed chan struct{} // closed after the first probe of all disks
}

var errOtherDisk = errors.New("the folder holds another disk")

// firstProbe bounds how long Layers waits for the first probe. Before that probe a disk may exist and not be open yet.
const firstProbe = 10 * time.Second

// NewRegistry makes a Registry without open disks.
func NewRegistry(o RegistryOptions) *Registry {
	return &Registry{RegistryOptions: o, paths: map[string]*stack.Disk{}, uids: map[api.UID]*stack.Disk{},
		locks: map[string]*os.File{}, opens: map[string]*sync.Mutex{}, probed: make(chan struct{})}
}

// Layers returns the layers of a disk for the import and the copy of images.
func (r *Registry) Layers(uid api.UID) (block.Layers, error) {
	disk, err := r.Get(uid)
	if err != nil {
		late := time.NewTimer(firstProbe)
		defer late.Stop()
		select {
		case <-r.probed:
		case <-late.C:
		}
		disk, err = r.Get(uid)
	}
	if err != nil {
		return nil, err
	}
	return disk, nil
}

// Get returns the open disk with a UID.
func (r *Registry) Get(uid api.UID) (*stack.Disk, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if disk := r.uids[uid]; disk != nil {
		return disk, nil
	}
	return nil, api.Errorf(api.Unavailable, "disk %s is not there: is its file system mounted?", uid)
}

// Open opens the disk at path; for an open disk, Open checks that the path still holds the disk. A disk with a known
// UID must have that UID, because the mount point of a missing file system is an empty folder, and a new disk there
// would hide the loss. With add set, Open adds an unknown disk, but creates no folder: a missing folder is a typing
// error or belongs to a file system that is not mounted.
func (r *Registry) Open(ctx context.Context, path string, known api.UID, add bool) (*stack.Disk, error) {
	opening := r.openLock(path)
	opening.Lock()
	defer opening.Unlock()
	now, err := stack.Open(path)
	if api.Is(err, api.NotFound) && known == "" && add {
		if _, serr := os.Stat(path); errors.Is(serr, fs.ErrNotExist) {
			return nil, api.Errorf(api.NotFound, "folder %s does not exist: mount its file system, or make it", path)
		}
		if on := r.volumeBelow(path); on != "" {
			return nil, api.Errorf(api.Invalid, "%s is on %s, a Drover volume: choose a folder on a disk of the machine",
				path, on)
		}
		now, err = stack.Add(ctx, path)
	}
	if err == nil && known != "" && api.UID(now.UID()) != known {
		err = api.Errorf(api.Unavailable, "disk %s: %w, %s instead of %s", path, errOtherDisk, now.UID(), known)
	}
	r.mu.Lock()
	was := r.paths[path]
	if same := err == nil && was != nil && was.UID() == now.UID(); !same {
		r.forget(path)
		was = nil
	}
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if was != nil {
		return was, now.Close()
	}
	lock, err := lockDisk(ctx, path, r.Instance)
	if err != nil {
		return nil, errors.Join(err, now.Close())
	}
	if r.Fetch != nil {
		now.Sources(func() []*stack.Disk { return r.Beside(now) },
			func(ctx context.Context, l stack.RemoteLayer, off int64, buf []byte, check func([]byte) error) error {
				return r.Fetch(ctx, now, l, off, buf, check)
			})
		now.DropHydrating()
	} else {
		now.Sources(func() []*stack.Disk { return r.Except(now) }, nil)
	}
	if r.OnDamage != nil {
		now.OnDamage(func(layer string) { r.OnDamage(now, layer) })
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.locks[path] = lock
	r.paths[path], r.uids[api.UID(now.UID())] = now, now
	return now, nil
}

// volumeBelow returns the device path of the Drover volume that a folder is on, or "".
func (r *Registry) volumeBelow(path string) string {
	if r.VolumeBelow == nil {
		return ""
	}
	on, err := r.VolumeBelow(path)
	if err != nil {
		return ""
	}
	return on
}

// openLock returns the lock that serialises opens of a path. Each path has a lock, so that a disk that hangs does not
// delay the others.
func (r *Registry) openLock(path string) *sync.Mutex {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.opens[path]
	if t == nil {
		t = &sync.Mutex{}
		r.opens[path] = t
	}
	return t
}

// Except lists the open disks without one, in the order of their paths.
func (r *Registry) Except(not *stack.Disk) (list []*stack.Disk) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(r.paths)) {
		if disk := r.paths[path]; disk != not {
			list = append(list, disk)
		}
	}
	return list
}

// keepOnly forgets the disks at other paths, and ends the wait for the first probe.
func (r *Registry) keepOnly(paths map[string]bool) {
	r.once.Do(func() { close(r.probed) })
	r.mu.Lock()
	defer r.mu.Unlock()
	for path := range r.paths {
		if !paths[path] {
			r.forget(path)
		}
	}
}

// ForgetOtherPaths forgets every path of a disk but the current one.
func (r *Registry) ForgetOtherPaths(disk *stack.Disk) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for path, o := range r.paths {
		if o != disk && o.UID() == disk.UID() {
			r.forget(path)
		}
	}
}

// forget forgets a path and gives its lock file back. The caller holds r.mu.
func (r *Registry) forget(path string) {
	if disk := r.paths[path]; disk != nil {
		delete(r.paths, path)
		if r.uids[api.UID(disk.UID())] == disk { // else the disk is open at another path
			delete(r.uids, api.UID(disk.UID()))
		}
	}
	if lock := r.locks[path]; lock != nil {
		_ = lock.Close()
		delete(r.locks, path)
	}
}

// Close waits for the background work of all disks and gives their lock files back.
func (r *Registry) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for path, disk := range r.paths {
		errs = append(errs, disk.Close())
		if lock := r.locks[path]; lock != nil {
			errs = append(errs, lock.Close())
			delete(r.locks, path)
		}
	}
	return errors.Join(errs...)
}
