package snapshot

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/maintain"
	"drover.io/drover/replicas/stack"
)

// Attachments are the volumes with an engine on this node, as snapshots see them. The caller of a method but Resuming
// holds the volume's lock.
type Attachments interface {
	// Resuming reports whether the device of a volume is being resumed.
	Resuming(volume string) bool
	// HasSession reports whether a volume is attached here.
	HasSession(volume string) bool
	// Engine is the engine of a volume, with its member on this node, if any: the engine of the attached volume, or an
	// offline engine. The caller calls end after the operation.
	Engine(ctx context.Context, v *api.Volume) (e *engine.Engine, local api.UID, end func() error, err error)
	// OpenedMeta is the stack of a replica that the engine of an attached volume has for its local member.
	OpenedMeta(volume string, replica api.UID) (m stack.Meta, open bool)
	// Freeze freezes the file system of an attached volume. A nil thaw: the volume has no mounted file system here.
	Freeze(ctx context.Context, v *api.Volume) (thaw func() error, err error)
	// CompareSoon has the members of an attached volume compared in a new snapshot.
	CompareSoon(volume string, snapshot stack.Snapshot)
}

// Replicas are the replicas on this node's disks.
type Replicas interface {
	// Disk is the open disk of a uid.
	Disk(ctx context.Context, uid api.UID) (*stack.Disk, error)
}

// Options of New.
type Options struct {
	Node        *localnode.Node
	Merges      *maintain.MergeWorker
	Attachments Attachments
	Replicas    Replicas
}

// Snapshots of the volumes for which this node is responsible.
type Snapshots struct {
	*localnode.Node
	merges      *maintain.MergeWorker
	attachments Attachments
	replicas    Replicas

	queue   atomic.Pointer[backlog.Queue]
	waiting localnode.Waiters // snapshots that wait for a disk or a device

	mu    sync.Mutex
	trees map[api.UID]*Tree // by replica
	found map[api.UID]bool  // replicas whose snapshots may lack objects
}

// New has no tree yet.
func New(o Options) *Snapshots {
	return &Snapshots{Node: o.Node, merges: o.Merges, attachments: o.Attachments, replicas: o.Replicas,
		trees: map[api.UID]*Tree{}, found: map[api.UID]bool{}}
}

// Setup adds the reconcilers of snapshots and groups to mgr.
func (ss *Snapshots) Setup(mgr ctrl.Manager, opts controller.Options) error {
	if err := ss.setupGroups(mgr, opts); err != nil {
		return err
	}
	unfinished := func(volumeOf func(client.Object) string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return ss.listUnfinished(ctx, volumeOf(o))
		})
	}
	waiting := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return ss.waiting.Requests()
	})
	return ctrl.NewControllerManagedBy(mgr).Named("snapshot").
		For(&api.Snapshot{}, watch.Updates(func(old, now client.Object) bool {
			return watch.WishChanged(old, now) || now.(*api.Snapshot).Bare()
		})).
		Watches(&api.Replica{}, unfinished(func(o client.Object) string { return o.(*api.Replica).Spec.Volume }),
			ss.OfNode(func(o client.Object) string { return o.(*api.Replica).Spec.Node })).
		Watches(&api.Attachment{}, unfinished(func(o client.Object) string { return o.(*api.Attachment).Spec.Volume })).
		Watches(&api.Volume{}, unfinished(client.Object.GetName), watch.Updates(localnode.MembersChanged)).
		Watches(&api.Node{}, waiting, ss.OfNode(client.Object.GetName), watch.Updates(watch.DisksChanged)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			ss.ReachedAPI()
			ss.queue.Store(&q)
			return nil
		})).
		WithOptions(opts).Complete(&reconciler{ss})
}

// listUnfinished lists the snapshots of a volume that differ from the wish of their object, or lack a digest.
func (ss *Snapshots) listUnfinished(ctx context.Context, volume string) []reconcile.Request {
	var list api.SnapshotList
	err := ss.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}, client.UnsafeDisableDeepCopy)
	if err != nil {
		ss.Log.Error("snapshots of a volume cannot be listed", "volume", volume, "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if s := &list.Items[i]; !s.Status.ReadyToUse || s.DeletionTimestamp != nil || s.Status.Checksum == "" {
			all = append(all, watch.Requests(s.Name)...)
		}
	}
	return all
}

// wake requeues snapshots by their names.
func (ss *Snapshots) wake(names ...string) {
	q := ss.queue.Load()
	if q == nil {
		return
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if name != "" && name != api.VolumeHead {
			(*q).Add(watch.Request(name))
		}
	}
}

// digestsReported is when the digests of finished layers are reported: by then most of the snapshots are reconciled
// anyway.
const digestsReported = 2 * time.Second

// DigestsMade has snapshots reported again soon, by name: their layers have digests now.
func (ss *Snapshots) DigestsMade(names []string) {
	q := ss.queue.Load()
	if q == nil {
		return
	}
	for _, name := range names {
		(*q).AddAfter(watch.Request(name), digestsReported)
	}
}

// Changed forgets the tree of a replica, and has the named snapshots reported again.
func (ss *Snapshots) Changed(replica api.UID, names ...string) {
	ss.forgetTree(replica)
	ss.wake(names...)
}

// Sealed notes that the head of a volume became a layer, which the merge worker finishes on the local member.
func (ss *Snapshots) Sealed(ctx context.Context, v *api.Volume, local api.UID) {
	ss.mergeLocal(ctx, v, local)
	ss.Changed(local)
}

// Found notes a replica with snapshots, which may lack objects.
func (ss *Snapshots) Found(replica api.UID) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.found[replica] = true
}
