package imagestore

import (
	"log/slog"

	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/host"
	"drover.io/drover/imagestore/planner"
)

// SetupController adds the planner, the room's part in the controller role, to mgr.
func SetupController(mgr ctrl.Manager, log *slog.Logger) error {
	if err := watch.AddIndexes(mgr); err != nil {
		return err
	}
	return planner.Setup(mgr, log)
}

// SetupNode adds the host, the room's part in the node role, to mgr. disks finds a disk of the node by its UID.
func SetupNode(mgr ctrl.Manager, node string, disks func(api.UID) (block.Layers, error), o host.Options) error {
	if err := watch.AddIndexes(mgr); err != nil {
		return err
	}
	return host.Setup(mgr, node, disks, o)
}
