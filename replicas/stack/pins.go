package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// A pin names layers of this disk for a reader: a replica elsewhere without copies, or a copy or backup in the making.
// While the pin exists, no process collects or merges the layers, even if the replica that had them is removed.

const (
	pinsDir   = "pins"
	pinFile   = "pin.json"
	formatPin = "drover-pin"
)

// Pin is pins/<uid>/pin.json.
type Pin struct {
	UID      string    `json:"uid"`              // of the reader, for example a replica
	For      string    `json:"for"`              // the name of its volume, for people
	Disk     string    `json:"disk"`             // that it is on
	Layers   []string  `json:"layers"`           // bottom first
	Image    bool      `json:"image,omitempty"`  // the uid belongs to an image in the making
	Backup   bool      `json:"backup,omitempty"` // the uid belongs to a backup in the making
	Created  time.Time `json:"created"`
	Snapshot string    `json:"snapshot,omitempty"` // of a backup
	Cut      time.Time `json:"cut,omitzero"`       // the instant of the snapshot
}

// Pin pins the layers of a snapshot, of the instant p.Cut if set, of a replica on this disk; an empty snapshot: all of
// the replica's layers. Pin returns an existing pin of that uid unchanged.
func (d *Disk) Pin(ctx context.Context, p Pin, replica, snapshot string) (_ Pin, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pin layers of replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
		}
	}()
	if err := errors.Join(api.UID(p.UID).Validate(), ctx.Err()); err != nil {
		return p, err
	}
	unlock, err := d.Lock()
	if err != nil {
		return p, err
	}
	defer unlock()
	if have, err := d.readPin(p.UID); !errors.Is(err, fs.ErrNotExist) {
		return have, err
	}
	m, err := d.readStack(replica)
	if errors.Is(err, fs.ErrNotExist) {
		return p, api.Errorf(api.NotFound, "the replica does not exist: %w", err)
	}
	if err != nil {
		return p, err
	}
	if p.Layers = m.AllLayers(); snapshot != "" {
		i := m.findCut(block.SnapshotCut{UID: snapshot, Created: p.Cut})
		if i < 0 {
			return p, api.Errorf(api.NotFound, "snapshot %s does not exist", snapshot)
		}
		if p.Layers, err = m.Chain(m.Snapshots[i].Layer); err != nil {
			return p, err
		}
	}
	for _, uid := range p.Layers {
		merging, err := d.BeingMerged(uid)
		if err != nil {
			return p, err
		}
		if merging {
			return p, api.Errorf(api.Busy, "layer %s is being merged; try again", uid)
		}
	}
	p.Created = time.Now().UTC().Truncate(time.Second)
	return p, d.writePin(p)
}

// PinLayers pins layers of this disk that have a reference now.
func (d *Disk) PinLayers(ctx context.Context, p Pin) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pin layers on disk %s: %w", d.Root, diskfs.Classify(err))
		}
	}()
	if err := errors.Join(api.UID(p.UID).Validate(), ctx.Err()); err != nil {
		return err
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	if have, err := d.readPin(p.UID); err == nil && !slices.ContainsFunc(p.Layers, func(l string) bool {
		return !slices.Contains(have.Layers, l)
	}) {
		return nil
	} else if err == nil {
		p.Layers = append(have.Layers, p.Layers...)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	names, err := d.referencedLayers()
	if err != nil {
		return err
	}
	lacks, err := d.LackingOf(p.Layers)
	if err != nil {
		return err
	}
	for _, uid := range p.Layers {
		merging, err := d.BeingMerged(uid)
		if err != nil {
			return err
		}
		if merging || !names[uid] || slices.Contains(lacks, uid) {
			return api.Errorf(api.Busy, "layer %s is about to go from there; try again", uid)
		}
	}
	p.Created = time.Now().UTC().Truncate(time.Second)
	return d.writePin(p)
}

func (d *Disk) writePin(p Pin) error {
	for _, dir := range []string{d.Join(pinsDir), d.Join(pinsDir, p.UID)} {
		if err := d.FS.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := d.SyncDirs(d.Root, d.Join(pinsDir)); err != nil {
		return err
	}
	return format.WriteMeta(d.FS, d.Join(pinsDir, p.UID, pinFile), formatPin, p)
}

func (d *Disk) readPin(uid string) (Pin, error) {
	var p Pin
	if err := format.ReadMeta(d.FS, d.Join(pinsDir, uid, pinFile), formatPin, &p); err != nil {
		return p, err
	}
	if p.UID != uid {
		return p, api.Errorf(api.Corrupt, "%s of pin %s is the record of %s", pinFile, uid, p.UID)
	}
	for _, l := range p.Layers {
		if err := api.UID(l).Validate(); err != nil {
			return p, api.Errorf(api.Corrupt, "pin %s: %w", uid, err)
		}
	}
	return p, nil
}

// Pins lists the pins of the disk.
func (d *Disk) Pins() ([]Pin, error) {
	entries, err := d.FS.ReadDir(d.Join(pinsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	var list []Pin
	var errs []error
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		p, err := d.readPin(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err)))
			continue
		}
		list = append(list, p)
	}
	return list, errors.Join(errs...)
}

// Pinned reports whether a pin of that uid may exist.
func (d *Disk) Pinned(uid string) (bool, error) {
	is, err := d.Exists(d.Join(pinsDir, uid))
	if !is && err == nil {
		var there bool
		if there, err = d.Exists(d.Join(diskFile)); !there && err == nil {
			err = api.Errorf(api.Unavailable, "the disk is not there")
		}
	}
	if err != nil {
		return false, fmt.Errorf("pin %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
	}
	return is, nil
}

// Unpin removes a pin and its layers without another reference. No pin of that uid is no error.
func (d *Disk) Unpin(uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pin %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	d.syncReferencesEarly()
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	p, err := d.readPin(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return file.RemoveAll(d.FS, d.Join(pinsDir, uid))
	}
	if err != nil {
		return err // the layers of the pin are unknown
	}
	if err := d.FS.Remove(d.Join(pinsDir, uid, pinFile)); err != nil {
		return err
	}
	if err := errors.Join(d.FS.SyncDir(d.Join(pinsDir, uid)), file.RemoveAll(d.FS, d.Join(pinsDir, uid))); err != nil {
		return err
	}
	return d.dropUnnamed(p.Layers)
}

// Lacking returns the layers of a replica that are not on this disk.
func (d *Disk) Lacking(replica string) ([]string, error) {
	m, err := d.Stack(replica)
	if err != nil {
		return nil, err
	}
	return d.LackingOf(m.AllLayers())
}

// Drop removes a layer without a reference, finished or half made, after the end of its copy. No such layer is no
// error.
func (d *Disk) Drop(uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	d.syncReferencesEarly()
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	if busy, err := d.Locked(d.Join(layer.Dir, uid, layer.DataFile)); err != nil {
		return err
	} else if busy {
		return api.Errorf(api.Busy, "another process works on the layer")
	}
	seen := d.scanReferences() // after the lock, as in collectLayers
	if err := seen.unreadableError(); err != nil {
		return err
	}
	return d.dropLayers([]string{uid}, namedBy(seen.all), seen)
}

// Space returns the room that a replica takes on the disk, its head and all its layers, and the part of layers with
// other references. Layers on other disks do not count.
func (d *Disk) Space(replica string) (used, shared int64, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("space of replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
		}
	}()
	m, err := d.Stack(replica)
	if err != nil {
		return 0, 0, err
	}
	others, err := d.referencedByOthers(m.AllLayers(), replica)
	if err != nil {
		return 0, 0, err
	}
	size := func(name string) (int64, error) {
		n, err := d.SizeOnDisk(name)
		if errors.Is(err, fs.ErrNotExist) { // elsewhere, or replaced meanwhile
			return 0, nil
		}
		return n, err
	}
	if used, err = size(d.Join(replicaDir, replica, m.Head+dataSuffix)); err != nil {
		return 0, 0, err
	}
	for _, uid := range m.AllLayers() {
		n, err := size(d.Join(layer.Dir, uid, layer.DataFile))
		if err != nil {
			return 0, 0, err
		}
		if used += n; others[uid] {
			shared += n
		}
	}
	return used, shared, nil
}
