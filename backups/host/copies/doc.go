// Package copies makes the Backups and BackupBackingImages with spec.copyOf: it copies backups from one target into
// another, without reading a volume or an image. The owner of the copy's target (package targets) makes the copy, and
// is the only writer of its status. With the copy of a volume's backup, the owner creates a copy of the backup of the
// volume's image, unless the target has a backup of the image's content. The next copy of a volume's backup repeats a
// failed backup of the image.
//
// Invariants:
//
//   - A status is written by Update with the resourceVersion that the decision was made from. Work begins after
//     InProgress, with the node as ownerID, is in the status; so the next owner knows that the repository may have a
//     snapshot of the copy, and looks for the snapshot before the next attempt or the deletion.
//   - Right before the commit, the node reads the object again: a node that lost the copy to another owner, or whose
//     object is deleted, commits nothing.
//   - The origin's repository is locked for the whole copy, so the origin may be deleted meanwhile.
//   - A store of Longhorn is only read.
//
// Memory: a node makes one copy at a time, of whatever kind, in the Copies part of targets.Memory (32 MiB).
//
// Goroutines: the two reconcilers, one for each kind, are the manager's. Copies run in goroutines of targets.Jobs, a
// Runnable of the manager.
//
// Lock order: reconciler.mu guards the map of works and is a leaf.
package copies

import (
	"context"
	"log/slog"
	"sync"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block/semaphore"
)

// Options of the copies. No field has a default.
type Options struct {
	Log     *slog.Logger
	Version string // of Drover
	// RetryMin and RetryMax bound the pause after a failure, which doubles with each failure.
	RetryMin, RetryMax time.Duration
	ProgressEvery      time.Duration // between two reports
	Now                func() time.Time
}

// copiesAtOnce is how many copies a node makes at once.
const copiesAtOnce = 1

// reconciler reconciles the copies of one kind into targets that the node owns.
type reconciler struct {
	client.Client
	kind         kind
	live         client.Reader // without a cache
	node         string
	repositories *targets.Repositories
	jobs         *targets.Jobs
	opts         Options
	events       recorder.EventRecorder
	log          *slog.Logger
	places       *semaphore.Set[struct{}] // of both kinds

	mu    sync.Mutex
	works map[string]*work // by name of the copy
}

// Setup adds the reconcilers of a node's copies to a manager.
func Setup(mgr ctrl.Manager, node string, repositories *targets.Repositories, o Options) error {
	places := &semaphore.Set[struct{}]{}
	for _, k := range []kind{volumeBackups{}, imageBackups{}} {
		r := &reconciler{Client: mgr.GetClient(), kind: k, live: mgr.GetAPIReader(), node: node, repositories: repositories,
			jobs: targets.NewJobs(), opts: o, events: mgr.GetEventRecorder("drover-node-backups"), places: places,
			log: o.Log.With("loop", k.loopName()), works: map[string]*work{}}
		if err := r.setup(mgr); err != nil {
			return err
		}
	}
	return nil
}

func (r *reconciler) setup(mgr ctrl.Manager) error {
	if err := mgr.Add(r.jobs); err != nil {
		return err
	}
	if err := watch.AddCopyIndexes(mgr); err != nil {
		return err
	}
	isCopy := predicate.NewPredicateFuncs(func(o client.Object) bool { return api.IsCopy(o.(api.StoredBackup)) })
	all := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		return r.unfinished(ctx)
	})
	everyNode := false
	return ctrl.NewControllerManagedBy(mgr).Named(r.kind.loopName()).
		For(r.kind.newObject(), builder.WithPredicates(isCopy)).
		Watches(r.kind.newObject(), handler.EnqueueRequestsFromMapFunc(r.copiesOf), watch.Updates(ended)).
		Watches(&api.BackupBackingImage{}, all, builder.WithPredicates(deletions)).
		Watches(&api.BackupTarget{}, all, watch.Updates(becameAvailable)).
		Watches(&api.Node{}, all, watch.Updates(returned)).
		WatchesRawSource(source.Channel(r.jobs.Wake(), handler.EnqueueRequestsFromMapFunc(r.endedAndWaiting))).
		WithOptions(controller.Options{MaxConcurrentReconciles: 2, NeedLeaderElection: &everyNode, NewQueue: backlog.New}).
		Complete(r)
}

// ended reports whether a backup ended, which copies of it wait for.
func ended(old, now client.Object) bool {
	return old.(api.StoredBackup).Ended() != now.(api.StoredBackup).Ended()
}

// deletions of failed backups of images, which copies of volumes wait for.
var deletions = predicate.Funcs{CreateFunc: func(event.CreateEvent) bool { return false },
	UpdateFunc:  func(event.UpdateEvent) bool { return false },
	GenericFunc: func(event.GenericEvent) bool { return false },
	DeleteFunc: func(e event.DeleteEvent) bool {
		return e.Object.(*api.BackupBackingImage).Status.State == api.BackupError
	}}

func becameAvailable(old, now client.Object) bool {
	return !old.(*api.BackupTarget).Status.Available && now.(*api.BackupTarget).Status.Available
}

// returned reports whether a silent node is alive again. Silence itself has no event.
func returned(old, now client.Object) bool {
	a, b := old.(*api.Node), now.(*api.Node)
	return b.Status.Heartbeat.Sub(a.Status.Heartbeat.Time) >= a.SilentAfter()
}

// unfinished requests the unfinished copies among some objects of the cache.
func (r *reconciler) unfinished(ctx context.Context, which ...client.ListOption) (requests []reconcile.Request) {
	list, err := r.kind.listObjects(ctx, r.Client, which...)
	if err != nil {
		r.log.Warn("backups cannot be listed; the waiting copies start later", "err", err)
		return nil
	}
	for _, b := range list {
		if api.IsCopy(b) && !b.Ended() {
			requests = append(requests, watch.Request(b.GetName()))
		}
	}
	return requests
}

// copiesOf requests the unfinished copies of a backup. Each backup that ends brings the request, so an index finds
// them.
func (r *reconciler) copiesOf(ctx context.Context, o client.Object) []reconcile.Request {
	return r.unfinished(ctx, client.MatchingFields{watch.ByOrigin: o.GetName()})
}

// endedAndWaiting requests the copy of an ended job, and the copies that wait for its place.
func (r *reconciler) endedAndWaiting(ctx context.Context, o client.Object) []reconcile.Request {
	return append(watch.Requests(o.GetName()), r.unfinished(ctx)...)
}
