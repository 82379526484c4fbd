package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
)

// syncFormerWrites makes writes of a former opener durable while a replica is opened. A new process sees the writes
// of a killed one in the page cache, durable or not, and must not build on writes that a loss of power can take back.
func (r *Replica) syncFormerWrites(ctx context.Context) error {
	errs := []error{r.disk.FS.SyncDir(r.dir)} // the name of stack.json
	if !r.meta.Dirty {
		return errors.Join(errs...)
	}
	if r.log.Records > 0 {
		errs = append(errs, r.log.File.Datasync())
	}
	for _, l := range r.layers {
		if _, frozen := l.Map.(*layer.FrozenMap); frozen {
			errs = append(errs, r.disk.SyncFrozen(ctx, l.Rec.UID))
		}
	}
	return errors.Join(errs...)
}

// syncReferences makes the present records of replicas, images and pins durable. A killed process may have written a
// record a moment ago: a loss of power must not bring back an older record that names removed layers. Changes during
// the call are not synced.
func (d *Disk) syncReferences(ctx context.Context) error {
	return d.syncScan(ctx, d.scanReferences())
}

// syncScan makes the records of a scan durable. Unchanged records and folders are not synced a second time.
func (d *Disk) syncScan(ctx context.Context, s *referenceScan) error {
	if s.unlisted != nil {
		return s.unlisted
	}
	d.references.syncedMu.Lock()
	defer d.references.syncedMu.Unlock()
	if d.references.synced == nil {
		d.references.synced = make(map[string]layer.FileID)
	}
	sync := func(dir string) error {
		err := errors.Join(ctx.Err(), d.FS.SyncDir(dir))
		if errors.Is(err, fs.ErrNotExist) {
			return ctx.Err() // removed meanwhile
		}
		return err
	}
	for _, kind := range []string{trashDir, replicaDir, imagesDir, pinsDir} { // where removed records went, and were
		dir := d.Join(kind)
		id, steady, err := d.FileID(dir)
		if kind == pinsDir && errors.Is(err, fs.ErrNotExist) {
			continue // made with the first of them
		}
		if have, is := d.references.synced[dir]; err == nil && is && have == id {
			continue
		}
		delete(d.references.synced, dir)
		if err := sync(dir); err != nil {
			return err
		}
		if err == nil && steady {
			d.references.synced[dir] = id
		}
	}
	for _, k := range s.records {
		if k.lasts {
			continue
		}
		if err := sync(filepath.Dir(k.path)); err != nil {
			return err
		}
		k.lasts = true
	}
	for _, dir := range s.bare {
		if err := sync(dir); err != nil {
			return err
		}
	}
	return nil
}

// syncReferencesEarly syncs the references once before the first call under the disk's lock, so that the lock is held
// for a short time. The call under the lock returns the errors.
func (d *Disk) syncReferencesEarly() {
	d.references.syncedMu.Lock()
	done := d.references.synced != nil
	d.references.syncedMu.Unlock()
	if !done {
		_ = d.syncReferences(context.Background())
	}
}

// SyncRecord makes the record of a replica and the layers durable, because a dead process may have written them a
// moment ago. Callers sync before they report a new or deleted snapshot, or a revert.
func (d *Disk) SyncRecord(replica string, layers ...string) error {
	err := d.FS.SyncDir(d.Join(replicaDir, replica))
	for _, uid := range layers {
		if there, eerr := d.Exists(d.Join(layer.Dir, uid, layer.LayerFile)); eerr == nil && !there {
			err = errors.Join(err, d.SyncFrozen(context.Background(), uid))
		}
	}
	if err != nil {
		return fmt.Errorf("replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
	}
	return nil
}
