package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
)

// A backup reads the layers of a snapshot, which a pin keeps on the disk until the backup ends.

var _ block.SnapshotDisk = (*Disk)(nil)

// HoldSnapshot implements block.SnapshotDisk, by a pin.
func (d *Disk) HoldSnapshot(ctx context.Context, holder, name, replica, snapshot string) ([]string, int64, error) {
	return d.holdLayers(ctx, Pin{UID: holder, For: name, Disk: d.UID(), Backup: true}, replica, snapshot)
}

// ReleaseSnapshot implements block.SnapshotDisk.
func (d *Disk) ReleaseSnapshot(holder string) error { return d.Unpin(holder) }

// HeldSnapshots implements block.SnapshotDisk.
func (d *Disk) HeldSnapshots() (map[string]string, error) {
	pins, err := d.Pins()
	held := map[string]string{}
	for _, p := range pins {
		if p.Backup {
			held[p.UID] = p.For
		}
	}
	return held, err
}

// MakeDigests implements block.SnapshotDisk.
func (d *Disk) MakeDigests(ctx context.Context, layers []string) error {
	for _, uid := range layers {
		err := d.FinishNow(ctx, uid)
		if _, derr := d.Record(uid); derr != nil {
			if errors.Is(err, fs.ErrNotExist) || err == nil {
				err = derr
			}
			return fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}
	return nil
}

// ChangedChunks implements block.SnapshotDisk.
func (d *Disk) ChangedChunks(ctx context.Context, replica, base, target string) ([]int64, error) {
	x, err := d.Changes(replica, base, target)
	if err != nil {
		return nil, err
	}
	list, err := x.Chunks(ctx)
	if err = errors.Join(err, x.Close()); err != nil {
		return nil, fmt.Errorf("changes of replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
	}
	return list, nil
}
