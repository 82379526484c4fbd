package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Image reads the record of one image. No such image: an error of kind not found.
func (d *Disk) Image(uid string) (block.Image, error) {
	if err := api.UID(uid).Validate(); err != nil {
		return block.Image{}, err
	}
	img, err := d.readImage(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return img, api.Errorf(api.NotFound, "image %s is not on disk %s", uid, d.Root)
	}
	if err != nil {
		err = fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	return img, err
}

const (
	imageFile   = "image.json"
	formatImage = "drover-image"
)

// PutImage implements block.Layers, and replaces the record of the image.
func (d *Disk) PutImage(img block.Image) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("image %s (%s) on disk %s: %w", img.Name, img.UID, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(img.UID).Validate(); err != nil {
		return err
	}
	if len(img.Layers) == 0 {
		return api.Errorf(api.Invalid, "the image names no layer")
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	for _, uid := range img.Layers {
		if err := api.UID(uid).Validate(); err != nil {
			return err
		}
		_, err := d.Record(uid)
		if img.Digest == "" && api.Is(err, api.NotFound) {
			_, _, err = d.LayerSize(uid) // it may be frozen
		}
		if err != nil {
			return fmt.Errorf("layer %s: %w", uid, err)
		}
		if merging, err := d.BeingMerged(uid); err != nil {
			return fmt.Errorf("layer %s: %w", uid, err)
		} else if merging {
			return api.Errorf(api.Busy, "layer %s is being merged; try again", uid)
		}
	}
	dir := d.Join(imagesDir, img.UID)
	if err := d.FS.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := d.FS.SyncDir(d.Join(imagesDir)); err != nil {
		return err
	}
	return format.WriteMeta(d.FS, dir+"/"+imageFile, formatImage, img)
}

func (d *Disk) readImage(uid string) (block.Image, error) {
	var img block.Image
	if err := format.ReadMeta(d.FS, d.Join(imagesDir, uid, imageFile), formatImage, &img); err != nil {
		return img, err
	}
	if img.UID != uid {
		return img, api.Errorf(api.Corrupt, "%s of image %s is the record of %s", imageFile, uid, img.UID)
	}
	return img, nil
}

// Images implements block.Layers. The error names unreadable records; the list has the other images all the same.
func (d *Disk) Images() ([]block.Image, error) {
	entries, err := d.FS.ReadDir(d.Join(imagesDir))
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	var list []block.Image
	var errs []error
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		img, err := d.readImage(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // half-made
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err)))
			continue
		}
		list = append(list, img)
	}
	return list, errors.Join(errs...)
}

// RemoveImage implements block.Layers.
func (d *Disk) RemoveImage(uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove image %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
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
	img, err := d.readImage(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return d.removeHalfMade(imagesDir, uid)
	}
	if err != nil {
		// The layers are unknown: Collect finds them as orphans.
		return d.toTrash(imagesDir, orphanPrefix, uid)
	}
	seen := d.scanReferences()
	if seen.ofReplicas != nil {
		return fmt.Errorf("the users of the image are unknown while a replica's record is unreadable: %w", seen.ofReplicas)
	}
	if seen.ofImages != nil && !api.Is(seen.ofImages, api.Corrupt) {
		return seen.ofImages
	}
	others := map[string]bool{} // layers that other images name, too: a clone shares the layers of its origin
	for _, n := range seen.all {
		for _, l := range n.layers {
			others[l] = others[l] || n.image != "" && n.image != uid
		}
	}
	for _, n := range seen.all {
		for _, l := range img.Layers {
			if n.replica != "" && slices.Contains(n.layers, l) && !others[l] {
				return api.Errorf(api.InUse, "replica %s of volume %s uses it", n.replica, n.volume)
			}
		}
	}
	if err := d.toTrash(imagesDir, gonePrefix, uid); err != nil {
		return err
	}
	if seen.ofImages != nil {
		return nil // as in dropUnnamed
	}
	named := map[string]bool{}
	for _, n := range seen.all {
		for _, l := range n.layers {
			named[l] = named[l] || n.image != uid
		}
	}
	return d.dropLayers(img.Layers, named, seen)
}
