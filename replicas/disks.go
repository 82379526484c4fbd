package replicas

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
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/stack"
)

// Disks are the open disks of this machine, by path and by uid.
type Disks struct {
	mu    sync.Mutex
	paths map[string]*stack.Disk
	uids  map[api.UID]*stack.Disk
	// instance is whose disks these are; uses are the open files that say so to others, by path.
	instance string
	fetch    stack.FetchFunc // reads layers of other nodes; nil: none are read
	uses     map[string]*os.File
	turns    map[string]*sync.Mutex // who opens a path; held over its I/O, which can hang for as long as the disk does
	// onDamage, if set, is told what a read found of a layer. Before any disk is open.
	onDamage func(disk *stack.Disk, layer string)

	once   sync.Once
	looked chan struct{} // closed when the disks were looked at for the first time
}

var errOtherDisk = errors.New("another disk is there")

// firstLook is how long Layers waits for that. Before it a disk is not missing, only not open yet.
const firstLook = 10 * time.Second

func newDisks(instance string) *Disks {
	return &Disks{paths: map[string]*stack.Disk{}, uids: map[api.UID]*stack.Disk{}, instance: instance,
		uses: map[string]*os.File{}, turns: map[string]*sync.Mutex{}, looked: make(chan struct{})}
}

// Layers is the disk of a uid for those who move images.
func (d *Disks) Layers(uid api.UID) (block.Layers, error) {
	disk, err := d.get(uid)
	if err != nil {
		late := time.NewTimer(firstLook)
		defer late.Stop()
		select {
		case <-d.looked:
		case <-late.C:
		}
		disk, err = d.get(uid)
	}
	if err != nil {
		return nil, err
	}
	return disk, nil
}

func (d *Disks) get(uid api.UID) (*stack.Disk, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if disk := d.uids[uid]; disk != nil {
		return disk, nil
	}
	return nil, api.Errorf(api.Unavailable, "disk %s is not there: is its file system mounted?", uid)
}

// open opens the disk at path, or looks at it again. One that was known under a uid must still have it: where a file
// system is not mounted, a new disk must not be made in the folder below. A disk never seen is made if add is set, in a
// folder that is there: one that is not may be a slip, or on a file system that is not mounted.
func (d *Disks) open(ctx context.Context, path string, known api.UID, add bool) (*stack.Disk, error) {
	turn := d.turn(path)
	turn.Lock()
	defer turn.Unlock()
	now, err := stack.Open(path)
	if api.Is(err, api.NotFound) && known == "" && add {
		if _, serr := os.Stat(path); errors.Is(serr, fs.ErrNotExist) {
			return nil, api.Errorf(api.NotFound, "folder %s does not exist: mount its file system, or make it", path)
		}
		if on, berr := device.Below(path); berr == nil && on != "" {
			return nil, api.Errorf(api.Invalid, "%s is on %s, a Drover volume: choose a folder on a disk of the machine",
				path, on)
		}
		now, err = stack.Add(ctx, path)
	}
	if err == nil && known != "" && api.UID(now.UID()) != known {
		err = api.Errorf(api.Unavailable, "disk %s: %w, %s instead of %s", path, errOtherDisk, now.UID(), known)
	}
	d.mu.Lock()
	was := d.paths[path]
	if same := err == nil && was != nil && was.UID() == now.UID(); !same {
		d.forget(path)
		was = nil
	}
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if was != nil {
		return was, now.Close()
	}
	use, err := takeUse(ctx, path, d.instance)
	if err != nil {
		return nil, errors.Join(err, now.Close())
	}
	now.Borrow(func() []*stack.Disk { return d.except(now) })
	if d.fetch != nil {
		now.Fetch(d.fetch)
		now.DropHydrating()
	}
	if d.onDamage != nil {
		now.OnDamage(func(layer string) { d.onDamage(now, layer) })
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.uses[path] = use
	d.paths[path], d.uids[api.UID(now.UID())] = now, now
	return now, nil
}

// turn is the lock of those who open a path: one disk that hangs keeps nobody from the others.
func (d *Disks) turn(path string) *sync.Mutex {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.turns[path]
	if t == nil {
		t = &sync.Mutex{}
		d.turns[path] = t
	}
	return t
}

// except are the open disks but one, in the order of their paths.
func (d *Disks) except(not *stack.Disk) (list []*stack.Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(d.paths)) {
		if disk := d.paths[path]; disk != not {
			list = append(list, disk)
		}
	}
	return list
}

// keep forgets the disks at other paths: the first look at all of them is over.
func (d *Disks) keep(paths map[string]bool) {
	d.once.Do(func() { close(d.looked) })
	d.mu.Lock()
	defer d.mu.Unlock()
	for path := range d.paths {
		if !paths[path] {
			d.forget(path)
		}
	}
}

// only forgets the other paths that a disk was open at.
func (d *Disks) only(disk *stack.Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for path, o := range d.paths {
		if o != disk && o.UID() == disk.UID() {
			d.forget(path)
		}
	}
}

// forget drops what is known of a path. The caller has the lock.
func (d *Disks) forget(path string) {
	if disk := d.paths[path]; disk != nil {
		delete(d.paths, path)
		if d.uids[api.UID(disk.UID())] == disk { // else it is mounted at another path by now
			delete(d.uids, api.UID(disk.UID()))
		}
	}
	if use := d.uses[path]; use != nil {
		_ = use.Close()
		delete(d.uses, path)
	}
}

// Close waits for what the disks do in the background.
func (d *Disks) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for path, disk := range d.paths {
		errs = append(errs, disk.Close())
		if use := d.uses[path]; use != nil {
			errs = append(errs, use.Close())
			delete(d.uses, path)
		}
	}
	return errors.Join(errs...)
}
