package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// A finished layer is a folder: data (sparse, offset = offset in the volume), map (which blocks it holds), sums (one
// digest per chunk), and layer.json, its commit point.
const (
	DataFile    = "data"
	MapFile     = "map"
	SumsFile    = "sums"
	LayerFile   = "layer.json"
	FormatLayer = "drover-layer"
)

// Record is layer.json.
type Record struct {
	UID       string    `json:"uid"`
	Size      int64     `json:"size"`
	Root      string    `json:"root"`      // digest over the sums and the map
	Data      int64     `json:"data"`      // bytes in blocks of kind data
	Zero      int64     `json:"zero"`      // bytes in blocks of kind zero
	Allocated int64     `json:"allocated"` // bytes on the disk when the layer was finished
	Durable   bool      `json:"durable"`   // the data was synced before the record was written
	Created   time.Time `json:"created"`
}

// Layer is an open layer: finished, frozen or hydrated. An open layer stays readable after its files lost their names.
// The owner of a Layer changes the fields; the store does not.
type Layer struct {
	Rec           Record
	Map           format.BlockMap
	Data          file.Handle
	MapFile       file.Handle
	MergedMapFile file.Handle // during a merge: the file of the result's map
	CRCs          file.Handle // nil: the layer has no checksums
	Direct        file.Handle // of the data, for large aligned reads past the page cache; nil: Data serves all reads
	Damage        []Damage
	Store         *Store
	Hydration     *Hydration // nil: the disk has the whole layer
}

// OpenLayer opens a finished or frozen layer for a reader; flag is added to the flags of the data file.
func (d *Store) OpenLayer(uid string, flag int) (*Layer, error) {
	return d.OpenLayerAs(uid, flag, false)
}

// OpenLayerAs opens a layer. The owner, the replica that merges, may open a layer during the merge.
func (d *Store) OpenLayerAs(uid string, flag int, owner bool) (_ *Layer, err error) {
	if err := api.UID(uid).Validate(); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	l := &Layer{Store: d}
	defer func() {
		if err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
			_ = l.Close()
		}
	}()
	if l.Rec, err = d.Record(uid); api.Is(err, api.NotFound) {
		missing := err
		if err = d.openFrozen(l, uid, flag, owner); err == nil {
			return l, nil
		}
		if !api.Is(err, api.NotFound) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		_ = l.Close()
		*l = Layer{Store: d}
		if l.Rec, err = d.Record(uid); api.Is(err, api.NotFound) { // otherwise finished meanwhile
			err = missing
		}
	}
	if err != nil {
		return nil, err
	}
	if err = d.openData(l, uid, flag, owner); err != nil {
		return nil, err
	}
	if err = d.OpenTables(l, flag); err != nil {
		return nil, err
	}
	if owner {
		if err = d.openMapped(l); err != nil {
			return nil, err
		}
	}
	l.Damage = d.KnownDamage(uid, l.Rec.Size)
	return l, nil
}

// OpenTables opens the map of a finished layer, and the checksums if the layer has some.
func (d *Store) OpenTables(l *Layer, flag int) (err error) {
	if l.MapFile, err = d.FS.Open(d.Join(Dir, l.Rec.UID, MapFile), os.O_RDONLY, 0); err != nil {
		return err
	}
	st, err := l.MapFile.Stat()
	if err != nil {
		return err
	}
	if l.Map, err = format.OpenMap(l.MapFile, st.Size(), l.Rec.Size); err != nil {
		return err
	}
	l.CRCs, err = d.openCRCs(l.Rec.UID, l.Rec.Size, flag)
	return err
}

// OpenDirect lets large reads of a layer bypass the page cache, if the disk has direct I/O.
func (l *Layer) OpenDirect() {
	if l.Store.Direct == 0 || l.Hydration != nil {
		return
	}
	// By descriptor: the file may have no name any more.
	name := fmt.Sprintf("/proc/self/fd/%d", l.Data.Fd())
	if h, err := l.Store.FS.Open(name, os.O_RDONLY|l.Store.Direct, 0); err == nil { // else Data serves all reads
		l.Direct = h
	}
}

// directFrom is the size from which a read is faster past the page cache.
const directFrom = 64 << 10

// dataFor is the file for a read of p at off.
func (l *Layer) dataFor(p []byte, off int64) file.Handle {
	if l.Direct != nil && len(p) >= directFrom && block.Aligned(p, off) {
		return l.Direct
	}
	return l.Data
}

// openData opens the data of a layer. Readers other than the owner hold a shared lock on the file, which keeps a merge
// from beginning. openData refuses readers during a merge, and while the file is still a head.
func (d *Store) openData(l *Layer, uid string, flag int, owner bool) (err error) {
	if l.Data, err = d.FS.Open(d.Join(Dir, uid, DataFile), os.O_RDONLY|flag, 0); err != nil || owner {
		return err
	}
	err = diskfs.TryLock(l.Data, unix.LOCK_SH)
	if err == nil {
		st, serr := l.Data.Stat()
		if serr != nil {
			return serr
		}
		if diskfs.LinkCount(st) == 0 { // removed between open and lock, and perhaps emptied
			return api.Errorf(api.NotFound, "the layer was removed")
		}
		var merging, there bool
		if merging, err = d.BeingMerged(uid); merging {
			err = unix.EWOULDBLOCK
		} else if err == nil {
			// The lock may have belonged to a merge that has ended since: the file belongs to another layer now.
			there, err = d.Exists(d.Join(Dir, uid, DataFile))
			if err == nil && there {
				var away bool
				away, err = d.MergedAway(uid)
				there = !away
			}
			if err == nil && !there {
				err = unix.EWOULDBLOCK
			}
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "a cut or a merge is in progress; try again")
	}
	return err
}

// Record reads layer.json. A layer without the file, or one that was merged into another layer, is an error of kind not
// found.
func (d *Store) Record(uid string) (Record, error) {
	var rec Record
	err := format.ReadMeta(d.FS, d.Join(Dir, uid, LayerFile), FormatLayer, &rec)
	away := false
	if err == nil {
		away, err = d.MergedAway(uid)
	}
	switch {
	case away || errors.Is(err, fs.ErrNotExist):
		return Record{}, api.Errorf(api.NotFound, "the finished layer does not exist")
	case err != nil:
		return rec, err
	case rec.UID != uid || rec.Size < 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize:
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", LayerFile)
	}
	return rec, nil
}

// Close closes the files of the layer, and leaves its hydration.
func (l *Layer) Close() error {
	var errs []error
	if l.Hydration != nil {
		l.Hydration.endUse(l)
		l.Hydration = nil
	}
	for _, h := range []file.Handle{l.Data, l.MapFile, l.MergedMapFile, l.CRCs, l.Direct} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	return errors.Join(errs...)
}
