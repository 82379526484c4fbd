package attach

import (
	"context"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// Setup adds the reconciler of Attachments, and the runs of offline rebuilds, to mgr.
func (as *Attachments) Setup(mgr ctrl.Manager, opts controller.Options) error {
	if err := setupMetrics(as); err != nil {
		return err
	}
	if err := mgr.Add(manager.RunnableFunc(as.offline.runRebuilds)); err != nil {
		return err
	}
	mine := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		return as.attachmentOf(ctx, o)
	})
	return ctrl.NewControllerManagedBy(mgr).Named("attachment").
		For(&api.Attachment{}, as.OfNode(func(o client.Object) string { return o.(*api.Attachment).Spec.Node })).
		Watches(&api.Volume{}, mine, watch.Updates(volumeMatters)).
		Watches(&api.Replica{}, handler.EnqueueRequestsFromMapFunc(as.replicaChanged), watch.Updates(replicaMatters)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(as.listUnready),
			as.OfNode(client.Object.GetName), watch.Updates(watch.DisksChanged)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			as.ReachedAPI()
			as.queue.Store(&q)
			for _, s := range as.Sessions() { // resumed sessions may have lost their Attachment
				q.Add(watch.Request(s.Volume))
			}
			return nil
		})).
		WithOptions(opts).Complete(&reconciler{as})
}

// attachmentOf wakes the Attachment of a volume on this node.
func (as *Attachments) attachmentOf(ctx context.Context, o client.Object) []reconcile.Request {
	var a api.Attachment
	if as.Client.Get(ctx, client.ObjectKey{Name: o.GetName()}, &a) != nil || a.Spec.Node != as.Name {
		return nil
	}
	return watch.Requests(a.Name)
}

// replicaChanged wakes the rebuild loop of a volume that is attached here, or the Attachment of a volume that is to be
// attached here and may wait for the replica.
func (as *Attachments) replicaChanged(ctx context.Context, o client.Object) []reconcile.Request {
	volume := o.(*api.Replica).Spec.Volume
	s := as.Session(volume)
	if s == nil {
		return as.attachmentOf(ctx, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume}})
	}
	s.membership.wakeRebuilds()
	return nil
}

// replicaMatters reports whether a replica's change can matter to the volume's engine: the replica can join, is to
// leave, or is damaged.
func replicaMatters(old, now client.Object) bool {
	a, b := old.(*api.Replica), now.(*api.Replica)
	return a.Status.Mode != b.Status.Mode || a.Spec.Leave != b.Spec.Leave ||
		a.DeletionTimestamp.IsZero() != b.DeletionTimestamp.IsZero() || wantsRepair(a) != wantsRepair(b) ||
		!slices.Equal(a.Status.Damage, b.Status.Damage)
}

// listUnready lists the Attachments of this node that wait for a disk.
func (as *Attachments) listUnready(ctx context.Context, _ client.Object) []reconcile.Request {
	var list api.AttachmentList
	if err := as.Client.List(ctx, &list); err != nil {
		as.Log.Error("attachments cannot be listed", "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if a := &list.Items[i]; a.Spec.Node == as.Name && (!a.Status.Ready || a.DeletionTimestamp != nil) {
			all = append(all, watch.Requests(a.Name)...)
		}
	}
	return all
}

// volumeMatters reports whether a volume's change can matter to its Attachment.
func volumeMatters(old, now client.Object) bool {
	x, y := old.(*api.Volume), now.(*api.Volume)
	a, b := x.Status, y.Status
	if x.Generation != y.Generation || !maps.Equal(x.Annotations, y.Annotations) || !maps.Equal(x.Labels, y.Labels) {
		return true // the disk has a record of the object
	}
	return a.Epoch != b.Epoch || a.EngineNode != b.EngineNode || len(a.Members) != len(b.Members) || a.UID != b.UID
}
