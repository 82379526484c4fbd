package targets

import (
	"context"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/target/limited"
)

// Setup adds the reconcilers of the BackupTargets to the manager of a node, and returns the node's repositories.
func Setup(mgr ctrl.Manager, node string, o Options) (*Repositories, error) {
	r := newReconciler(mgr, node, o)
	if err := r.setup(mgr); err != nil || r.opts.Heal == nil {
		return r.repositories, err
	}
	h := &healReconciler{Client: r.Client, node: node, opts: r.opts, repositories: r.repositories,
		jobs: newJobSet(), events: r.events, log: r.opts.Log.With("loop", "backup-heals"), heals: map[string]*nodeHeal{}}
	return r.repositories, h.setup(mgr)
}

func newReconciler(mgr ctrl.Manager, node string, o Options) *targetReconciler {
	o = o.withDefaults()
	events := mgr.GetEventRecorder("drover-node-backups")
	repositories := &Repositories{client: mgr.GetClient(), live: mgr.GetAPIReader(), node: node, cache: o.Cache,
		openStore: o.OpenStore, log: o.Log, events: events,
		images: o.Images, entries: map[string]*repositoryEntry{}, rates: map[string]*limited.Rates{},
		memory: o.Memory, blocks: longhorn.NewMemory(sharedBlocks)}
	repositories.digests = repositories.openDigests()
	return &targetReconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(), node: node, opts: o,
		repositories: repositories, jobs: newJobSet(), events: events,
		log: o.Log.With("loop", "backup-targets"), owner: ownerOf, records: map[string]*targetRecord{}}
}

func (r *targetReconciler) setup(mgr ctrl.Manager) error {
	if err := mgr.Add(r.jobs); err != nil {
		return err
	}
	if err := mgr.Add(cacheCleaner{r}); err != nil {
		return err
	}
	target := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		return watch.Requests(o.(api.StoredBackup).Target())
	})
	changes := builder.WithPredicates(predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return e.Object.GetDeletionTimestamp() != nil },
		UpdateFunc: func(e event.UpdateEvent) bool { return isNews(e.ObjectOld, e.ObjectNew) },
		DeleteFunc: func(e event.DeleteEvent) bool { return true }, // an image's backup may wait for it
	})
	everyNode := false
	return ctrl.NewControllerManagedBy(mgr).Named("backup-targets").For(&api.BackupTarget{}).
		Watches(&api.Backup{}, target, changes).
		Watches(&api.BackupBackingImage{}, target, changes).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(r.allTargets), watch.Updates(returned)).
		WatchesRawSource(source.Channel(r.jobs.wake, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, NeedLeaderElection: &everyNode, NewQueue: backlog.New}).
		Complete(r)
}

// isNews reports whether a backup became one to delete from the store, or ended, or an attempt of the backup failed.
func isNews(old, now client.Object) bool {
	_, before := old.GetAnnotations()[api.AnnotationForceDelete]
	_, forced := now.GetAnnotations()[api.AnnotationForceDelete]
	a, b := old.(api.StoredBackup), now.(api.StoredBackup)
	return !old.GetDeletionTimestamp().Equal(now.GetDeletionTimestamp()) || before != forced ||
		isToDelete(a) != isToDelete(b) || a.Ended() != b.Ended() || !nextTry(a).Equal(nextTry(b))
}

// returned reports whether a silent node is alive again, or a node is deleted. Silence itself has no event.
func returned(old, now client.Object) bool {
	a, b := old.(*api.Node), now.(*api.Node)
	return !isAlive(a, b.Status.Heartbeat.Time) || !a.DeletionTimestamp.Equal(b.DeletionTimestamp)
}

// allTargets requests all targets, because their owners may change.
func (r *targetReconciler) allTargets(ctx context.Context, _ client.Object) []reconcile.Request {
	var list api.BackupTargetList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		r.log.Error("backup targets cannot be listed", "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		all = append(all, watch.Request(list.Items[i].Name))
	}
	return all
}

// cacheCleaner removes the index tables of deleted targets, and the locks of killed processes, when the manager starts.
type cacheCleaner struct{ *targetReconciler }

var _ manager.Runnable = cacheCleaner{}

// Start implements manager.Runnable.
func (c cacheCleaner) Start(ctx context.Context) error {
	if err := c.repositories.removeCaches(ctx); err != nil {
		c.log.Warn("the index tables of deleted backup targets cannot be removed", "err", err)
	}
	if err := c.repositories.releaseLocks(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("locks of an ended process may be left in a backup target", "err", err)
	}
	return nil
}

// NeedLeaderElection is false: every node has its own index tables.
func (cacheCleaner) NeedLeaderElection() bool { return false }
