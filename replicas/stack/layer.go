package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// A finished layer is a folder: data (sparse, offset = offset in the volume), map (which blocks it holds), sums (one
// digest per chunk), and layer.json, its commit point.
const (
	dataFile    = "data"
	mapFile     = "map"
	sumsFile    = "sums"
	layerFile   = "layer.json"
	formatLayer = "drover-layer"
)

// layerRecord is layer.json.
type layerRecord struct {
	UID       string    `json:"uid"`
	Size      int64     `json:"size"`
	Root      string    `json:"root"`      // digest over the sums and the map
	Data      int64     `json:"data"`      // bytes in blocks of kind data
	Zero      int64     `json:"zero"`      // bytes in blocks of kind zero
	Allocated int64     `json:"allocated"` // bytes on the disk when it was finished
	Durable   bool      `json:"durable"`   // the data was synced before this was written
	Created   time.Time `json:"created"`
}

// layer is an open, finished layer. It stays readable whatever happens to its name.
type layer struct {
	rec     layerRecord
	m       format.BlockMap
	data    file.Handle
	mapping file.Handle
	mapped  file.Handle // of a layer that is being merged: what m has of the result's map
	crcs    file.Handle // nil: it has none
	damage  []Damage
	disk    *Disk
	pages   map[int64]*crcPage // of crcs, that are in memory; the loop's
	hy      *hydration         // of a layer that sources supply until it is finished here; else nil
}

// openLayer opens a finished or frozen layer; flag is added to the flags of the data file.
func (d *Disk) openLayer(uid string, flag int) (*layer, error) {
	return d.openLayerAs(uid, flag, false)
}

// openLayerAs opens a layer; its owner may do so while it is being merged.
func (d *Disk) openLayerAs(uid string, flag int, owner bool) (_ *layer, err error) {
	if err := api.UID(uid).Validate(); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	l := &layer{disk: d}
	defer func() {
		if err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
			_ = l.close()
		}
	}()
	if l.rec, err = d.layerRecord(uid); api.Is(err, api.NotFound) {
		missing := err
		if err = d.openFrozen(l, uid, flag, owner); err == nil {
			return l, nil
		}
		if !api.Is(err, api.NotFound) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		_ = l.close()
		*l = layer{disk: d}
		if l.rec, err = d.layerRecord(uid); api.Is(err, api.NotFound) { // else it was finished meanwhile
			err = missing
		}
	}
	if err != nil {
		return nil, err
	}
	if err = d.openData(l, uid, flag, owner); err != nil {
		return nil, err
	}
	if err = d.openTables(l, flag); err != nil {
		return nil, err
	}
	if owner {
		if err = d.openMapped(l); err != nil {
			return nil, err
		}
	}
	l.damage = d.damaged(uid, l.rec.Size)
	return l, nil
}

// openTables opens what a finished layer has beside its data: the map, and the checksums if there are any.
func (d *Disk) openTables(l *layer, flag int) (err error) {
	if l.mapping, err = d.fs.Open(d.path(layersDir, l.rec.UID, mapFile), os.O_RDONLY, 0); err != nil {
		return err
	}
	st, err := l.mapping.Stat()
	if err != nil {
		return err
	}
	if l.m, err = format.OpenMap(l.mapping, st.Size(), l.rec.Size); err != nil {
		return err
	}
	l.crcs, err = d.openCRCs(l.rec.UID, l.rec.Size, flag)
	return err
}

// openData opens the data of a layer. Readers other than its owner hold a shared lock on it, so that nobody begins to
// merge it, and are refused while it is being merged, or is still a head.
func (d *Disk) openData(l *layer, uid string, flag int, owner bool) (err error) {
	if l.data, err = d.fs.Open(d.path(layersDir, uid, dataFile), os.O_RDONLY|flag, 0); err != nil || owner {
		return err
	}
	err = tryLock(l.data, unix.LOCK_SH)
	if err == nil {
		st, serr := l.data.Stat()
		if serr != nil {
			return serr
		}
		if names(st) == 0 { // removed between the two, and perhaps emptied
			return api.Errorf(api.NotFound, "it was removed")
		}
		var merging, there bool
		if merging, err = d.beingMerged(uid); merging {
			err = unix.EWOULDBLOCK
		} else if err == nil {
			// The lock may have been that of a merge that has ended since: the file is another layer's now.
			there, err = d.exists(d.path(layersDir, uid, dataFile))
			if err == nil && there {
				var away bool
				away, err = d.mergedAway(uid)
				there = !away
			}
			if err == nil && !there {
				err = unix.EWOULDBLOCK
			}
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "it is being cut off or merged; try again")
	}
	return err
}

// layerRecord reads layer.json. A layer that has none, or that was merged into another one, is an error of kind not
// found.
func (d *Disk) layerRecord(uid string) (layerRecord, error) {
	var rec layerRecord
	err := format.ReadMeta(d.fs, d.path(layersDir, uid, layerFile), formatLayer, &rec)
	away := false
	if err == nil {
		away, err = d.mergedAway(uid)
	}
	switch {
	case away || errors.Is(err, fs.ErrNotExist):
		return layerRecord{}, api.Errorf(api.NotFound, "no finished layer of that uid")
	case err != nil:
		return rec, err
	case rec.UID != uid || rec.Size < 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize:
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", layerFile)
	}
	return rec, nil
}

func (l *layer) close() error {
	var errs []error
	if l.hy != nil {
		l.hy.leave(l)
		l.hy = nil
	}
	for _, h := range []file.Handle{l.data, l.mapping, l.mapped, l.crcs} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	return errors.Join(errs...)
}
