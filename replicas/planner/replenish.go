package planner

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

const settingReplenish = "replica-replenishment-wait-interval"

// placeRest places the other replicas of a new volume. Without enough disks the volume starts with fewer replicas and
// a condition says so; the planner adds the rest when a disk has room.
func (p *volumeReconciler) placeRest(ctx context.Context, v *api.Volume, image *api.BackingImage,
	mine []api.Replica) ([]api.Replica, error) {
	for len(mine) < int(v.Spec.NumberOfReplicas) {
		r, err := p.placeOne(ctx, v, image, nil, mine)
		if api.Is(err, api.Full) {
			p.reportPartlyPlaced(v, len(mine), err)
			return mine, nil
		}
		if err != nil {
			return mine, err
		}
		mine = append(mine, *r)
	}
	return mine, nil
}

// reportPartlyPlaced reports that a volume has too few replicas.
func (p *volumeReconciler) reportPartlyPlaced(v *api.Volume, have int, why error) {
	p.setWaiting(v.Name, true)
	msg := fmt.Sprintf("%d of %d replicas have a disk; %v", have, v.Spec.NumberOfReplicas, why)
	if setCondition(v, api.ConditionScheduled, false, "Partly", msg) {
		p.events.Eventf(v, nil, "Warning", "NoDisk", "Schedule", "%s", msg)
	}
}

// replenish adds and drops replicas until a volume has its replica count. The volume's engine rebuilds a new replica
// and makes the replica a member.
func (p *volumeReconciler) replenish(ctx context.Context, v *api.Volume, mine []api.Replica,
	att *api.Attachment) error {
	attached := ""
	if att != nil && att.DeletionTimestamp == nil {
		attached = att.Spec.Node
	}
	if v.Spec.NumberOfReplicas < 2 && len(v.Status.Members) < 2 {
		if far, err := p.leavesNode(ctx, v, mine, att); !far || err != nil {
			p.reportLocality(v, mine, attached, nil)
			return err
		}
	}
	var nodes api.NodeList
	if err := p.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	byName := map[string]*api.Node{}
	for i := range nodes.Items {
		byName[nodes.Items[i].Name] = &nodes.Items[i]
	}
	s := replicaSet{v: v, mine: mine, wait: time.Duration(p.settingNumber(ctx, settingReplenish)) * time.Second,
		away: func(node string) time.Duration {
			n := byName[node]
			switch {
			case n == nil:
				return forEver
			case !p.isSilent(node):
				return 0
			}
			return max(time.Since(n.Status.Heartbeat.Time), time.Second)
		},
		lost: func(r *api.Replica) bool { return p.deadDisk(ctx)(r) != "" },
		leaving: func(r *api.Replica) bool {
			return r.Spec.Transient || r.Status.BeyondRepair && len(v.Status.Members) > 1 ||
				isLeaving(byName[r.Spec.Node], r.Spec.Disk)
		},
		attached: attached,
	}
	s.zone = func(node string) string {
		if n := byName[node]; n != nil {
			return zoneOf(n)
		}
		return ""
	}
	d := decideReplicas(s)
	p.requeueAfter(v.Name, d.later)
	if err := p.withdrawLeave(ctx, mine, d.stay); err != nil {
		return err
	}
	if err := p.dropReplicas(ctx, v, mine, d.drop, att != nil); err != nil {
		return err
	}
	var far error // why no replica can be where the volume is used
	for range d.add {
		image, err := p.usableImage(ctx, v)
		if err == nil {
			var r *api.Replica
			r, err = p.placeOne(ctx, v, image, nil, mine, func(t *clusterView) {
				if t.leaving, t.prefer = d.leaving, d.prefer; d.extra {
					t.on = d.prefer
				}
			}, preferSameNode(v, mine, attached))
			if err == nil {
				mine = append(mine, *r)
				p.events.Eventf(v, r, "Normal", "ReplicaAdded", "Replenish", "replica %s is made on node %s", r.Name, r.Spec.Node)
				continue
			}
		}
		if d.extra && api.KindOf(err) != api.Other {
			far = err
			break
		}
		if api.KindOf(err) != api.Other {
			p.reportPartlyPlaced(v, len(mine), err)
			p.reportLocality(v, mine, attached, nil)
			return nil
		}
		return err
	}
	p.reportLocality(v, mine, attached, far)
	p.setWaiting(v.Name, far != nil)
	if d.add == 0 || len(mine) >= int(v.Spec.NumberOfReplicas) {
		setCondition(v, api.ConditionScheduled, true, "Placed", "every replica has a disk")
	}
	s.mine = mine
	return p.balanceReplicas(ctx, v, &s, &d, att)
}

const forEver = 100 * 365 * 24 * time.Hour

// isLeaving reports whether replicas leave a disk: the user evicts the disk or the node, or removed the disk.
func isLeaving(n *api.Node, disk api.UID) bool {
	if n == nil {
		return false
	}
	if n.Spec.EvictionRequested {
		return true
	}
	i := slices.IndexFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.UID == disk })
	if i < 0 {
		return false
	}
	j := slices.IndexFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == n.Status.Disks[i].Path })
	return j < 0 || n.Spec.Disks[j].EvictionRequested // taken out of the spec, or to be left
}

// dropReplicas deletes replicas. A member leaves the members first: through the engine, which reads the wish from the
// Replica, or here if the volume has no engine.
func (p *volumeReconciler) dropReplicas(ctx context.Context, v *api.Volume, mine []api.Replica, names []string,
	attached bool) error {
	for _, name := range names {
		i := slices.IndexFunc(mine, func(r api.Replica) bool { return r.Name == name })
		r := &mine[i]
		if at := slices.Index(v.Status.Members, name); at >= 0 {
			if attached || v.Status.EngineNode != "" {
				if err := p.setLeave(ctx, r); err != nil {
					return err
				}
				continue
			}
			if len(v.Status.Members) < 2 {
				continue
			}
			// A concurrent attach makes the write of the status conflict.
			v.Status.Members = slices.Delete(slices.Clone(v.Status.Members), at, at+1)
			v.Status.Epoch++
			return nil // the next reconcile deletes the replica
		}
		if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replica %s: %w", name, err)
		}
		p.events.Eventf(v, r, "Normal", "ReplicaDropped", "Replenish", "replica %s on node %s is deleted: it is "+
			"not needed now", name, r.Spec.Node)
	}
	return p.forgetLost(ctx, v, mine)
}

// setLeave asks that a replica leaves its volume.
func (p *volumeReconciler) setLeave(ctx context.Context, r *api.Replica) error {
	if r.Spec.Leave {
		return nil
	}
	old := r.DeepCopy()
	r.Spec.Leave = true
	if err := p.client.Patch(ctx, r, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}

// withdrawLeave withdraws the wish that replicas leave, after a drain was undone or another replica failed.
func (p *volumeReconciler) withdrawLeave(ctx context.Context, mine []api.Replica, names []string) error {
	for i := range mine {
		r := &mine[i]
		if !slices.Contains(names, r.Name) {
			continue
		}
		old := r.DeepCopy()
		r.Spec.Leave = false
		if err := p.client.Patch(ctx, r, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replica %s: %w", r.Name, err)
		}
	}
	return nil
}

// forgetLost removes the finalizer of deleted replicas whose Node does not exist: no node will.
func (p *volumeReconciler) forgetLost(ctx context.Context, v *api.Volume, mine []api.Replica) error {
	for i := range mine {
		r := &mine[i]
		if r.DeletionTimestamp == nil || slices.Contains(v.Status.Members, r.Name) {
			continue
		}
		var n api.Node
		err := p.client.Get(ctx, types.NamespacedName{Name: r.Spec.Node}, &n)
		if err == nil || !apierrors.IsNotFound(err) {
			continue
		}
		r.Finalizers = slices.DeleteFunc(r.Finalizers, func(f string) bool { return f == api.Finalizer })
		if err := p.client.Update(ctx, r); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replica %s: %w", r.Name, err)
		}
	}
	return nil
}

// notMembers says which replicas are not whole, in words.
func notMembers(v *api.Volume, mine []api.Replica) string {
	var names []string
	for i := range mine {
		if r := &mine[i]; !slices.Contains(v.Status.Members, r.Name) && r.DeletionTimestamp == nil {
			names = append(names, r.Name+" on "+r.Spec.Node)
		}
	}
	return strings.Join(names, ", ")
}
