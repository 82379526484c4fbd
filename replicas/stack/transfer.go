package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
	"drover.io/drover/replicas/stack/transfer"
)

// storesOf returns the layer stores of disks.
func storesOf(disks []*Disk) []*layer.Store {
	list := make([]*layer.Store, len(disks))
	for i, d := range disks {
		list[i] = d.Store
	}
	return list
}

// Sources lets the disk read layers that it lacks: fetch reads them from sources, and others are the machine's other
// disks. Nil others: there are none. Before anybody uses the disk.
func (d *Disk) Sources(others func() []*Disk, fetch FetchFunc) {
	if others == nil {
		d.SetSources(nil, fetch)
		return
	}
	d.SetSources(func() []*layer.Store { return storesOf(others()) }, fetch)
}

// CopyLayer copies a layer of another disk to this disk. A layer that the disk has already is no error.
func (d *Disk) CopyLayer(ctx context.Context, from *Disk, uid string, o CopyOptions) error {
	return transfer.Copy(ctx, d.Store, from.Store, uid, o)
}

// Flatten makes one layer of this disk that holds the content of several layers, bottom first, together. Flatten reads
// each layer on the first of the disks that has the layer.
func (d *Disk) Flatten(ctx context.Context, from []*Disk, layers []string, uid string, o CopyOptions) error {
	return transfer.Flatten(ctx, d.Store, storesOf(from), layers, uid, o)
}

// Delta compares two stacks of finished or frozen layers, bottom first. Size is the size of the target.
func (d *Disk) Delta(base, target []string, size int64) (*Delta, error) {
	return transfer.OpenDelta(d.Store, base, target, size)
}

// OpenStack opens finished layers, bottom first, as one source of size bytes.
func (d *Disk) OpenStack(layers []string, size int64) (block.Source, error) {
	return transfer.OpenStack(d.Store, layers, size)
}

// OpenLayers is OpenStack with each layer on the first of the disks that has the layer. OpenLayers writes to no disk.
func OpenLayers(disks []*Disk, layers []string, size int64) (block.Source, error) {
	return transfer.OpenLayers(storesOf(disks), layers, size)
}

// Changes lists the blocks that differ between two snapshots of a replica; without a base, the blocks of the target.
func (d *Disk) Changes(replica string, base, target block.SnapshotCut) (x *Delta, err error) {
	err = layer.RetryMerged(func() error {
		var from []string
		if base.UID != "" {
			if from, err = d.snapshotLayers(replica, base); err != nil {
				return err
			}
		}
		to, err := d.snapshotLayers(replica, target)
		var size int64
		if err == nil {
			size, err = d.TopSize(to)
		}
		if err == nil {
			x, err = d.Delta(from, to, size)
		}
		return err
	})
	return x, err
}

// OpenView opens a whole replica for reading. A view and an opener for I/O exclude each other with kind busy.
func (d *Disk) OpenView(uid string) (_ block.Source, err error) {
	v := &transfer.View{}
	defer func() {
		if err != nil {
			err = fmt.Errorf("read replica %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
			_ = v.Close()
		}
	}()
	var m Meta
	_, err = d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.NotFound, "the replica does not exist: %w", err)
	}
	if err != nil {
		return nil, err
	}
	dir := d.Join(replicaDir, uid)
	if v.Owner, err = d.FS.Open(dir+"/"+ownerFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := diskfs.TryLock(v.Owner, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, api.Errorf(api.Busy, "another process or session has the replica open")
	} else if err != nil {
		return nil, err
	}
	if m, err = d.readStack(uid); err != nil {
		return nil, err
	}
	if v.Head, err = d.FS.Open(dir+"/"+m.Head+dataSuffix, os.O_RDONLY, 0); err != nil {
		return nil, err
	}
	if err := diskfs.TryLock(v.Head, unix.LOCK_SH); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, api.Errorf(api.Busy, "disk I/O of its former owner is still in progress")
	} else if err != nil {
		return nil, err
	}
	if v.Log, err = format.OpenZeroLog(d.FS, dir+"/"+m.Head+zeroSuffix, m.Size>>blockBits); err != nil {
		return nil, err
	}
	v.Merge = m.Merge
	return v, v.Open(m.Size, m.Layers, func(uid string) (*layer.Layer, error) { return d.Find(uid, 0, true) })
}
