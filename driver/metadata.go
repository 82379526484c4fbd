package driver

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/controller"
)

// openChanges opens the maps of two snapshots on the disk of a replica.
func (s *server) openChanges(ctx context.Context, r *api.Replica, base, target api.UID) (controller.Changes, error) {
	if s.disks == nil || r.Spec.Node != s.node {
		return nil, api.Errorf(api.Unavailable, "the maps are on node %s: ask the CSI socket there", r.Spec.Node)
	}
	x, err := s.disks.Changes(ctx, r, base, target)
	if err != nil {
		return nil, err
	}
	return x, nil
}
