package replicas

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A volume's only replica leaves a disk that is to be evicted. While the volume is detached, its head is cut off, and a
// replica on another disk of the node takes its place, with all its layers and snapshots: from then on the volume can
// be attached, and the layers follow, as those of a clone do. The replica that was there goes with that.

// evict asks for the replica that takes the place of one on a disk that is to be left, and removes the one that was.
func (p *planner) evict(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
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
		// What changes tries again. One that did not begin before the volume was attached goes another way, by the volume's
		// engine: from the attach's claim on, a move that is under way is refused its last step.
		late := attached && v.Status.EngineNode != "" && !r.Status.Pinned
		if (r.Status.Mode == api.ReplicaFailed || late) && r.DeletionTimestamp == nil {
			return client.IgnoreNotFound(p.client.Delete(ctx, r))
		}
		moving(v) // it is on its way; said again, since the write that said it first may have lost a race
		return nil
	}
	var n api.Node
	if err := p.client.Get(ctx, types.NamespacedName{Name: member.Spec.Node}, &n); err == nil && n.Spec.EvictionRequested {
		return nil // it goes to another node
	}
	leaving, err := p.leaving(ctx, member)
	if err == nil && !leaving && len(mine) == 1 {
		meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionEvicted)
	}
	if err != nil || !leaving || attached || member.Status.Mode != api.ReplicaCurrent || member.DeletionTimestamp != nil ||
		len(mine) > 1 || v.Spec.NumberOfReplicas > 1 {
		return err
	}
	// The one that goes keeps nothing away; its disk is refused anyway.
	from := &origin{replica: member, image: member.Labels[api.LabelImage], whole: true}
	_, err = p.placeOne(ctx, v, nil, from, nil)
	if api.Is(err, api.Full) {
		c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionEvicted)
		if c != nil && c.Reason != "Moving" && c.Reason != "NoDisk" {
			return nil // it goes to another node, or what keeps it from that is told
		}
		if condition(v, api.ConditionEvicted, false, "NoDisk", err.Error()) {
			p.events.Eventf(v, member, "Warning", "EvictionNoDisk", "Evict", "%s", err)
		}
		p.setWaiting(v.Name, true)
		return nil
	}
	if err == nil {
		moving(v)
		p.setWaiting(v.Name, false)
	}
	return err
}

func moving(v *api.Volume) {
	condition(v, api.ConditionEvicted, false, "Moving", "the replica is to be on another disk")
}

// leaving reports whether a replica's disk is to be evicted.
func (p *planner) leaving(ctx context.Context, r *api.Replica) (bool, error) {
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

// evicted wakes the volumes that have a replica on a disk that is to be left.
func (p *planner) evicted(ctx context.Context, o client.Object) []reconcile.Request {
	n := o.(*api.Node)
	var all []reconcile.Request
	for _, d := range n.Spec.Disks {
		i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.Path == d.Path })
		if !d.EvictionRequested && !n.Spec.EvictionRequested || i < 0 {
			continue
		}
		var list api.ReplicaList
		on := client.MatchingFields{byDisk: string(n.Status.Disks[i].UID)}
		if err := p.client.List(ctx, &list, on, client.UnsafeDisableDeepCopy); err != nil {
			p.log.Error("replicas of a disk cannot be listed", "disk", d.Path, "err", err)
		}
		for k := range list.Items {
			all = append(all, one(list.Items[k].Spec.Volume)...)
		}
	}
	return all
}

// move puts a replica in the place of its source, which nobody has attached. The caller has the volume's lock.
func (l *replicaLoop) move(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	uid, from := string(r.Spec.UID), string(r.Spec.From.Replica)
	var v api.Volume
	if err := l.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return err
	}
	there, err := disk.Holds(uid)
	if err != nil {
		return err
	}
	if there && slices.Equal(v.Status.Members, []string{r.Name}) {
		r.Status.Pinned = true
		return nil // and the answer was lost
	}
	old, err := l.moved(ctx, r, &v)
	if err != nil {
		return err
	}
	src, err := l.source(ctx, r)
	if err != nil {
		return err
	}
	// What a try before left is of another moment.
	if err := disk.RemoveReplica(uid); err != nil {
		return err
	}
	if err := l.unpin(r.Spec.UID, disk); err != nil {
		return err
	}
	cut, done, err := (&snapshotLoop{l.Data}).prepareDetached(ctx, &v, old, src,
		stack.Snapshot{Layer: string(api.NewUID())})
	if err != nil {
		return err
	}
	err = cut.Do(ctx)
	if derr := done(); err == nil {
		err = derr
	}
	if err != nil {
		return err
	}
	l.changed(old.Spec.UID)
	pin, err := src.Pin(ctx, stack.Pin{UID: uid, For: v.Name, Disk: string(r.Spec.Disk)}, from, "")
	if err != nil {
		return err
	}
	if err := l.pinElsewhere(ctx, r, src, pin.Layers); err != nil {
		return err
	}
	m, err := src.Stack(from)
	if err != nil {
		return err
	}
	if m.Merge != nil {
		return api.Errorf(api.Busy, "two layers of volume %s are being merged; try again", v.Name)
	}
	l.openLenders(ctx, r.Spec.Disk, []api.UID{api.UID(src.UID())})
	s.Size, s.Layers, s.Snapshots, s.Branches = max(s.Size, m.Size), m.Layers, m.Snapshots, m.Branches
	if err := disk.CreateReplica(ctx, s); err != nil {
		return err
	}
	// The commit point: who had the volume attached, or attaches it now, changed the object, or is refused by it.
	if err := l.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return err
	}
	if _, err := l.moved(ctx, r, &v); err != nil {
		return err
	}
	v.Status.Members, v.Status.EngineNode = []string{r.Name}, ""
	v.Status.Epoch++
	if err := l.client.Status().Update(ctx, &v); apierrors.IsConflict(err) {
		return api.Errorf(api.Busy, "volume %s has changed; try again", v.Name)
	} else if err != nil {
		return err
	}
	l.Log.Info("replica moved", "volume", v.Name, "from", src.Path(), "to", disk.Path())
	r.Status.Pinned = true
	return nil
}

// moved is the replica whose place is taken, if that may be done now: nobody has the volume attached.
func (l *replicaLoop) moved(ctx context.Context, r *api.Replica, v *api.Volume) (*api.Replica, error) {
	var list api.ReplicaList
	if err := l.client.List(ctx, &list, client.MatchingFields{byVolume: v.Name}); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list.Items, func(o api.Replica) bool { return o.Spec.UID == r.Spec.From.Replica })
	if i < 0 || v.Status.UID != r.Spec.VolumeUID || !slices.Equal(v.Status.Members, []string{list.Items[i].Name}) {
		return nil, api.Errorf(api.Invalid, "the replica whose place this was to take is not the volume's any more")
	}
	waits := api.Errorf(api.Unavailable, "takes the place of replica %s when the volume is detached", list.Items[i].Name)
	busy := l.session(v.Name) != nil
	for _, held := range l.Host.Held() {
		busy = busy || held.Key == string(v.Status.UID)
	}
	err := l.reader.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{})
	switch {
	case busy || err == nil:
		return nil, waits
	case !apierrors.IsNotFound(err):
		return nil, err
	}
	return &list.Items[i], reverting(&list.Items[i])
}

// waitsForDetach wakes the replicas of a volume that is not attached any more.
func (d *Data) waitsForDetach(ctx context.Context, o client.Object) []reconcile.Request {
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{byVolume: o.(*api.Attachment).Spec.Volume}); err != nil {
		d.Log.Error("replicas of a volume cannot be listed", "volume", o.GetName(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.Node == d.Node && r.Spec.From != nil && r.Spec.From.Whole &&
			r.Status.Mode != api.ReplicaCurrent {
			all = append(all, one(r.Name)...)
		}
	}
	return all
}
