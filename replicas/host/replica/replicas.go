package replica

import (
	"context"
	"sync"
	"sync/atomic"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/maintain"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/stack"
)

// Attachments are the attached volumes of this node, as replicas see them. A caller of Opened, Uses, Expand and
// SealOffline holds the volume's lock.
type Attachments interface {
	// Attached reports whether this node has a device of a volume, be the device resumed or not.
	Attached(volume string, uid api.UID) bool
	// Resuming reports whether the device of a volume is being resumed.
	Resuming(volume string) bool
	// Rebuilding reports whether an offline engine of this node rebuilds a volume.
	Rebuilding(volume string) bool
	// Opened is a replica that an engine of this node has open, or had; nil: no engine of this node had. While recording,
	// a call of the replica would wait for the disk.
	Opened(volume string, replica api.UID) (r *stack.Replica, recording bool)
	// Uses reports whether an engine of this node has a replica for a member, or is about to.
	Uses(ctx context.Context, volume string, replica api.UID) (bool, error)
	// Expand expands an attached volume. False: no engine of this node has the replica.
	Expand(ctx context.Context, volume string, replica api.UID, size int64) (bool, error)
	// RoomOn wakes the writes that wait for room on a disk.
	RoomOn(disk api.UID)
	// SealOffline seals the heads of a detached volume.
	SealOffline(ctx context.Context, v *api.Volume) error
}

// Snapshots are the snapshots in the stacks of this node, as replicas see them.
type Snapshots interface {
	// Changed has the named snapshots of a replica reported again.
	Changed(replica api.UID, names ...string)
	// Found notes a replica with snapshots, which may lack objects.
	Found(replica api.UID)
	// CreateObjects creates the objects that snapshots of a found replica lack.
	CreateObjects(ctx context.Context, r *api.Replica, disk *stack.Disk) error
}

// Options of New.
type Options struct {
	Node        *localnode.Node
	Merges      *maintain.MergeWorker
	Scrubs      *maintain.Scrubber
	Remote      *remote.Server
	Layers      *remote.Layers
	Attachments Attachments
	Snapshots   Snapshots
}

// Replicas of a node.
type Replicas struct {
	*localnode.Node
	merges      *maintain.MergeWorker
	scrubs      *maintain.Scrubber
	remote      *remote.Server
	layers      *remote.Layers
	attachments Attachments
	snapshots   Snapshots

	queue   atomic.Pointer[backlog.Queue]
	waiting localnode.Waiters // replicas that wait for a disk or an image
	jobs    *copyJobs

	mu       sync.Mutex
	exist    map[api.UID]bool      // replicas that exist on their disk
	doubts   map[api.UID]bool      // replicas whose files are missing or damaged
	listed   map[api.UID]bool      // disks whose replicas exist has
	complete map[api.UID]bool      // replicas whose disk has all layers
	pinned   map[api.UID][]api.UID // removed replicas that may still have a pin, by the disk of the pin
}

// New has no copy job yet.
func New(o Options) *Replicas {
	return &Replicas{Node: o.Node, merges: o.Merges, scrubs: o.Scrubs, remote: o.Remote, layers: o.Layers,
		attachments: o.Attachments, snapshots: o.Snapshots, jobs: newCopyJobs(), exist: map[api.UID]bool{},
		doubts: map[api.UID]bool{}, listed: map[api.UID]bool{}, complete: map[api.UID]bool{},
		pinned: map[api.UID][]api.UID{}}
}

// Close ends the copy jobs. The manager of the reconciler has stopped.
func (rs *Replicas) Close() { rs.jobs.close() }

// Setup adds the reconciler to mgr.
func (rs *Replicas) Setup(mgr ctrl.Manager, opts controller.Options) error {
	waiting := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return rs.waiting.Requests()
	})
	return ctrl.NewControllerManagedBy(mgr).Named("replica").
		For(&api.Replica{}, rs.OfNode(func(o client.Object) string { return o.(*api.Replica).Spec.Node })).
		Watches(&api.ImageCopy{}, waiting, rs.OfNode(func(o client.Object) string { return o.(*api.ImageCopy).Spec.Node })).
		Watches(&api.Node{}, waiting, rs.OfNode(client.Object.GetName), watch.Updates(watch.DisksChanged)).
		Watches(&api.Volume{}, handler.EnqueueRequestsFromMapFunc(rs.replicasOf),
			watch.Updates(localnode.MembersChanged)).
		Watches(&api.Attachment{}, handler.EnqueueRequestsFromMapFunc(rs.awaitingDetach)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			rs.ReachedAPI()
			rs.scrubs.Queue(&q)
			rs.queue.Store(&q)
			return nil
		})).
		WithOptions(opts).Complete(rs)
}

// Wake requeues a replica, by the name of its object.
func (rs *Replicas) Wake(name string) {
	if q := rs.queue.Load(); q != nil {
		(*q).Add(watch.Request(name))
	}
}

// replicasOf are the replicas of a volume on this node: its members have changed.
func (rs *Replicas) replicasOf(ctx context.Context, o client.Object) []reconcile.Request {
	var list api.ReplicaList
	if err := rs.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: o.GetName()}); err != nil {
		rs.Log.Error("replicas of a volume cannot be listed", "volume", o.GetName(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for _, r := range list.Items {
		if r.Spec.Node == rs.Name {
			all = append(all, watch.Requests(r.Name)...)
		}
	}
	return all
}

// Created notes that a replica exists on its disk.
func (rs *Replicas) Created(replica api.UID) { rs.setOnDisk(replica, true) }
