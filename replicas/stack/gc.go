package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
)

// deleteTrash deletes folders of the trash in the background. After a crash Collect deletes the folders.
func (d *Disk) deleteTrash(names []string) {
	if len(names) == 0 {
		return
	}
	d.Go(func() {
		for _, name := range names {
			if err := d.emptyTrash(name); err != nil {
				slog.Warn("trash is not removed yet; the next collection tries again", "disk", d.Root, "name", name,
					"error", err)
			}
		}
	})
}

// Names in the trash: a prefix, the kind of folder, the uid, and the time of the removal, in seconds.
const (
	gonePrefix   = "gone"   // removed on purpose: deleted at once
	orphanPrefix = "orphan" // without a reference: deleted after a grace
)

func (d *Disk) removeHalfMade(dir, uid string) error {
	if _, err := d.FS.ReadDir(d.Join(dir, uid)); errors.Is(err, fs.ErrNotExist) {
		return d.FS.SyncDir(d.Join(trashDir)) // a process that died may have removed it a moment ago
	}
	return d.toTrash(dir, gonePrefix, uid)
}

// toTrash renames a folder into the trash, the commit point of every removal. With the prefix gone the folder is
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
		d.deleteTrash([]string{name})
	}
	return nil
}

// dropUnnamed removes the layers without a reference. While a record is unreadable, Collect removes the layers later.
func (d *Disk) dropUnnamed(layers []string) error {
	seen := d.scanReferences()
	if seen.unreadableError() != nil {
		return nil
	}
	return d.dropLayers(layers, namedBy(seen.all), seen)
}

// dropLayers removes the layers that are not in named, once no loss of power can bring back a record that names a
// layer. named and seen come from a scan under the disk's lock, which the caller still has.
func (d *Disk) dropLayers(layers []string, named map[string]bool, seen *referenceScan) error {
	layers = slices.DeleteFunc(slices.Clone(layers), func(uid string) bool { return named[uid] })
	if len(layers) == 0 {
		return nil
	}
	if err := d.syncScan(context.Background(), seen); err != nil {
		return err
	}
	for _, uid := range layers {
		if err := d.toTrash(layer.Dir, gonePrefix, uid); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Collect collects the garbage of a disk: Collect empties the trash, removes half-made replicas, images and layers that
// no process is making, moves finished layers without a reference into the trash after the grace, and deletes the
// layers after the grace again. While a record is unreadable, Collect collects no layer and returns an error.
func (d *Disk) Collect(ctx context.Context, grace time.Duration) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("collect on disk %s: %w", d.Root, diskfs.Classify(err))
		}
	}()
	seen := d.scanReferences()
	before, unsynced := namedBy(seen.all), seen.unreadableError()
	if unsynced == nil {
		unsynced = d.syncScan(ctx, seen)
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	err = errors.Join(d.collectHalfMade(replicaDir, stackFile, ownerFile, d.headHoldsData),
		d.collectHalfMade(imagesDir, imageFile, "", nil))
	if unsynced != nil {
		err = errors.Join(err, fmt.Errorf("garbage collection deletes no layer: %w", unsynced))
	} else {
		err = errors.Join(err, d.collectLayers(ctx, grace, before))
	}
	unlock() // no record can name a layer in the trash, and the deletion may take long
	return errors.Join(err, d.collectTrash(ctx, grace))
}

// collectHalfMade removes folders without a record that no process works on, except folders that keep wants, which had
// a record once.
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

// collectLayers collects the layers that have no reference now, and had none before the records became durable.
func (d *Disk) collectLayers(ctx context.Context, grace time.Duration, before map[string]bool) error {
	now := time.Now()
	names, err := d.referencedLayers()
	if err != nil {
		return fmt.Errorf("garbage collection deletes no layer: %w", err)
	}
	// The maker of a layer, or a cut, holds the lock of the data file until the record exists or a stack names the layer,
	// and needs no disk lock for either: so the record and the stacks are read after the lock.
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
		newer, err := d.referencedLayers()
		return newer[uid], err
	}
	failed := d.collectHalfMade(layer.Dir, layer.LayerFile, "", wanted)
	if names, err = d.referencedLayers(); err != nil {
		return errors.Join(failed, fmt.Errorf("garbage collection deletes no other layer: %w", err))
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
		// A layer that was just finished is about to get a reference; a layer that was merged away never gets one.
		prefix := gonePrefix
		away, err := d.MergedAway(uid)
		if err == nil && !away {
			var rec layer.Record
			rec, err = d.Record(uid)
			if err == nil && now.Sub(rec.Created) < grace || api.Is(err, api.NotFound) {
				continue // a layer without a record is in the making
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

func (d *Disk) collectTrash(ctx context.Context, grace time.Duration) error {
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
		if err != nil || part[0] == orphanPrefix && time.Since(time.Unix(since, 0)) < grace {
			continue
		}
		gone = append(gone, e.Name())
	}
	if len(gone) == 0 {
		return nil
	}
	errs := []error{d.FS.SyncDir(d.Join(trashDir))} // emptied folders must not come back
	for _, name := range gone {
		errs = append(errs, d.emptyTrash(name))
	}
	return errors.Join(errs...)
}

// emptyTrash deletes a folder of the trash.
func (d *Disk) emptyTrash(name string) error {
	dir := d.Join(trashDir, name)
	entries, err := d.FS.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return file.RemoveAll(d.FS, dir)
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := d.removeLarge(dir + "/" + e.Name()); err != nil {
			return err
		}
	}
	return file.RemoveAll(d.FS, dir)
}

// removeLarge empties a large file without other users, piece by piece, and removes the file. Readers of a layer hold a
// lock on the file; a reader that opened the file before and has no lock yet finds no link (openData).
func (d *Disk) removeLarge(name string) error {
	st, err := os.Lstat(name)
	if err != nil || diskfs.Allocated(st) < diskfs.LargeFile {
		return nil
	}
	h, err := d.FS.Open(name, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Close()
	if err := diskfs.Flock(h, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil // the last reader frees the file
	}
	if st, err = h.Stat(); err != nil {
		return err
	}
	if diskfs.LinkCount(st) != 1 {
		return nil
	}
	e := diskfs.Emptier{Piece: diskfs.LeastPiece}
	for off := int64(0); off < st.Size(); {
		from, _, err := file.NextData(int(h.Fd()), off, st.Size())
		if err != nil || from >= st.Size() {
			break // the removal frees the rest
		}
		n := min(max(e.Piece, diskfs.LeastPiece), st.Size()-from)
		if err := e.Punch(h, from, n); err != nil {
			return err
		}
		off = from + n
	}
	return file.RemoveAll(d.FS, name)
}
