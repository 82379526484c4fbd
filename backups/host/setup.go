package host

import (
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	ctrlsource "sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/copies"
	"drover.io/drover/backups/host/holders"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
)

// Setup adds the maker of a node's backups, and the reconciler of copies, to a manager. disks finds a disk of the node
// by its UID.
func Setup(mgr ctrl.Manager, node string, disks func(api.UID) (block.SnapshotDisk, error),
	repositories *targets.Repositories, pacer *pace.Pacer, o Options) error {
	o = o.withDefaults()
	m := &maker{Client: mgr.GetClient(), live: mgr.GetAPIReader(), node: node, disks: disks, repositories: repositories,
		opts: o, events: mgr.GetEventRecorder("drover-node-backups"), log: o.Log.With("loop", "backups"),
		holders: &holders.Set{}, works: newWorkSet(), pacer: pacer}
	if err := copies.Setup(mgr, node, repositories, copies.Options{Log: o.Log, Version: o.Version,
		RetryMin: o.RetryMin, RetryMax: o.RetryMax, ProgressEvery: o.ProgressEvery, Now: time.Now}); err != nil {
		return err
	}
	if err := mgr.Add(m.works); err != nil {
		return err
	}
	if err := mgr.Add(collector{m}); err != nil {
		return err
	}
	everyNode := false
	return ctrl.NewControllerManagedBy(mgr).Named("backups").For(&api.Backup{}, builder.WithPredicates(ofNode(node))).
		Watches(&api.BackupBackingImage{}, handler.EnqueueRequestsFromMapFunc(requestImage),
			builder.WithPredicates(ofNode(node))).
		WatchesRawSource(ctrlsource.Channel(m.works.wake, handler.EnqueueRequestsFromMapFunc(m.endedAndWaiting))).
		Watches(&api.Setting{}, handler.EnqueueRequestsFromMapFunc(m.waiting), watch.Named(settingPlaces)).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, NeedLeaderElection: &everyNode, NewQueue: backlog.New}).
		Complete(m)
}

// ofNode passes events of the backups that the node makes, or made until the event.
func ofNode(node string) predicate.Predicate {
	has := func(o client.Object) bool {
		at, _ := o.(api.StoredBackup).SourceDisk()
		return at == node
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return has(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return has(e.ObjectOld) || has(e.ObjectNew) },
		DeleteFunc: func(e event.DeleteEvent) bool { return has(e.Object) },
	}
}
