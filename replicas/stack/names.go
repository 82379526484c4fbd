package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// What names layers: the images and replicas of the disk. All of this happens under the disk's lock.

const (
	imageFile = "image.json"
	// Names in the trash: a prefix, the kind of thing, its uid, and when it came there, in seconds.
	gonePrefix   = "gone"   // somebody removed it: to be deleted at once
	orphanPrefix = "orphan" // nobody knows it: to be deleted after a grace
)

// PutImage implements block.Layers. The same image again, with other facts, replaces the record.
func (d *Disk) PutImage(img block.Image) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("image %s (%s) on disk %s: %w", img.Name, img.UID, d.root, classify(err))
		}
	}()
	if err := api.UID(img.UID).Validate(); err != nil {
		return err
	}
	if len(img.Layers) == 0 {
		return api.Errorf(api.Invalid, "it names no layer")
	}
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	for _, uid := range img.Layers {
		if err := api.UID(uid).Validate(); err != nil {
			return err
		}
		_, err := d.layerRecord(uid)
		if img.Digest == "" && api.Is(err, api.NotFound) {
			_, _, err = d.LayerSize(uid) // it may be frozen
		}
		if err != nil {
			return fmt.Errorf("layer %s: %w", uid, err)
		}
		if merging, err := d.beingMerged(uid); err != nil {
			return fmt.Errorf("layer %s: %w", uid, err)
		} else if merging {
			return api.Errorf(api.Busy, "layer %s is being merged; try again", uid)
		}
	}
	dir := d.path(imagesDir, img.UID)
	if err := d.fs.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := d.fs.SyncDir(d.path(imagesDir)); err != nil {
		return err
	}
	return writeMeta(d.fs, dir+"/"+imageFile, formatImage, img)
}

func (d *Disk) image(uid string) (block.Image, error) {
	var img block.Image
	if err := readMeta(d.fs, d.path(imagesDir, uid, imageFile), formatImage, &img); err != nil {
		return img, err
	}
	if img.UID != uid {
		return img, api.Errorf(api.Corrupt, "%s of image %s is the one of %s", imageFile, uid, img.UID)
	}
	return img, nil
}

// Images implements block.Layers. Those whose record cannot be read are in the error; the others are listed all the
// same.
func (d *Disk) Images() ([]block.Image, error) {
	entries, err := d.fs.ReadDir(d.path(imagesDir))
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.root, classify(err))
	}
	var list []block.Image
	var errs []error
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		img, err := d.image(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // half-made
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", d.root, classify(err)))
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
			err = fmt.Errorf("remove image %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	img, err := d.image(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return d.removeHalfMade(imagesDir, uid)
	}
	if err != nil {
		// Its layers are unknown: the record goes, and what nothing names is an orphan.
		return d.toTrash(imagesDir, orphanPrefix, uid)
	}
	all, ofReplicas, ofImages := d.namings()
	if ofReplicas != nil {
		return fmt.Errorf("who uses it cannot be told while a replica's record cannot be read: %w", ofReplicas)
	}
	if ofImages != nil && !api.Is(ofImages, api.Corrupt) {
		return ofImages
	}
	others := map[string]bool{} // layers that other images name too: those of a clone are those of its origin
	for _, n := range all {
		for _, l := range n.layers {
			others[l] = others[l] || n.image != "" && n.image != uid
		}
	}
	for _, n := range all {
		for _, l := range img.Layers {
			if n.replica != "" && slices.Contains(n.layers, l) && !others[l] {
				return api.Errorf(api.InUse, "replica %s of volume %s uses it", n.replica, n.volume)
			}
		}
	}
	if err := d.toTrash(imagesDir, gonePrefix, uid); err != nil {
		return err
	}
	if ofImages != nil {
		return nil // as in dropUnnamed
	}
	named := map[string]bool{}
	for _, n := range all {
		for _, l := range n.layers {
			named[l] = named[l] || n.image != uid
		}
	}
	return d.dropLayers(img.Layers, named)
}

// RemoveReplica forgets a replica; layers that nothing names any more go with it. It answers at once: space comes back
// in the background. No replica of that uid: no error. One that is open is refused with kind in use.
func (d *Disk) RemoveReplica(uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove replica %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	open, err := d.held(d.path(replicaDir, uid, ownerFile))
	if err != nil {
		return err
	}
	if open {
		return api.Errorf(api.InUse, "it is open")
	}
	m, err := d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return d.removeHalfMade(replicaDir, uid)
	}
	if err != nil {
		return d.toTrash(replicaDir, orphanPrefix, uid)
	}
	if err := d.toTrash(replicaDir, gonePrefix, uid); err != nil {
		return err
	}
	layers := m.all()
	if m.Merge != nil { // its result may be half made
		layers = append(layers, m.Merge.Result)
	}
	return d.dropUnnamed(layers)
}

// held reports whether somebody has a flock on the file, other than a process that is being started.
func (d *Disk) held(name string) (bool, error) { return d.locked(name, tryLock) }

// heldNow is held without a wait: where somebody has one, a later look will do.
func (d *Disk) heldNow(name string) (bool, error) {
	return d.locked(name, func(h file.Handle, how int) error { return flock(h, how|unix.LOCK_NB) })
}

func (d *Disk) locked(name string, try func(file.Handle, int) error) (bool, error) {
	h, err := d.fs.Open(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer h.Close()
	err = try(h, unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

func (d *Disk) removeHalfMade(dir, uid string) error {
	if _, err := d.fs.ReadDir(d.path(dir, uid)); errors.Is(err, fs.ErrNotExist) {
		return d.fs.SyncDir(d.path(trashDir)) // a process that died may have removed it a moment ago
	}
	return d.toTrash(dir, gonePrefix, uid)
}

// toTrash renames a folder into the trash: that is the commit point of every removal. What was removed on purpose is
// deleted in the background.
func (d *Disk) toTrash(dir, prefix, uid string) error {
	name := fmt.Sprintf("%s.%s.%s.%d", prefix, dir, uid, time.Now().Unix())
	for i := 1; ; i++ {
		err := d.fs.Rename(d.path(dir, uid), d.path(trashDir, name))
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, fs.ErrExist) || i > 1000 {
			return err
		}
		name = fmt.Sprintf("%s.%s.%s.%d", prefix, dir, uid, time.Now().Unix()+int64(i))
	}
	if err := d.syncDirs(d.path(trashDir), d.path(dir)); err != nil {
		return err
	}
	if prefix == gonePrefix {
		d.discard([]string{name})
	}
	return nil
}

// named are the uids of layers that an image or a replica names. It fails while any record cannot be read.
func (d *Disk) named() (map[string]bool, error) {
	all, ofReplicas, ofImages := d.namings()
	if err := errors.Join(ofReplicas, ofImages); err != nil {
		return nil, err
	}
	names := make(map[string]bool)
	for _, n := range all {
		for _, l := range n.layers {
			names[l] = true
		}
	}
	return names, nil
}

// dropUnnamed removes those of the layers that nothing names. While a record cannot be read it leaves them to Collect.
func (d *Disk) dropUnnamed(layers []string) error {
	names, err := d.named()
	if err != nil {
		return nil
	}
	return d.dropLayers(layers, names)
}

func (d *Disk) dropLayers(layers []string, named map[string]bool) error {
	for _, uid := range layers {
		if named[uid] {
			continue
		}
		if err := d.toTrash(layersDir, gonePrefix, uid); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Collect brings a disk in order: it deletes what was removed and not deleted yet, removes half-made things that nobody
// is making, moves finished layers that nothing has named for the grace into the trash, and deletes them from there
// after the grace again. While any record on the disk cannot be read, it collects no layer and says so.
func (d *Disk) Collect(ctx context.Context, grace time.Duration) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("collect on disk %s: %w", d.root, classify(err))
		}
	}()
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	now := time.Now()
	err = errors.Join(d.collectHalfMade(replicaDir, stackFile, ownerFile, d.written),
		d.collectHalfMade(imagesDir, imageFile, "", nil), d.collectLayers(ctx, now, grace))
	return errors.Join(err, d.collectTrash(ctx, now, grace))
}

// collectHalfMade removes folders without a commit record that nobody works on, but for those that keep wants: their
// record was there once.
func (d *Disk) collectHalfMade(dir, record, lock string, keep func(uid string) (bool, error)) error {
	entries, err := d.fs.ReadDir(d.path(dir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		switch there, err := d.exists(d.path(dir, e.Name(), record)); {
		case err != nil:
			return err
		case there:
			continue
		}
		if keep != nil {
			if is, err := keep(e.Name()); err != nil || is {
				continue
			}
		}
		if lock != "" {
			if held, err := d.heldNow(d.path(dir, e.Name(), lock)); err != nil || held {
				continue
			}
		}
		if err := d.toTrash(dir, gonePrefix, e.Name()); err != nil {
			return err
		}
	}
	return nil
}

func (d *Disk) exists(name string) (bool, error) {
	h, err := d.fs.Open(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, h.Close()
}

func (d *Disk) collectLayers(ctx context.Context, now time.Time, grace time.Duration) error {
	names, err := d.named()
	if err != nil {
		return fmt.Errorf("no layer is collected: %w", err)
	}
	wanted := func(uid string) (bool, error) { return names[uid] || d.kept(uid, now), nil }
	if err := d.collectHalfMade(layersDir, layerFile, dataFile, wanted); err != nil {
		return err
	}
	entries, err := d.fs.ReadDir(d.path(layersDir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		uid := e.Name()
		if err := ctx.Err(); err != nil {
			return err
		}
		if api.UID(uid).Validate() != nil || names[uid] {
			continue
		}
		// A layer that was just finished is about to be named.
		rec, err := d.layerRecord(uid)
		if err == nil && now.Sub(rec.Created) < grace || api.Is(err, api.NotFound) {
			continue // the latter is half-made, and somebody is at it
		}
		if err := d.toTrash(layersDir, orphanPrefix, uid); err != nil {
			return err
		}
	}
	return nil
}

func (d *Disk) collectTrash(ctx context.Context, now time.Time, grace time.Duration) error {
	entries, err := d.fs.ReadDir(d.path(trashDir))
	if err != nil {
		return err
	}
	var gone []string
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := strings.Split(e.Name(), ".")
		if len(part) != 4 {
			continue
		}
		since, err := strconv.ParseInt(part[3], 10, 64)
		if err != nil || part[0] == orphanPrefix && now.Sub(time.Unix(since, 0)) < grace {
			continue
		}
		gone = append(gone, e.Name())
	}
	if len(gone) == 0 {
		return nil
	}
	errs := []error{d.fs.SyncDir(d.path(trashDir))} // what is emptied must not come back
	for _, name := range gone {
		errs = append(errs, d.emptyTrash(name))
	}
	return errors.Join(errs...)
}
