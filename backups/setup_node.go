package backups

import (
	"context"

	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/backups/host"
	"drover.io/drover/backups/host/heal"
	"drover.io/drover/backups/host/images"
	"drover.io/drover/backups/host/restore"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/block"
)

// SetupNode adds the host, the room's part in the node role, to mgr, and returns what opens backups for restores. disks
// finds a disk of the node by its UID.
func SetupNode(mgr ctrl.Manager, node string, disks func(api.UID) (block.SnapshotDisk, error), o host.Options) (
	open func(ctx context.Context, url string) (block.Backup, error), err error) {
	disks, pacer := host.WatchDisks(disks), o.NewPacer(mgr.GetClient())
	healer := &heal.Disks{Live: mgr.GetAPIReader(), Node: node, Disk: disks, Pacer: pacer}
	o.Targets.Heal = healer.Heal
	if o.OpenDisk != nil {
		local := &images.Disks{Reader: mgr.GetClient(), Node: node, Disk: disks}
		o.Targets.Images = &longhorn.Images{Disk: o.OpenDisk, Local: local.Open}
	}
	repositories, err := targets.Setup(mgr, node, o.ForTargets())
	if err != nil {
		return nil, err
	}
	if err := host.Setup(mgr, node, disks, repositories, pacer, o); err != nil {
		return nil, err
	}
	backups := &restore.Backups{Reader: mgr.GetClient(), Repositories: repositories}
	return backups.Open, nil
}
