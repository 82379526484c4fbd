package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
)

// An image of a snapshot needs no copy: the image names the snapshot's layers.

var _ block.Exporter = (*Disk)(nil)

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
	for _, uid := range p.Layers {
		n, _, err := d.LayerSize(uid)
		if err != nil {
			return nil, 0, err
		}
		size = max(size, n)
	}
	return p.Layers, size, nil
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
