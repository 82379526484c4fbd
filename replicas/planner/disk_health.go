package planner

import (
	"context"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// The status of a replica on a disk that its node cannot use is out of date. The replica counts as missing until the
// disk is ready.

// deadDisk returns a function that explains why the disk of a replica cannot be used; empty: the disk is ready.
func (p *volumeReconciler) deadDisk(ctx context.Context) func(*api.Replica) string {
	return func(r *api.Replica) string {
		var n api.Node
		if err := p.client.Get(ctx, client.ObjectKey{Name: r.Spec.Node}, &n); err != nil {
			return fmt.Sprintf("node %s is not known: %v", r.Spec.Node, err)
		}
		i := slices.IndexFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.UID == r.Spec.Disk })
		switch {
		case i < 0:
			return fmt.Sprintf("disk %s is not on node %s", r.Spec.Disk, r.Spec.Node)
		case !n.Status.Disks[i].Ready:
			return fmt.Sprintf("disk %s of node %s is not ready: %s", n.Status.Disks[i].Path, r.Spec.Node,
				n.Status.Disks[i].Message)
		}
		return ""
	}
}

// diskHealthChanged reports whether a Node update changes the health or eviction of a disk.
func diskHealthChanged(old, now client.Object) bool {
	a, b := old.(*api.Node), now.(*api.Node)
	was, is := a.Status.Disks, b.Status.Disks
	return a.Generation != b.Generation || !slices.EqualFunc(was, is, func(x, y api.DiskStatus) bool {
		return x.UID == y.UID && x.Ready == y.Ready
	})
}

// volumesOnNode requeues the volumes with a replica on a node.
func (p *volumeReconciler) volumesOnNode(ctx context.Context, o client.Object) []reconcile.Request {
	var list api.ReplicaList
	on := client.MatchingFields{watch.ByNode: o.GetName()}
	if err := p.client.List(ctx, &list, on, client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("replicas of a node cannot be listed", "node", o.GetName(), "err", err)
	}
	var all []reconcile.Request
	for i := range list.Items {
		all = append(all, watch.Requests(list.Items[i].Spec.Volume)...)
	}
	return all
}
