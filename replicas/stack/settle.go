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

// What a process that was killed had written is seen by the next one, durable or not: the page cache outlives it.
// Before anything is built on that, it is made durable: else a loss of power takes away what was answered for since.

// settle does so for a replica that is being opened.
func (r *Replica) settle(ctx context.Context) error {
	errs := []error{r.disk.FS.SyncDir(r.dir)} // the name of stack.json
	if !r.meta.Dirty {
		return errors.Join(errs...)
	}
	if r.log.Records > 0 {
		errs = append(errs, r.log.File.Datasync())
	}
	for _, l := range r.layers {
		if _, frozen := l.Map.(*layer.FrozenMap); frozen {
			errs = append(errs, r.disk.SettleFrozen(ctx, l.Rec.UID))
		}
	}
	return errors.Join(errs...)
}

// settleNames makes durable what replicas, images and pins name now, and that they name nothing else. A process that
// was killed may have recorded it a moment ago: a loss of power must not bring a record back that names what was
// removed since. What changes meanwhile is not settled.
func (d *Disk) settleNames(ctx context.Context) error { return d.settleSight(ctx, d.look()) }

// settleSight does so for what a look found. What was durable then is not synced again: a record that is the same file
// is, and so is a folder of records that is as it was before it was synced last.
func (d *Disk) settleSight(ctx context.Context, s *sight) error {
	if s.unlisted != nil {
		return s.unlisted
	}
	d.names.settledMu.Lock()
	defer d.names.settledMu.Unlock()
	if d.names.settled == nil {
		d.names.settled = make(map[string]layer.FileID)
	}
	sync := func(dir string) error {
		err := errors.Join(ctx.Err(), d.FS.SyncDir(dir))
		if errors.Is(err, fs.ErrNotExist) {
			return ctx.Err() // it went
		}
		return err
	}
	for _, kind := range []string{trashDir, replicaDir, imagesDir, pinsDir} { // where removed records went, and were
		dir := d.Join(kind)
		id, steady, err := d.FileID(dir)
		if kind == pinsDir && errors.Is(err, fs.ErrNotExist) {
			continue // made with the first of them
		}
		if have, is := d.names.settled[dir]; err == nil && is && have == id {
			continue
		}
		delete(d.names.settled, dir)
		if err := sync(dir); err != nil {
			return err
		}
		if err == nil && steady {
			d.names.settled[dir] = id
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

// settleAhead does so once before the first time that the disk's lock is held for it, which others wait for: what has
// changed since is little. An error is told there.
func (d *Disk) settleAhead() {
	d.names.settledMu.Lock()
	done := d.names.settled != nil
	d.names.settledMu.Unlock()
	if !done {
		_ = d.settleNames(context.Background())
	}
}

// Settle makes durable what the record of a replica says now, and the layers: a process that is dead may have written
// it a moment ago. Before anybody is told that a snapshot is there, or gone, or that the replica was reverted.
func (d *Disk) Settle(replica string, layers ...string) error {
	err := d.FS.SyncDir(d.Join(replicaDir, replica))
	for _, uid := range layers {
		if there, eerr := d.Exists(d.Join(layer.Dir, uid, layer.LayerFile)); eerr == nil && !there {
			err = errors.Join(err, d.SettleFrozen(context.Background(), uid))
		}
	}
	if err != nil {
		return fmt.Errorf("replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
	}
	return nil
}
