package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Unfinished lists the frozen layers that a replica or an image of this disk names.
func (d *Disk) Unfinished() ([]string, error) {
	frozen, _, err := d.unfinished()
	return frozen, err
}

// ToFinish lists what Finish is for: the layers of Unfinished, and finished ones that are named and lack the checksums
// of their blocks.
func (d *Disk) ToFinish() ([]string, error) {
	frozen, lacking, err := d.unfinished()
	return append(frozen, lacking...), err
}

func (d *Disk) unfinished() (frozen, lacking []string, err error) {
	names, unread := d.namedSurely()
	if len(names) == 0 && unread != nil { // else what cannot be read is told elsewhere
		return nil, nil, fmt.Errorf("disk %s: %w", d.root, classify(unread))
	}
	d.names.wholeMu.Lock()
	defer d.names.wholeMu.Unlock()
	whole := make(map[string]int64, len(d.names.whole))
	for uid := range names {
		if n, was := d.names.whole[uid]; was && d.hasCRCs(uid, n) {
			if _, _, err := d.fileID(d.path(layersDir, uid, layerFile)); err == nil {
				whole[uid] = n // the record itself need not be read again
				continue
			}
		}
		rec, err := d.layerRecord(uid)
		switch {
		case err == nil && d.hasCRCs(uid, format.CRCsLength(rec.Size)):
			whole[uid] = format.CRCsLength(rec.Size)
		case err == nil:
			lacking = append(lacking, uid)
		case api.Is(err, api.NotFound):
			if there, err := d.exists(d.path(layersDir, uid, frozenFile)); err == nil && there {
				frozen = append(frozen, uid)
			}
		}
	}
	d.names.whole = whole
	return frozen, lacking, nil
}

// Finish gives a frozen layer its map and digests; the rename of layer.json commits. Whoever has it open goes on. A
// finished layer is fine.
func (d *Disk) Finish(ctx context.Context, uid string) error {
	return d.finishBy(ctx, uid, d.gently(uid))
}

// finishNow is Finish for somebody who waits for it. Where somebody else is at it, he is told to hurry.
func (d *Disk) finishNow(ctx context.Context, uid string) error {
	err := d.finishBy(ctx, uid, eachChunk)
	if api.Is(err, api.Busy) {
		d.hurry(uid)
	}
	return err
}

// eachBy is how the chunks of a layer are gone through.
type eachBy func(ctx context.Context, kinds *format.Index, fn func(c int64, buf []byte) error) error

func (d *Disk) finishBy(ctx context.Context, uid string, each eachBy) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("finish layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	if err := d.unmade(uid); api.Is(err, api.Exists) {
		return d.complete(ctx, uid, each)
	} else if err != nil {
		return err
	}
	mine, err := d.fs.Open(d.path(layersDir, uid, frozenFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer mine.Close()
	if err := tryLock(mine, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "somebody is at it")
	} else if err != nil {
		return err
	}
	if err := d.unmade(uid); api.Is(err, api.Exists) { // by who had the lock before
		return d.complete(ctx, uid, each)
	} else if err != nil {
		return err
	}
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	named, err := d.isNamed(uid)
	unlock()
	if err != nil {
		return err
	}
	if !named {
		return api.Errorf(api.Invalid, "no stack names it: its data may still be a head")
	}
	l, err := d.openLayerAs(uid, d.direct, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	// The stack names it before its head is cut off: writes to it may be under way.
	if err := tryLock(l.data, unix.LOCK_SH); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "it is being cut off; try again")
	} else if err != nil {
		return err
	}
	if err := flock(l.data, unix.LOCK_UN); err != nil {
		return err
	}
	return d.finish(ctx, uid, l, each)
}

// unmade is an error of kind exists where a layer is finished. Who makes a layer asks again once he has its lock.
func (d *Disk) unmade(uid string) error {
	_, err := d.layerRecord(uid)
	if err == nil {
		return api.Errorf(api.Exists, "it is finished already")
	}
	return ignoreKind(err, api.NotFound)
}

// complete gives a finished layer what it lacks.
func (d *Disk) complete(ctx context.Context, uid string, each eachBy) error {
	if err := errors.Join(d.thaw(uid), d.makeCRCs(ctx, uid, each)); err != nil {
		return err
	}
	return d.finished(uid)
}

func (d *Disk) finish(ctx context.Context, uid string, l *layer, each eachBy) error {
	dir := d.path(layersDir, uid)
	rec := l.rec
	rec.Durable, rec.Created = true, time.Now().UTC().Truncate(time.Second)
	if err := l.data.Datasync(); err != nil {
		return err
	}
	kinds, err := format.IndexOf(l.m)
	if err != nil {
		return err
	}
	rec.Data, rec.Zero = kinds.Held()
	if err := file.RemoveAll(d.fs, dir+"/"+sumsFile); err != nil {
		return err
	}
	sums, err := d.fs.Open(dir+"/"+sumsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer sums.Close()
	if err := file.RemoveAll(d.fs, dir+"/"+crcsFile); err != nil {
		return err
	}
	crcs, err := d.fs.Open(dir+"/"+crcsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer crcs.Close()
	err = each(ctx, kinds, func(c int64, buf []byte) error {
		k := kinds.Chunk(c)
		sum, err := format.ChunkSum(l.data, k, c, rec.Size, buf)
		if err == nil && k.Data { // nobody asks for checksums else, and they take room
			err = format.PutCRCs(crcs, c, buf[:min(chunkSize, rec.Size-c*chunkSize)])
		}
		if err != nil {
			return err
		}
		_, err = sums.WriteAt(sum[:], sumsHeader+c*sumSize)
		return err
	})
	if err != nil {
		return err
	}
	if _, err := sums.WriteAt(format.SumsHeaderOf(rec.Size), 0); err != nil {
		return err
	}
	if err := sums.Truncate(sumsHeader + (rec.Size+chunkSize-1)/chunkSize*sumSize); err != nil {
		return err
	}
	if rec.Root, err = format.RootDigest(sums, rec.Size, kinds); err != nil {
		return err
	}
	st, err := l.data.Stat()
	if err != nil {
		return err
	}
	rec.Allocated = allocated(st)
	err = atOnce(sums.Datasync, func() error { return format.SealCRCs(crcs, rec.Size) },
		func() error { return format.WriteMap(d.fs, dir+"/"+mapFile, kinds) })
	if err = errors.Join(err, l.data.Chmod(0o444), sums.Chmod(0o444), d.fs.SyncDir(dir)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if err := format.WriteMeta(d.fs, dir+"/"+layerFile, formatLayer, rec); err != nil {
		return err
	}
	if err := d.thaw(uid); err != nil {
		return err
	}
	return d.finished(uid)
}

// thaw takes away what only a frozen layer needs.
func (d *Disk) thaw(uid string) error {
	var errs []error
	for _, name := range []string{zeroFile, frozenFile, hurryFile} {
		errs = append(errs, file.RemoveAll(d.fs, d.path(layersDir, uid, name)))
	}
	return errors.Join(errs...)
}
