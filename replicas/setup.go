package replicas

import (
	"errors"
	"log/slog"

	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/planner"
)

// SetupController adds the planner, the room's part in the controller role, to mgr.
func SetupController(mgr ctrl.Manager, log *slog.Logger) error {
	if err := errors.Join(watch.AddIndexes(mgr), watch.AddBackupIndexes(mgr)); err != nil {
		return err
	}
	return planner.Setup(mgr, log)
}

// SetupNode adds the node role's part of the room, the disks of this machine, to mgr.
func SetupNode(mgr ctrl.Manager, o disks.Options) (*disks.Registry, error) {
	if err := watch.AddIndexes(mgr); err != nil {
		return nil, err
	}
	o.Resend, o.Registry.VolumeBelow = device.ResendSupported() == nil, device.Below
	return disks.Setup(mgr, o)
}
