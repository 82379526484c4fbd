package replicas

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
)

func equalStatus(a, b *api.VolumeStatus) bool { return equality.Semantic.DeepEqual(a, b) }

// describe computes what the status says of a volume that exists: state, robustness, sizes, conditions.
func describe(v *api.Volume, mine []api.Replica, att *api.Attachment, silent func(node string) bool,
	dead func(*api.Replica) string) {
	st := &v.Status
	st.Message, st.AttachedNode = "", ""
	current, failed, unheard := 0, "", ""
	size := int64(0)
	st.Used, st.Shared = 0, 0
	for _, r := range mine {
		if !slices.Contains(st.Members, r.Name) {
			continue
		}
		if r.Status.Used >= st.Used {
			st.Used, st.Shared = r.Status.Used, r.Status.Shared
		}
		if silent(r.Spec.Node) {
			unheard = r.Spec.Node
		}
		switch r.Status.Mode {
		case api.ReplicaCurrent:
			if silent(r.Spec.Node) {
				break // what is known of it is old
			}
			if why := dead(&r); why != "" {
				failed = fmt.Sprintf("replica %s: %s", r.Name, why)
				break
			}
			current++
			if size == 0 || r.Status.Size < size {
				size = r.Status.Size
			}
		case api.ReplicaFailed:
			failed = fmt.Sprintf("replica %s: %s", r.Name, r.Status.Message)
		}
	}
	if failed != "" {
		st.Message = failed
	}
	switch {
	case unheard != "" && current == 0:
		st.Robustness = api.RobustUnknown
		st.Message = fmt.Sprintf("node %s gives no sign of life", unheard)
	case current == 0:
		st.Robustness = api.RobustFaulted
		if st.Message == "" {
			st.Message = "no member of the volume can be used"
		}
	case current < int(v.Spec.NumberOfReplicas):
		st.Robustness = api.RobustDegraded
		if st.Message == "" {
			st.Message = fmt.Sprintf("%d of %d replicas are whole", current, v.Spec.NumberOfReplicas)
			if not := notMembers(v, mine); not != "" {
				st.Message += "; not whole: " + not
			}
			if unheard != "" {
				st.Message += "; node " + unheard + " gives no sign of life"
			}
		}
	default:
		st.Robustness = api.RobustHealthy
	}
	describeDamage(v, mine)
	describeMerges(v, mine)
	describeTrim(v, att)
	switch {
	case att == nil:
		st.State = api.VolumeDetached
		if st.Robustness == api.RobustFaulted {
			st.State = api.VolumeFaulted
		}
		meta.RemoveStatusCondition(&st.Conditions, api.ConditionSpace)
	case att.DeletionTimestamp != nil:
		st.State, st.AttachedNode = api.VolumeDetaching, att.Spec.Node
	case att.Status.Ready:
		st.State, st.AttachedNode = api.VolumeAttached, att.Spec.Node
		size = min(size, att.Status.Size)
	default:
		st.State = api.VolumeAttaching
	}
	if att != nil {
		if att.Status.Message != "" && st.Message == "" {
			st.Message = att.Status.Message
		}
		if c := meta.FindStatusCondition(att.Status.Conditions, api.ConditionSpace); c != nil {
			c := *c
			c.ObservedGeneration = v.Generation
			meta.SetStatusCondition(&st.Conditions, c)
		}
	}
	if size > 0 {
		st.Size = size
	}
	if st.Size >= v.Spec.Size {
		condition(v, api.ConditionExpanded, true, "Done", "")
	} else if c := meta.FindStatusCondition(st.Conditions, api.ConditionExpanded); c == nil || c.Reason != "NoRoom" {
		condition(v, api.ConditionExpanded, false, "Expanding",
			fmt.Sprintf("%s of %s", bytesText(st.Size), bytesText(v.Spec.Size)))
	}
}

// expand raises the wish of the members. A disk without room for the promise keeps the old size.
func (p *planner) expand(ctx context.Context, v *api.Volume, mine []api.Replica) error {
	overPct := int64(-1)
	for i := range mine {
		r := &mine[i]
		if r.Spec.Size >= v.Spec.Size || r.DeletionTimestamp != nil && !slices.Contains(v.Status.Members, r.Name) {
			continue
		}
		if overPct < 0 {
			overPct = p.setting(ctx, "storage-over-provisioning-percentage")
		}
		if err := p.mayGrow(ctx, r, v.Spec.Size-r.Spec.Size, overPct); err != nil {
			p.setWaiting(v.Name, true)
			if api.Is(err, api.Full) && condition(v, api.ConditionExpanded, false, "NoRoom", err.Error()) {
				p.events.Eventf(v, r, "Warning", "ExpansionNoRoom", "Expand", "%s", err)
			}
			if api.KindOf(err) == api.Other {
				return err
			}
			return nil
		}
		p.setWaiting(v.Name, false)
		if c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionExpanded); c != nil && c.Reason == "NoRoom" {
			condition(v, api.ConditionExpanded, false, "Expanding", "")
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
func (p *planner) mayGrow(ctx context.Context, r *api.Replica, more, overPct int64) error {
	var n api.Node
	if err := p.client.Get(ctx, client.ObjectKey{Name: r.Spec.Node}, &n); apierrors.IsNotFound(err) {
		return api.Errorf(api.Unavailable, "node %s does not exist", r.Spec.Node)
	} else if err != nil {
		return err
	}
	promised, err := p.promised(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	t := terrain{overPct: overPct, promised: func(api.UID) int64 { return promised }}
	for _, st := range n.Status.Disks {
		if st.UID != r.Spec.Disk {
			continue
		}
		var d api.DiskSpec
		if i := slices.IndexFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == st.Path }); i >= 0 {
			d = n.Spec.Disks[i]
		}
		if _, why := t.room(d, st, more); why != "" {
			return api.Errorf(api.Full, "disk %s of node %s: %s", st.Path, n.Name, why)
		}
		return nil
	}
	return api.Errorf(api.Unavailable, "disk %s of node %s is not there", r.Spec.Disk, r.Spec.Node)
}

// comesToNothing reports whether an attachment was made when the volume was deleted already: its node refuses it.
func comesToNothing(v *api.Volume, a *api.Attachment) bool {
	return !a.Status.Ready && a.CreationTimestamp.After(v.DeletionTimestamp.Time)
}

// remove takes a volume away: its replicas first, then its finalizer.
func (p *planner) remove(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
	p.setWaiting(v.Name, false)
	p.calm(v.Name, false)
	p.arrived(v.Name)
	v.Status.State = api.VolumeDeleting
	if attached {
		v.Status.Message = "the volume is attached: it goes when it is detached"
		return nil
	}
	if err := p.letGo(ctx, v); err != nil {
		return err
	}
	snaps, err := p.kept(ctx, v)
	if err != nil {
		return err
	}
	if len(mine) > 0 && len(snaps) > 0 {
		v.Status.Message = fmt.Sprintf("the volume is deleted; its data stays for %d snapshots of it (%s), and goes with "+
			"the last of them", len(snaps), strings.Join(snaps[:min(len(snaps), 5)], ", "))
		condition(v, api.ConditionKept, true, "Snapshots", v.Status.Message)
		return nil
	}
	meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionKept)
	v.Status.Message = ""
	for i := range mine {
		r := &mine[i]
		if r.DeletionTimestamp != nil {
			if r.Status.Message != "" {
				v.Status.Message = fmt.Sprintf("replica %s: %s", r.Name, r.Status.Message)
			}
			continue
		}
		if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replica %s: %w", r.Name, err)
		}
	}
	if len(mine) > 0 {
		return nil
	}
	if controllerutil.RemoveFinalizer(v, api.Finalizer) {
		return client.IgnoreNotFound(p.client.Update(ctx, v))
	}
	return nil
}
