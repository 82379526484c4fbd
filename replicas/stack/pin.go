package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// A pin names layers of this disk for somebody elsewhere who still reads them: a replica on another disk, until it has
// copies of its own, or a copy that is being made. As long as it is there nobody collects or merges the layers,
// whatever becomes of the replica that they were found in.

const (
	pinsDir   = "pins"
	pinFile   = "pin.json"
	formatPin = "drover-pin"
)

// Pin is pins/<uid>/pin.json.
type Pin struct {
	UID     string    `json:"uid"`             // of who needs the layers; for a replica its own
	For     string    `json:"for"`             // the name of its volume, for people
	Disk    string    `json:"disk"`            // that it is on
	Layers  []string  `json:"layers"`          // bottom first
	Image   bool      `json:"image,omitempty"` // the uid is that of an image in the making
	Created time.Time `json:"created"`
}

// Pin pins the layers of a snapshot in a replica of this disk; an empty snapshot: all of the replica's. A pin of that
// uid that is there already is returned as it is, whatever became of the replica since.
func (d *Disk) Pin(ctx context.Context, p Pin, replica, snapshot string) (_ Pin, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pin layers of replica %s on disk %s: %w", replica, d.root, classify(err))
		}
	}()
	if err := errors.Join(api.UID(p.UID).Validate(), ctx.Err()); err != nil {
		return p, err
	}
	unlock, err := d.lock()
	if err != nil {
		return p, err
	}
	defer unlock()
	if have, err := d.pin(p.UID); !errors.Is(err, fs.ErrNotExist) {
		return have, err
	}
	m, err := d.readStack(replica)
	if errors.Is(err, fs.ErrNotExist) {
		return p, api.Errorf(api.NotFound, "there is none: %w", err)
	}
	if err != nil {
		return p, err
	}
	if p.Layers = m.all(); snapshot != "" {
		i := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == snapshot })
		if i < 0 {
			return p, api.Errorf(api.NotFound, "it has no snapshot %s", snapshot)
		}
		if p.Layers, err = m.Chain(m.Snapshots[i].Layer); err != nil {
			return p, err
		}
	}
	for _, uid := range p.Layers {
		merging, err := d.beingMerged(uid)
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

// PinLayers pins layers of this disk that something names now: those that are read from here by who is copied.
func (d *Disk) PinLayers(ctx context.Context, p Pin) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pin layers on disk %s: %w", d.root, classify(err))
		}
	}()
	if err := errors.Join(api.UID(p.UID).Validate(), ctx.Err()); err != nil {
		return err
	}
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if have, err := d.pin(p.UID); err == nil && !slices.ContainsFunc(p.Layers, func(l string) bool {
		return !slices.Contains(have.Layers, l)
	}) {
		return nil
	} else if err == nil {
		p.Layers = append(have.Layers, p.Layers...)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	names, err := d.named()
	if err != nil {
		return err
	}
	lacks, err := d.LackingOf(p.Layers)
	if err != nil {
		return err
	}
	for _, uid := range p.Layers {
		merging, err := d.beingMerged(uid)
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
	for _, dir := range []string{d.path(pinsDir), d.path(pinsDir, p.UID)} {
		if err := d.fs.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := d.syncDirs(d.root, d.path(pinsDir)); err != nil {
		return err
	}
	return format.WriteMeta(d.fs, d.path(pinsDir, p.UID, pinFile), formatPin, p)
}

func (d *Disk) pin(uid string) (Pin, error) {
	var p Pin
	if err := format.ReadMeta(d.fs, d.path(pinsDir, uid, pinFile), formatPin, &p); err != nil {
		return p, err
	}
	if p.UID != uid {
		return p, api.Errorf(api.Corrupt, "%s of pin %s is the one of %s", pinFile, uid, p.UID)
	}
	for _, l := range p.Layers {
		if err := api.UID(l).Validate(); err != nil {
			return p, api.Errorf(api.Corrupt, "pin %s: %w", uid, err)
		}
	}
	return p, nil
}

func (d *Disk) pinNaming(uid string) (naming, error) {
	p, err := d.pin(uid)
	return naming{pin: uid, volume: p.For, layers: p.Layers}, err
}

// Pins lists the pins of the disk.
func (d *Disk) Pins() ([]Pin, error) {
	entries, err := d.fs.ReadDir(d.path(pinsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.root, classify(err))
	}
	var list []Pin
	var errs []error
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		p, err := d.pin(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", d.root, classify(err)))
			continue
		}
		list = append(list, p)
	}
	return list, errors.Join(errs...)
}

// Pinned reports whether there may be a pin of that uid.
func (d *Disk) Pinned(uid string) (bool, error) {
	is, err := d.exists(d.path(pinsDir, uid))
	if !is && err == nil {
		var there bool
		if there, err = d.exists(d.path(diskFile)); !there && err == nil {
			err = api.Errorf(api.Unavailable, "the disk is not there")
		}
	}
	if err != nil {
		return false, fmt.Errorf("pin %s on disk %s: %w", uid, d.root, classify(err))
	}
	return is, nil
}

// Unpin lets the layers go that a pin held, and nothing else names. No pin of that uid is fine.
func (d *Disk) Unpin(uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pin %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	d.settleAhead()
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	p, err := d.pin(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return file.RemoveAll(d.fs, d.path(pinsDir, uid))
	}
	if err != nil {
		return err // what it holds is not known
	}
	if err := d.fs.Remove(d.path(pinsDir, uid, pinFile)); err != nil {
		return err
	}
	if err := errors.Join(d.fs.SyncDir(d.path(pinsDir, uid)), file.RemoveAll(d.fs, d.path(pinsDir, uid))); err != nil {
		return err
	}
	return d.dropUnnamed(p.Layers)
}

// Lacking are the layers that a replica names and that are not on this disk.
func (d *Disk) Lacking(replica string) ([]string, error) {
	m, err := d.Stack(replica)
	if err != nil {
		return nil, err
	}
	return d.LackingOf(m.all())
}

// LackingOf are those of some layers that are not on this disk.
func (d *Disk) LackingOf(layers []string) (none []string, err error) {
	for _, uid := range layers {
		here := false
		for _, record := range []string{layerFile, frozenFile, layerFile} { // the last: finished between the two looks
			if here, err = d.exists(d.path(layersDir, uid, record)); here || err != nil {
				break
			}
		}
		if here && err == nil {
			var away bool
			away, err = d.mergedAway(uid)
			here = !away
		}
		if err != nil {
			return nil, fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
		}
		if !here {
			none = append(none, uid)
		}
	}
	return none, nil
}

// Drop removes a layer that nothing names, finished or half-made: its copying was given up. No such layer is fine.
func (d *Disk) Drop(uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	d.settleAhead()
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if busy, err := d.held(d.path(layersDir, uid, dataFile)); err != nil {
		return err
	} else if busy {
		return api.Errorf(api.Busy, "somebody is at it")
	}
	seen := d.look() // after the look who has it: as in collectLayers
	if err := seen.unread(); err != nil {
		return err
	}
	return d.dropLayers([]string{uid}, namedBy(seen.all), seen)
}

// Space is what a replica takes on the disk: its head and all the layers that it names, and of those what something
// else on the disk names too. Layers that are read on another disk are not of this one.
func (d *Disk) Space(replica string) (used, shared int64, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("space of replica %s on disk %s: %w", replica, d.root, classify(err))
		}
	}()
	m, err := d.Stack(replica)
	if err != nil {
		return 0, 0, err
	}
	others, err := d.othersName(m.all(), replica)
	if err != nil {
		return 0, 0, err
	}
	size := func(name string) (int64, error) {
		n, err := d.sizeOnDisk(name)
		if errors.Is(err, fs.ErrNotExist) { // elsewhere, or replaced meanwhile
			return 0, nil
		}
		return n, err
	}
	if used, err = size(d.path(replicaDir, replica, m.Head+dataSuffix)); err != nil {
		return 0, 0, err
	}
	for _, uid := range m.all() {
		n, err := size(d.path(layersDir, uid, dataFile))
		if err != nil {
			return 0, 0, err
		}
		if used += n; others[uid] {
			shared += n
		}
	}
	return used, shared, nil
}
