package planner

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// expandReplicas raises the wish of the members. A disk without room for the promise keeps the old size.
func (p *volumeReconciler) expandReplicas(ctx context.Context, v *api.Volume, mine []api.Replica) error {
	overPct := int64(-1)
	for i := range mine {
		r := &mine[i]
		if r.Spec.Size >= v.Spec.Size || r.DeletionTimestamp != nil && !slices.Contains(v.Status.Members, r.Name) {
			continue
		}
		if overPct < 0 {
			overPct = p.settingNumber(ctx, "storage-over-provisioning-percentage")
		}
		if err := p.mayGrow(ctx, r, v.Spec.Size-r.Spec.Size, overPct); err != nil {
			p.setWaiting(v.Name, true)
			if api.Is(err, api.Full) && setCondition(v, api.ConditionExpanded, false, "NoRoom", err.Error()) {
				p.events.Eventf(v, r, "Warning", "ExpansionNoRoom", "Expand", "%s", err)
			}
			if api.KindOf(err) == api.Other {
				return err
			}
			return nil
		}
		p.setWaiting(v.Name, false)
		if c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionExpanded); c != nil && c.Reason == "NoRoom" {
			setCondition(v, api.ConditionExpanded, false, "Expanding", "")
		}
		old := r.DeepCopy()
		r.Spec.Size = v.Spec.Size
		if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("replica %s: %w", r.Name, err)
		}
	}
	return nil
}

// mayGrow tells whether a replica's disk can promise more bytes.
func (p *volumeReconciler) mayGrow(ctx context.Context, r *api.Replica, more, overPct int64) error {
	var n api.Node
	if err := p.client.Get(ctx, client.ObjectKey{Name: r.Spec.Node}, &n); apierrors.IsNotFound(err) {
		return api.Errorf(api.Unavailable, "node %s does not exist", r.Spec.Node)
	} else if err != nil {
		return err
	}
	promised, err := p.promisedBytes(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	t := clusterView{overPct: overPct, promised: func(api.UID) int64 { return promised }}
	for _, st := range n.Status.Disks {
		if st.UID != r.Spec.Disk {
			continue
		}
		var d api.DiskSpec
		if i := slices.IndexFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == st.Path }); i >= 0 {
			d = n.Spec.Disks[i]
		}
		if _, why := t.roomLeft(d, st, more); why != "" {
			return api.Errorf(api.Full, "disk %s of node %s: %s", st.Path, n.Name, why)
		}
		return nil
	}
	return api.Errorf(api.Unavailable, "disk %s of node %s is not there", r.Spec.Disk, r.Spec.Node)
}
