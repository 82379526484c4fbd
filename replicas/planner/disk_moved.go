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

// A disk is known by its uid, on whatever machine it is. One that was taken out of a machine and put into another is
// adopted there, with its settings and with what is on it, where the former node lives and says that it is gone. Of a
// node that says nothing nobody knows: there it takes the user, and `drover recover`.

// adoptMovedReplicas gives replicas to the nodes that their disks have moved to. A member that an engine elsewhere works with stays
// until the volume is detached, or until the engine has given it up.
func (p *volumeReconciler) adoptMovedReplicas(ctx context.Context, v *api.Volume, mine []api.Replica, att *api.Attachment) error {
	var nodes api.NodeList
	if err := p.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range mine {
		r := &mine[i]
		to := api.DiskMovedTo(nodes.Items, r.Spec.Disk, r.Spec.Node, time.Now())
		if to == "" || r.Status.Pinned || besideSource(r) || // it needs other disks of its node
			att != nil && att.Spec.Node != to && slices.Contains(v.Status.Members, r.Name) {
			continue
		}
		old := r.DeepCopy()
		api.MoveTo(r, &r.Spec.Node, to)
		if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("replica %s, whose disk is on node %s now: %w", r.Name, to, err)
		}
		p.events.Eventf(v, r, "Normal", "DiskMoved", "Adopt",
			"disk %s has moved from node %s to node %s: replica %s is used there",
			r.Spec.Disk, old.Spec.Node, to, r.Name)
		p.log.Info("replica moved with its disk", "volume", v.Name, "replica", r.Name, "from", old.Spec.Node, "to", to)
	}
	return nil
}

// besideSource reports whether a replica is still to be made, from one on another disk of its node.
func besideSource(r *api.Replica) bool {
	from := r.Spec.From
	return (r.Status.Mode == "" || r.Status.Mode == api.ReplicaCreating) && from != nil && from.Disk != "" &&
		from.Disk != r.Spec.Disk
}

// volumesOnMovedDisks wakes the volumes that have a replica on a disk which is here now, or is here no more.
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
