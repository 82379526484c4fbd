package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
	"drover.io/drover/replicas/stack/transfer"
)

// An image of a snapshot names the snapshot's layers. A pin keeps the layers that a backup reads until the backup ends.

var _, _ = block.Exporter((*Disk)(nil)), block.SnapshotDisk((*Disk)(nil))

// Hold implements block.Exporter, by a pin.
func (d *Disk) Hold(ctx context.Context, image, name, replica, snapshot string) ([]string, int64, error) {
	return d.holdLayers(ctx, Pin{UID: image, For: name, Disk: d.UID(), Image: true}, replica, snapshot)
}

// holdLayers pins the layers of a snapshot of a replica that has all its layers on this disk, unless the pin exists.
func (d *Disk) holdLayers(ctx context.Context, p Pin, replica, snapshot string) (layers []string, size int64,
	err error) {
	if err := api.UID(p.UID).Validate(); err != nil {
		return nil, 0, err
	}
	if _, err := d.readPin(p.UID); errors.Is(err, fs.ErrNotExist) {
		lacks, err := d.Lacking(replica)
		if err != nil {
			return nil, 0, err
		}
		if len(lacks) > 0 {
			return nil, 0, api.Errorf(api.Busy, "replica %s has not all its layers on disk %s yet; try again", replica, d.Root)
		}
	} else if err == nil { // a killed process may have written the pin a moment ago
		if err := d.FS.SyncDir(d.Join(pinsDir, p.UID)); err != nil {
			return nil, 0, fmt.Errorf("pin %s on disk %s: %w", p.UID, d.Root, diskfs.Classify(err))
		}
	}
	if p, err = d.Pin(ctx, p, replica, snapshot); err != nil {
		return nil, 0, err
	}
	size, err = d.StackSize(p.Layers)
	return p.Layers, size, err
}

// snapshotLayers finds the layers of a snapshot of a replica, bottom first.
func (d *Disk) snapshotLayers(replica string, s block.SnapshotCut) ([]string, error) {
	m, err := d.Stack(replica)
	if err != nil {
		return nil, err
	}
	k := m.findCut(s)
	if k < 0 {
		return nil, api.Errorf(api.NotFound, "replica %s has no snapshot %s", replica, s.UID)
	}
	return m.Chain(m.Snapshots[k].Layer)
}

// OpenSnapshot implements block.SnapshotDisk. Busy: layers are not on the disk yet. Open layers keep merges out.
func (d *Disk) OpenSnapshot(replica string, s block.SnapshotCut) (src block.Source, err error) {
	var layers []string
	err = layer.RetryMerged(func() (err error) {
		if layers, err = d.snapshotLayers(replica, s); err == nil {
			src, err = transfer.OpenWhole(d.Store, layers)
		}
		return err
	})
	return src, d.ExplainLack(layers, err)
}

// Name implements block.Exporter.
func (d *Disk) Name(ctx context.Context, img block.Image) (_ block.Image, err error) {
	for _, uid := range img.Layers {
		list, err := d.DamagedStill(ctx, uid)
		if err != nil {
			return img, err
		}
		if len(list) > 0 {
			return img, api.Errorf(api.Unavailable, "layer %s on disk %s: %d ranges are damaged, the first %d bytes at %d", uid,
				d.Root, len(list), list[0].Len, list[0].Off)
		}
	}
	if img.Digest, err = d.rootOf(img.Layers); err != nil {
		return img, err
	}
	if err := d.PutImage(img); err != nil {
		return img, err
	}
	return img, d.Unpin(img.UID)
}

// rootOf returns the root digest of the topmost layer; empty: not all layers are finished.
func (d *Disk) rootOf(layers []string) (root string, err error) {
	for _, uid := range layers {
		rec, err := d.Record(uid)
		if api.Is(err, api.NotFound) { // frozen; PutImage refuses a missing layer
			return "", nil
		}
		if err != nil {
			return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
		root = rec.Root
	}
	return root, nil
}

// Taken implements block.Exporter.
func (d *Disk) Taken(img block.Image) (sum int64, err error) {
	for _, uid := range img.Layers {
		_, n, err := d.LayerSize(uid)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// Digests implements block.Exporter.
func (d *Disk) Digests(ctx context.Context, img block.Image) (block.Image, error) {
	if err := d.MakeDigests(ctx, img.Layers); err != nil {
		return img, err
	}
	root, err := d.rootOf(img.Layers)
	if err != nil {
		return img, err
	}
	img.Digest = root
	return img, d.PutImage(img)
}

// Forget implements block.Exporter.
func (d *Disk) Forget(image string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove image %s on disk %s: %w", image, d.Root, diskfs.Classify(err))
		}
	}()
	if err := d.Unpin(image); err != nil {
		return err
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	img, err := d.readImage(image)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return d.removeHalfMade(imagesDir, image)
	case err != nil:
		return d.toTrash(imagesDir, orphanPrefix, image)
	}
	if err := d.toTrash(imagesDir, gonePrefix, image); err != nil {
		return err
	}
	return d.dropUnnamed(img.Layers)
}

// HoldSnapshot implements block.SnapshotDisk, by a pin.
func (d *Disk) HoldSnapshot(ctx context.Context, holder, name, replica string, s block.SnapshotCut) ([]string, int64,
	error) {
	p := Pin{UID: holder, For: name, Disk: d.UID(), Backup: true, Snapshot: s.UID, Cut: s.Created}
	// Another cut is that of a former source of the backup. holdLayers returns other errors of readPin.
	if have, err := d.readPin(holder); err == nil && (have.Snapshot != p.Snapshot || !have.Cut.Equal(p.Cut)) {
		if err := d.Unpin(holder); err != nil {
			return nil, 0, err
		}
	}
	return d.holdLayers(ctx, p, replica, s.UID)
}

// HoldLayers implements block.SnapshotDisk, by a pin.
func (d *Disk) HoldLayers(ctx context.Context, holder, name string, layers []string) error {
	return d.PinLayers(ctx, Pin{UID: holder, For: name, Disk: d.UID(), Layers: layers, Backup: true})
}

// ReleaseSnapshot implements block.SnapshotDisk.
func (d *Disk) ReleaseSnapshot(holder string) error { return d.Unpin(holder) }

// HeldSnapshots implements block.SnapshotDisk.
func (d *Disk) HeldSnapshots() (map[string]string, error) {
	pins, err := d.Pins()
	held := map[string]string{}
	for _, p := range pins {
		if p.Backup {
			held[p.UID] = p.For
		}
	}
	return held, err
}

// MakeDigests makes the missing digests of held layers.
func (d *Disk) MakeDigests(ctx context.Context, layers []string) error {
	for _, uid := range layers {
		err := d.FinishNow(ctx, uid)
		if _, derr := d.Record(uid); derr != nil {
			if errors.Is(err, fs.ErrNotExist) || err == nil {
				err = derr
			}
			return fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}
	return nil
}

// ChangedChunks implements block.SnapshotDisk.
func (d *Disk) ChangedChunks(ctx context.Context, replica string, base, target block.SnapshotCut) ([]int64, error) {
	x, err := d.Changes(replica, base, target)
	if err != nil {
		return nil, err
	}
	list, err := x.Chunks(ctx)
	if err = errors.Join(err, x.Close()); err != nil {
		return nil, fmt.Errorf("changes of replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
	}
	return list, nil
}
