package planner

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// A volume's only replica leaves an evicted disk while the volume is detached: the node cuts the head, and a replica on
// another disk of the node takes over all layers and snapshots. From then on the volume can be attached, and the layers
// follow like the layers of a clone. Then the planner deletes the old replica.

// evictReplica asks for a replica that replaces the only member on an evicted disk, and deletes the replaced replica.
func (p *volumeReconciler) evictReplica(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
	if len(v.Status.Members) != 1 {
		return nil
	}
	i := slices.IndexFunc(mine, func(r api.Replica) bool { return r.Name == v.Status.Members[0] })
	if i < 0 {
		return nil
	}
	member := &mine[i]
	for k := range mine {
		r := &mine[k]
		from := member.Spec.From
		if from != nil && from.Whole && from.Replica == r.Spec.UID && r.DeletionTimestamp == nil {
			if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("replica %s: %w", r.Name, err)
			}
			p.events.Eventf(v, member, "Normal", "Moved", "Evict", "the replica is on disk %s now", member.Spec.Disk)
		}
		if next := r.Spec.From; next == nil || !next.Whole || next.Replica != member.Spec.UID {
			continue
		}
		// A replica that did not start before an attach is deleted, and the engine replaces the member instead:
		// after the attach's claim the last step of the move is refused.
		late := attached && v.Status.EngineNode != "" && !r.Status.Pinned
		if (r.Status.Mode == api.ReplicaFailed || late) && r.DeletionTimestamp == nil {
			return client.IgnoreNotFound(p.client.Delete(ctx, r))
		}
		reportMoving(v) // again, because a conflict may have lost the first write
		return nil
	}
	var n api.Node
	if err := p.client.Get(ctx, types.NamespacedName{Name: member.Spec.Node}, &n); err == nil && n.Spec.EvictionRequested {
		return nil // the engine moves the replica to another node
	}
	leaving, err := p.isDiskEvicted(ctx, member)
	if err == nil && !leaving && len(mine) == 1 {
		meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionEvicted)
	}
	if err != nil || !leaving || attached || member.Status.Mode != api.ReplicaCurrent || member.DeletionTimestamp != nil ||
		len(mine) > 1 || v.Spec.NumberOfReplicas > 1 {
		return err
	}
	// The old replica blocks no disk; placement refuses the evicted disk anyway.
	from := &cloneSource{replica: member, image: member.Labels[api.LabelImage], whole: true}
	_, err = p.placeOne(ctx, v, nil, from, nil)
	if api.Is(err, api.Full) {
		c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionEvicted)
		if c != nil && c.Reason != "Moving" && c.Reason != "NoDisk" {
			return nil // the engine moves the replica to another node, or a condition says why not
		}
		if setCondition(v, api.ConditionEvicted, false, "NoDisk", err.Error()) {
			p.events.Eventf(v, member, "Warning", "EvictionNoDisk", "Evict", "%s", err)
		}
		p.setWaiting(v.Name, true)
		return nil
	}
	if err == nil {
		reportMoving(v)
		p.setWaiting(v.Name, false)
	}
	return err
}

func reportMoving(v *api.Volume) {
	setCondition(v, api.ConditionEvicted, false, "Moving", "the replica is to be on another disk")
}

// isDiskEvicted reports whether the user evicts the disk of a replica.
func (p *volumeReconciler) isDiskEvicted(ctx context.Context, r *api.Replica) (bool, error) {
	var n api.Node
	if err := p.client.Get(ctx, types.NamespacedName{Name: r.Spec.Node}, &n); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	for _, st := range n.Status.Disks {
		if st.UID == r.Spec.Disk {
			return slices.ContainsFunc(n.Spec.Disks, func(d api.DiskSpec) bool {
				return d.Path == st.Path && d.EvictionRequested
			}), nil
		}
	}
	return false, nil
}

// volumesToEvict requeues the volumes with a replica on an evicted disk.
func (p *volumeReconciler) volumesToEvict(ctx context.Context, o client.Object) []reconcile.Request {
	n := o.(*api.Node)
	var all []reconcile.Request
	for _, d := range n.Spec.Disks {
		i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.Path == d.Path })
		if !d.EvictionRequested && !n.Spec.EvictionRequested || i < 0 {
			continue
		}
		var list api.ReplicaList
		on := client.MatchingFields{watch.ByDisk: string(n.Status.Disks[i].UID)}
		if err := p.client.List(ctx, &list, on, client.UnsafeDisableDeepCopy); err != nil {
			p.log.Error("replicas of a disk cannot be listed", "disk", d.Path, "err", err)
		}
		for k := range list.Items {
			all = append(all, watch.Requests(list.Items[k].Spec.Volume)...)
		}
	}
	return all
}
