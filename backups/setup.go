package backups

import (
	"log/slog"

	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api/watch"
	"drover.io/drover/backups/planner"
)

// SetupController adds the planner, the room's part in the controller role, to mgr.
func SetupController(mgr ctrl.Manager, log *slog.Logger) error {
	if err := watch.AddIndexes(mgr); err != nil {
		return err
	}
	if err := watch.AddBackupIndexes(mgr); err != nil {
		return err
	}
	return planner.Setup(mgr, log)
}
