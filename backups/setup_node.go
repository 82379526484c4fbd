package backups

import (
	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/backups/host"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block"
)

// SetupNode adds the host, the room's part in the node role, to mgr. disks finds a disk of the node by its UID.
func SetupNode(mgr ctrl.Manager, node string, disks func(api.UID) (block.SnapshotDisk, error), o host.Options) error {
	repositories, err := targets.Setup(mgr, node, o.Targets)
	if err != nil {
		return err
	}
	return host.Setup(mgr, node, disks, repositories, o)
}
