package layer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Finish gives a frozen layer its map and digests; the rename of layer.json commits. Readers of the layer continue. A
// finished layer is no error.
func (d *Store) Finish(ctx context.Context, uid string) error {
	return d.finishBy(ctx, uid, d.walkGently(uid))
}

// FinishNow is Finish without pauses. If another process finishes the layer already, FinishNow makes that process
// hurry.
func (d *Store) FinishNow(ctx context.Context, uid string) error {
	err := d.finishBy(ctx, uid, EachChunk)
	if api.Is(err, api.Busy) {
		d.Hurry(uid)
	}
	return err
}

func (d *Store) finishBy(ctx context.Context, uid string, each Walk) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("finish layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	if err := d.refuseFinished(uid); api.Is(err, api.Exists) {
		return d.completeFinished(ctx, uid, each)
	} else if err != nil {
		return err
	}
	mine, err := d.FS.Open(d.Join(Dir, uid, FrozenFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer mine.Close()
	if err := diskfs.TryLock(mine, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "another process works on the layer")
	} else if err != nil {
		return err
	}
	if err := d.refuseFinished(uid); api.Is(err, api.Exists) { // finished by the former holder of the lock
		return d.completeFinished(ctx, uid, each)
	} else if err != nil {
		return err
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	named, err := d.records.IsNamed(uid)
	unlock()
	if err != nil {
		return err
	}
	if !named {
		return api.Errorf(api.Invalid, "no stack names the layer: its data may still be a head")
	}
	l, err := d.OpenLayerAs(uid, d.Direct, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	// The stack names the layer before the end of the cut: writes to the layer may be in progress.
	if err := diskfs.TryLock(l.Data, unix.LOCK_SH); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "a cut is in progress; try again")
	} else if err != nil {
		return err
	}
	if err := diskfs.Flock(l.Data, unix.LOCK_UN); err != nil {
		return err
	}
	return d.finishFrozen(ctx, uid, l, each)
}

// refuseFinished returns an error of kind exists if a layer is finished. The maker of a layer asks again with the lock
// of the layer.
func (d *Store) refuseFinished(uid string) error {
	_, err := d.Record(uid)
	if err == nil {
		return api.Errorf(api.Exists, "the layer is finished already")
	}
	return IgnoreKind(err, api.NotFound)
}

// completeFinished removes the files of the frozen layer and adds missing checksums.
func (d *Store) completeFinished(ctx context.Context, uid string, each Walk) error {
	if err := errors.Join(d.removeFrozenFiles(uid), d.makeCRCs(ctx, uid, each)); err != nil {
		return err
	}
	return d.Observer.Finished(uid)
}

func (d *Store) finishFrozen(ctx context.Context, uid string, l *Layer, each Walk) error {
	dir := d.Join(Dir, uid)
	rec := l.Rec
	rec.Durable, rec.Created = true, time.Now().UTC().Truncate(time.Second)
	if err := l.Data.Datasync(); err != nil {
		return err
	}
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		return err
	}
	rec.Data, rec.Zero = kinds.Held()
	if err := file.RemoveAll(d.FS, dir+"/"+SumsFile); err != nil {
		return err
	}
	sums, err := d.FS.Open(dir+"/"+SumsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer sums.Close()
	if err := file.RemoveAll(d.FS, dir+"/"+CRCsFile); err != nil {
		return err
	}
	crcs, err := d.FS.Open(dir+"/"+CRCsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer crcs.Close()
	err = each(ctx, kinds, func(c int64, buf []byte) error {
		k := kinds.Chunk(c)
		sum, err := format.ChunkSum(l.Data, k, c, rec.Size, buf)
		if err == nil && k.Data { // no reader needs other checksums
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
	st, err := l.Data.Stat()
	if err != nil {
		return err
	}
	rec.Allocated = diskfs.Allocated(st)
	err = diskfs.AtOnce(sums.Datasync, func() error { return format.SealCRCs(crcs, rec.Size) },
		func() error { return format.WriteMap(d.FS, dir+"/"+MapFile, kinds) })
	if err = errors.Join(err, l.Data.Chmod(0o444), sums.Chmod(0o444), d.FS.SyncDir(dir)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if err := format.WriteMeta(d.FS, dir+"/"+LayerFile, FormatLayer, rec); err != nil {
		return err
	}
	if err := d.removeFrozenFiles(uid); err != nil {
		return err
	}
	return d.Observer.Finished(uid)
}

// removeFrozenFiles removes the files that only a frozen layer needs.
func (d *Store) removeFrozenFiles(uid string) error {
	var errs []error
	for _, name := range []string{ZeroFile, FrozenFile, hurryFile} {
		errs = append(errs, file.RemoveAll(d.FS, d.Join(Dir, uid, name)))
	}
	return errors.Join(errs...)
}

// SyncFrozen makes the content of a frozen layer durable; a finished layer is durable. SyncFrozen waits for writes
// of a process that died between the commit of a cut and the end of the writes.
func (d *Store) SyncFrozen(ctx context.Context, uid string) error {
	for _, name := range []string{DataFile, ZeroFile} {
		h, err := d.FS.Open(d.Join(Dir, uid, name), os.O_RDWR, 0)
		if errors.Is(err, os.ErrNotExist) {
			if there, eerr := d.Exists(d.Join(Dir, uid, LayerFile)); there && eerr == nil {
				return nil
			}
		}
		if err != nil {
			return err
		}
		if name == DataFile {
			err = diskfs.AwaitQuiet(ctx, h)
		}
		if err := errors.Join(err, h.Datasync(), h.Close()); err != nil {
			return err
		}
	}
	return nil
}

// IgnoreKind returns err, or nil if err is of kind.
func IgnoreKind(err error, kind api.Kind) error {
	if api.Is(err, kind) {
		return nil
	}
	return err
}
