package replicas

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Changes are the blocks of a snapshot that differ from those of another one of the same replica, from the maps on its
// disk; without a base, those that it holds. The disk must be one of this machine.
func (d *Disks) Changes(_ context.Context, r *api.Replica, base, target api.UID) (*stack.Delta, error) {
	disk, err := d.get(r.Spec.Disk)
	if err != nil {
		return nil, err
	}
	return disk.Changes(string(r.Spec.UID), string(base), string(target))
}
