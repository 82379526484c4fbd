package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Unfinished lists the frozen layers that a replica or an image of this disk names.
func (d *Disk) Unfinished() ([]string, error) {
	names, err := d.named()
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.root, classify(err))
	}
	var list []string
	for uid := range names {
		if there, err := d.exists(d.path(layersDir, uid, layerFile)); err != nil || there {
			continue
		}
		if there, err := d.exists(d.path(layersDir, uid, frozenFile)); err == nil && there {
			list = append(list, uid)
		}
	}
	return list, nil
}

// Finish gives a frozen layer its map and digests; the rename of layer.json commits. Whoever has it open goes on. A
// finished layer is fine.
func (d *Disk) Finish(ctx context.Context, uid string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("finish layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	if _, err := d.layerRecord(uid); !api.Is(err, api.NotFound) {
		return errors.Join(err, d.thaw(uid))
	}
	mine, err := d.fs.Open(d.path(layersDir, uid, frozenFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer mine.Close()
	if err := flock(mine, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "somebody is at it")
	} else if err != nil {
		return err
	}
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	names, err := d.named()
	unlock()
	if err != nil {
		return err
	}
	if !names[uid] {
		return api.Errorf(api.Invalid, "no stack names it: its data may still be a head")
	}
	l, err := d.openLayerAs(uid, d.direct, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	return d.finish(ctx, uid, l)
}

func (d *Disk) finish(ctx context.Context, uid string, l *layer) error {
	dir := d.path(layersDir, uid)
	rec := l.rec
	rec.Durable, rec.Created = true, time.Now().UTC().Truncate(time.Second)
	if err := l.data.Datasync(); err != nil {
		return err
	}
	kinds, err := indexOf(l.m)
	if err != nil {
		return err
	}
	for b := int64(0); b < kinds.blocks; {
		v, n := kinds.run(b, kinds.blocks)
		switch block.Kind(v) {
		case block.Data:
			rec.Data += n << blockBits
		case block.Zero:
			rec.Zero += n << blockBits
		}
		b += n
	}
	if err := file.RemoveAll(d.fs, dir+"/"+sumsFile); err != nil {
		return err
	}
	sums, err := d.fs.Open(dir+"/"+sumsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer sums.Close()
	err = eachChunkGently(ctx, kinds, func(c int64, buf []byte) error {
		sum, err := chunkSum(l.data, kinds.chunk(c), c, rec.Size, buf)
		if err != nil {
			return err
		}
		_, err = sums.WriteAt(sum[:], sumsHeader+c*sumSize)
		return err
	})
	if err != nil {
		return err
	}
	if _, err := sums.WriteAt(encodeSumsHeader(rec.Size), 0); err != nil {
		return err
	}
	if err := sums.Truncate(sumsHeader + (rec.Size+chunkSize-1)/chunkSize*sumSize); err != nil {
		return err
	}
	if rec.Root, err = rootDigest(sums, rec.Size, kinds); err != nil {
		return err
	}
	if err := writeFile(d.fs, dir+"/"+mapFile, encodeMap(kinds)); err != nil {
		return err
	}
	st, err := l.data.Stat()
	if err != nil {
		return err
	}
	rec.Allocated = allocated(st)
	err = errors.Join(sums.Datasync(), l.data.Chmod(0o444), sums.Chmod(0o444), d.fs.SyncDir(dir))
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if err := writeMeta(d.fs, dir+"/"+layerFile, formatLayer, rec); err != nil {
		return err
	}
	return d.thaw(uid)
}

// thaw takes away what only a frozen layer needs.
func (d *Disk) thaw(uid string) error {
	var errs []error
	for _, name := range []string{zeroFile, frozenFile} {
		errs = append(errs, file.RemoveAll(d.fs, d.path(layersDir, uid, name)))
	}
	return errors.Join(errs...)
}
