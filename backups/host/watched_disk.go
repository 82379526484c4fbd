package host

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/watched"
)

// WatchDisks returns disks whose calls end with an error of kind unavailable while the disk hangs.
func WatchDisks(disks func(api.UID) (block.SnapshotDisk, error)) func(api.UID) (block.SnapshotDisk, error) {
	return func(uid api.UID) (block.SnapshotDisk, error) {
		disk, err := disks(uid)
		if err != nil {
			return nil, err
		}
		hangs := api.Errorf(api.Unavailable, "disk %s: does not answer; wait, or replace the disk", uid)
		watch := watched.NewDisk(string(uid), hangs)
		return watchedDisk{disk, watched.Layers(watch, disk), watch}, nil
	}
}

// watchedDisk is a disk that may hang. ChangedChunks, which reads the maps of all layers, has no limit.
type watchedDisk struct {
	block.SnapshotDisk
	layers block.LayerReader
	watch  watched.Disk
}

// heldLayers is the result of HoldSnapshot.
type heldLayers struct {
	layers []string
	size   int64
}

// HoldSnapshot implements block.SnapshotDisk. The collector ends the hold of an overdue call.
func (d watchedDisk) HoldSnapshot(ctx context.Context, holder, name, replica string, s block.SnapshotCut) ([]string,
	int64, error) {
	held, err := watched.Call(d.watch, func() (h heldLayers, err error) {
		h.layers, h.size, err = d.SnapshotDisk.HoldSnapshot(ctx, holder, name, replica, s)
		return h, err
	}, nil)
	return held.layers, held.size, err
}

// HoldLayers implements block.SnapshotDisk.
func (d watchedDisk) HoldLayers(ctx context.Context, holder, name string, layers []string) error {
	return watched.Do(d.watch, func() error { return d.SnapshotDisk.HoldLayers(ctx, holder, name, layers) })
}

// ReleaseSnapshot implements block.SnapshotDisk. No hold begins while an overdue call runs.
func (d watchedDisk) ReleaseSnapshot(holder string) error {
	return watched.Do(d.watch, func() error { return d.SnapshotDisk.ReleaseSnapshot(holder) })
}

// HeldSnapshots implements block.SnapshotDisk.
func (d watchedDisk) HeldSnapshots() (map[string]string, error) {
	return watched.Call(d.watch, d.SnapshotDisk.HeldSnapshots, nil)
}

// OpenStack implements block.SnapshotDisk.
func (d watchedDisk) OpenStack(layers []string, size int64) (block.Source, error) {
	return d.open(func() (block.Source, error) { return d.SnapshotDisk.OpenStack(layers, size) })
}

// OpenSnapshot implements block.SnapshotDisk.
func (d watchedDisk) OpenSnapshot(replica string, s block.SnapshotCut) (block.Source, error) {
	return d.open(func() (block.Source, error) { return d.SnapshotDisk.OpenSnapshot(replica, s) })
}

func (d watchedDisk) open(open func() (block.Source, error)) (block.Source, error) {
	src, err := watched.Open(d.watch, open)
	if err != nil {
		return nil, err // not a nil *watched.Source in the interface
	}
	return src, nil
}

// LayerNames implements block.LayerReader.
func (d watchedDisk) LayerNames() ([]string, error) { return d.layers.LayerNames() }

// ChunkDigests implements block.LayerReader.
func (d watchedDisk) ChunkDigests(uid string, first, n int64) ([]byte, error) {
	return d.layers.ChunkDigests(uid, first, n)
}

// Open implements block.LayerReader.
func (d watchedDisk) Open(uid string) (block.Source, error) { return d.layers.Open(uid) }
