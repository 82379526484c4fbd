package planner

import (
	"context"
	"fmt"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// A disk is known by its UID, on every machine. The planner gives the replicas of a disk that moved to another machine
// to the new node, if the former node lives and reports that the disk is gone. If the former node is silent, only the
// user can tell, with `drover recover`.

// adoptMovedReplicas gives replicas to the nodes to which their disks have moved. A member of an engine on another
// node stays until a detach or until the engine drops the member.
func (p *volumeReconciler) adoptMovedReplicas(ctx context.Context, v *api.Volume, mine []api.Replica,
	att *api.Attachment) error {
	var nodes api.NodeList
	if err := p.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range mine {
		r := &mine[i]
		to := api.DiskMovedTo(nodes.Items, r.Spec.Disk, r.Spec.Node, time.Now())
		if to == "" || r.Status.Pinned || besideSource(r) || // a pinned or unfinished replica needs other disks of its node
			att != nil && att.Spec.Node != to && slices.Contains(v.Status.Members, r.Name) {
			continue
		}
		old := r.DeepCopy()
		api.MoveTo(r, &r.Spec.Node, to)
		if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("replica %s moves to node %s with its disk: %w", r.Name, to, err)
		}
		p.events.Eventf(v, r, "Normal", "DiskMoved", "Adopt",
			"disk %s has moved from node %s to node %s: replica %s is used there",
			r.Spec.Disk, old.Spec.Node, to, r.Name)
		p.log.Info("replica moved with its disk", "volume", v.Name, "replica", r.Name, "from", old.Spec.Node, "to", to)
	}
	return nil
}

// besideSource reports whether an unfinished replica copies from another disk of its node.
func besideSource(r *api.Replica) bool {
	from := r.Spec.From
	return (r.Status.Mode == "" || r.Status.Mode == api.ReplicaCreating) && from != nil && from.Disk != "" &&
		from.Disk != r.Spec.Disk
}

// volumesOnMovedDisks requeues the volumes with a replica on a disk that a node gained or lost.
func (p *volumeReconciler) volumesOnMovedDisks(ctx context.Context, o client.Object) []reconcile.Request {
	n := o.(*api.Node)
	var all []reconcile.Request
	for _, d := range n.Status.Disks {
		if d.UID == "" || !d.Ready && !d.Gone {
			continue
		}
		var list api.ReplicaList
		on := client.MatchingFields{watch.ByDisk: string(d.UID)}
		if err := p.client.List(ctx, &list, on, client.UnsafeDisableDeepCopy); err != nil {
			p.log.Error("replicas of a disk cannot be listed", "disk", d.Path, "err", err)
		}
		for i := range list.Items {
			if r := &list.Items[i]; (r.Spec.Node == n.Name) == d.Gone {
				all = append(all, watch.Requests(r.Spec.Volume)...)
			}
		}
	}
	return all
}
