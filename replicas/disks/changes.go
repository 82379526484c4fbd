package disks

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Changes reads, from the maps on the disk, the blocks in which a snapshot of a replica differs from a base snapshot;
// without a base, all blocks of the snapshot. The disk must belong to this machine.
func (r *Registry) Changes(_ context.Context, of *api.Replica, base, target api.UID) (*stack.Delta, error) {
	disk, err := r.Get(of.Spec.Disk)
	if err != nil {
		return nil, err
	}
	return disk.Changes(string(of.Spec.UID), block.SnapshotCut{UID: string(base)},
		block.SnapshotCut{UID: string(target)})
}
