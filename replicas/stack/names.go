package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// What names layers: the images and replicas of the disk. All of this happens under the disk's lock.

const (
	imageFile   = "image.json"
	formatImage = "drover-image"
	// Names in the trash: a prefix, the kind of thing, its uid, and when it came there, in seconds.
	gonePrefix   = "gone"   // somebody removed it: to be deleted at once
	orphanPrefix = "orphan" // nobody knows it: to be deleted after a grace
)

// PutImage implements block.Layers. The same image again, with other facts, replaces the record.
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

func (d *Disk) image(uid string) (block.Image, error) {
	var img block.Image
	if err := format.ReadMeta(d.FS, d.Join(imagesDir, uid, imageFile), formatImage, &img); err != nil {
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
		img, err := d.image(e.Name())
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
	d.settleAhead()
	unlock, err := d.Lock()
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
	seen := d.look()
	if seen.ofReplicas != nil {
		return fmt.Errorf("the users of the image are unknown while a replica's record is unreadable: %w", seen.ofReplicas)
	}
	if seen.ofImages != nil && !api.Is(seen.ofImages, api.Corrupt) {
		return seen.ofImages
	}
	others := map[string]bool{} // layers that other images name too: those of a clone are those of its origin
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

// RemoveReplica forgets a replica; layers that nothing names any more go with it. It answers at once: space comes back
// in the background. No replica of that uid: no error. One that is open is refused with kind in use.
func (d *Disk) RemoveReplica(uid string) error {
	_, err := d.TakeReplica(uid)
	return err
}

// TakeReplica is RemoveReplica, and tells whether layers may be mergeable now that were not before. Of those that went
// it knows nothing, and says that they may.
func (d *Disk) TakeReplica(uid string) (mergeable bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove replica %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return true, err
	}
	d.settleAhead()
	unlock, err := d.Lock()
	if err != nil {
		return true, err
	}
	defer unlock()
	open, err := d.Locked(d.Join(replicaDir, uid, ownerFile))
	if err != nil {
		return true, err
	}
	if open {
		return true, api.Errorf(api.InUse, "the replica is open")
	}
	m, err := d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return true, d.removeHalfMade(replicaDir, uid)
	}
	if err != nil {
		return true, d.toTrash(replicaDir, orphanPrefix, uid)
	}
	if err := d.toTrash(replicaDir, gonePrefix, uid); err != nil {
		return true, err
	}
	layers := m.all()
	if m.Merge != nil { // its result may be half made
		layers = append(layers, m.Merge.Result)
	}
	seen := d.look()
	if seen.unread() != nil {
		return true, nil // as in dropUnnamed
	}
	return freesFor(seen.all, uid, layers), d.dropLayers(layers, namedBy(seen.all), seen)
}

// freesFor reports whether a replica is the only one that still names one of the layers, now that another one is gone.
// What that one has pinned on its own disk goes next: then nobody can tell.
func freesFor(all []*naming, gone string, layers []string) bool {
	by := map[string][]*naming{}
	for _, n := range all {
		if n.pin == gone {
			return true
		}
		for _, l := range n.layers {
			if of := by[l]; len(of) == 0 || of[len(of)-1] != n { // once, if it names it twice
				by[l] = append(of, n)
			}
		}
	}
	return slices.ContainsFunc(layers, func(l string) bool { return len(by[l]) == 1 && by[l][0].replica != "" })
}

func (d *Disk) removeHalfMade(dir, uid string) error {
	if _, err := d.FS.ReadDir(d.Join(dir, uid)); errors.Is(err, fs.ErrNotExist) {
		return d.FS.SyncDir(d.Join(trashDir)) // a process that died may have removed it a moment ago
	}
	return d.toTrash(dir, gonePrefix, uid)
}

// toTrash renames a folder into the trash: that is the commit point of every removal. What was removed on purpose is
// deleted in the background.
func (d *Disk) toTrash(dir, prefix, uid string) error {
	name := fmt.Sprintf("%s.%s.%s.%d", prefix, dir, uid, time.Now().Unix())
	for i := 1; ; i++ {
		err := d.FS.Rename(d.Join(dir, uid), d.Join(trashDir, name))
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, fs.ErrExist) || i > 1000 {
			return err
		}
		name = fmt.Sprintf("%s.%s.%s.%d", prefix, dir, uid, time.Now().Unix()+int64(i))
	}
	if err := d.SyncDirs(d.Join(trashDir), d.Join(dir)); err != nil {
		return err
	}
	if prefix == gonePrefix {
		d.discard([]string{name})
	}
	return nil
}

// named are the uids of layers that an image or a replica names. It fails while any record cannot be read.
func (d *Disk) named() (map[string]bool, error) {
	names, unread := d.namedSurely()
	if unread != nil {
		return nil, unread
	}
	return names, nil
}

// namedSurely are those of them that records which can be read name; unread is why there may be more.
func (d *Disk) namedSurely() (names map[string]bool, unread error) {
	seen := d.look()
	return namedBy(seen.all), seen.unread()
}

func namedBy(all []*naming) map[string]bool {
	names := make(map[string]bool)
	for _, n := range all {
		for _, l := range n.layers {
			names[l] = true
		}
	}
	return names
}

// isNamed reports whether anything names a layer. Where nothing does that can be read, and not all can, it fails.
func (d *Disk) isNamed(uid string) (bool, error) {
	names, unread := d.namedSurely()
	if names[uid] {
		return true, nil
	}
	return false, unread
}

// dropUnnamed removes those of the layers that nothing names. While a record cannot be read it leaves them to Collect.
func (d *Disk) dropUnnamed(layers []string) error {
	seen := d.look()
	if seen.unread() != nil {
		return nil
	}
	return d.dropLayers(layers, namedBy(seen.all), seen)
}

// dropLayers removes those of the layers that are not named, once no loss of power can bring a record back that does.
// What is named comes from a look under the disk's lock, which the caller still has.
func (d *Disk) dropLayers(layers []string, named map[string]bool, seen *sight) error {
	layers = slices.DeleteFunc(slices.Clone(layers), func(uid string) bool { return named[uid] })
	if len(layers) == 0 {
		return nil
	}
	if err := d.settleSight(context.Background(), seen); err != nil {
		return err
	}
	for _, uid := range layers {
		if err := d.toTrash(layer.Dir, gonePrefix, uid); err != nil && !errors.Is(err, fs.ErrNotExist) {
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
			err = fmt.Errorf("collect on disk %s: %w", d.Root, diskfs.Classify(err))
		}
	}()
	seen := d.look()
	before, unsettled := namedBy(seen.all), seen.unread()
	if unsettled == nil {
		unsettled = d.settleSight(ctx, seen)
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	now := time.Now()
	err = errors.Join(d.collectHalfMade(replicaDir, stackFile, ownerFile, d.written),
		d.collectHalfMade(imagesDir, imageFile, "", nil))
	if unsettled != nil {
		err = errors.Join(err, fmt.Errorf("no layer is collected: %w", unsettled))
	} else {
		err = errors.Join(err, d.collectLayers(ctx, now, grace, before))
	}
	unlock() // what is in the trash nobody can name, and to delete it may take long
	return errors.Join(err, d.collectTrash(ctx, now, grace))
}

// collectHalfMade removes folders without a commit record that nobody works on, but for those that keep wants: their
// record was there once.
func (d *Disk) collectHalfMade(dir, record, lock string, keep func(uid string) (bool, error)) error {
	entries, err := d.FS.ReadDir(d.Join(dir))
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if api.UID(e.Name()).Validate() != nil {
			continue
		}
		made, err := d.Exists(d.Join(dir, e.Name(), record))
		if err == nil && !made && keep != nil {
			made, err = keep(e.Name())
		}
		if err == nil && !made && lock != "" {
			made, err = d.LockedNow(d.Join(dir, e.Name(), lock))
		}
		if err == nil && !made {
			err = d.toTrash(dir, gonePrefix, e.Name())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %s stays: %w", dir, e.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// collectLayers collects the layers that nothing names, nor did before what was recorded then became durable.
func (d *Disk) collectLayers(ctx context.Context, now time.Time, grace time.Duration, before map[string]bool) error {
	names, err := d.named()
	if err != nil {
		return fmt.Errorf("no layer is collected: %w", err)
	}
	// Who makes a layer, or cuts one off, has the lock of its data until its record is there or a stack names it, and does
	// either without the disk's lock: both are looked at after that.
	wanted := func(uid string) (is bool, err error) {
		if names[uid] || before[uid] {
			return true, nil
		}
		if is, err = d.LockedNow(d.Join(layer.Dir, uid, layer.DataFile)); err != nil || is {
			return is, err
		}
		if is, err = d.Exists(d.Join(layer.Dir, uid, layer.LayerFile)); err != nil || is {
			return is, err
		}
		if is, err = d.Resumable(uid, now); err != nil || is {
			return is, err
		}
		newer, err := d.named()
		return newer[uid], err
	}
	failed := d.collectHalfMade(layer.Dir, layer.LayerFile, "", wanted)
	if names, err = d.named(); err != nil {
		return errors.Join(failed, fmt.Errorf("no other layer is collected: %w", err))
	}
	entries, err := d.FS.ReadDir(d.Join(layer.Dir))
	if err != nil {
		return errors.Join(failed, err)
	}
	for _, e := range entries {
		uid := e.Name()
		if err := ctx.Err(); err != nil {
			return err
		}
		if api.UID(uid).Validate() != nil || names[uid] || before[uid] {
			continue
		}
		// A layer that was just finished is about to be named; one that was merged will never be again.
		prefix := gonePrefix
		away, err := d.MergedAway(uid)
		if err == nil && !away {
			var rec layer.Record
			rec, err = d.Record(uid)
			if err == nil && now.Sub(rec.Created) < grace || api.Is(err, api.NotFound) {
				continue // the latter is half-made, and somebody is at it
			}
			prefix = orphanPrefix
		}
		if err == nil {
			err = d.toTrash(layer.Dir, prefix, uid)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("layer %s stays: %w", uid, err))
		}
	}
	return failed
}

func (d *Disk) collectTrash(ctx context.Context, now time.Time, grace time.Duration) error {
	entries, err := d.FS.ReadDir(d.Join(trashDir))
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
	errs := []error{d.FS.SyncDir(d.Join(trashDir))} // what is emptied must not come back
	for _, name := range gone {
		errs = append(errs, d.emptyTrash(name))
	}
	return errors.Join(errs...)
}
