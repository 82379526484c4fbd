package replica

import (
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// move replaces the only member of a detached volume by a replica on another disk. The caller has the volume's lock.
func (rs *Replicas) move(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	uid, from := string(r.Spec.UID), string(r.Spec.From.Replica)
	var v api.Volume
	if err := rs.Reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return err
	}
	exists, err := disk.Holds(uid)
	if err != nil {
		return err
	}
	if exists && slices.Equal(v.Status.Members, []string{r.Name}) {
		r.Status.Pinned = true
		return nil // an earlier try made the swap, and its answer was lost
	}
	old, err := rs.replacedMember(ctx, r, &v)
	if err != nil {
		return err
	}
	src, err := rs.sourceDisk(ctx, r)
	if err != nil {
		return err
	}
	// The copy of an earlier try may lack later writes.
	if err := disk.RemoveReplica(uid); err != nil {
		return err
	}
	if err := rs.unpin(r.Spec.UID, disk); err != nil {
		return err
	}
	if err := rs.attachments.SealOffline(ctx, &v); err != nil {
		return err
	}
	rs.snapshots.Changed(old.Spec.UID)
	pin, err := src.Pin(ctx, stack.Pin{UID: uid, For: v.Name, Disk: string(r.Spec.Disk)}, from, "")
	if err != nil {
		return err
	}
	if err := rs.pinElsewhere(ctx, r, src, pin.Layers); err != nil {
		return err
	}
	m, err := src.Stack(from)
	if err != nil {
		return err
	}
	if m.Merge != nil {
		return api.Errorf(api.Busy, "two layers of volume %s are being merged; try again", v.Name)
	}
	s.Size, s.Layers, s.Snapshots, s.Branches = max(s.Size, m.Size), m.Layers, m.Snapshots, m.Branches
	if err := disk.CreateReplica(ctx, s); err != nil {
		return err
	}
	// The commit point: an attach before has changed the object, and an attach after is refused.
	if err := rs.Reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return err
	}
	if _, err := rs.replacedMember(ctx, r, &v); err != nil {
		return err
	}
	v.Status.Members, v.Status.EngineNode = []string{r.Name}, ""
	v.Status.Epoch++
	if err := rs.Client.Status().Update(ctx, &v); apierrors.IsConflict(err) {
		return api.Errorf(api.Busy, "volume %s has changed; try again", v.Name)
	} else if err != nil {
		return err
	}
	rs.Log.Info("replica moved", "volume", v.Name, "from", src.Path(), "to", disk.Path())
	r.Status.Pinned = true
	return nil
}

// replacedMember is the replica to replace, if the volume is detached.
func (rs *Replicas) replacedMember(ctx context.Context, r *api.Replica, v *api.Volume) (*api.Replica, error) {
	var list api.ReplicaList
	if err := rs.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list.Items, func(o api.Replica) bool { return o.Spec.UID == r.Spec.From.Replica })
	if i < 0 || v.Status.UID != r.Spec.VolumeUID || !slices.Equal(v.Status.Members, []string{list.Items[i].Name}) {
		return nil, api.Errorf(api.Invalid, "replica %s cannot replace a replica that is no longer the only member of "+
			"volume %s",
			r.Name, v.Name)
	}
	waits := api.Errorf(api.Unavailable, "replaces replica %s when the volume is detached", list.Items[i].Name)
	err := rs.Reader.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{})
	switch {
	case rs.attachments.Attached(v.Name, v.Status.UID) || err == nil:
		return nil, waits
	case !apierrors.IsNotFound(err):
		return nil, err
	}
	return &list.Items[i], list.Items[i].RevertPending()
}

// awaitingDetach wakes the replicas that wait for the detach of a volume.
func (rs *Replicas) awaitingDetach(ctx context.Context, o client.Object) []reconcile.Request {
	var list api.ReplicaList
	volume := o.(*api.Attachment).Spec.Volume
	if err := rs.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		rs.Log.Error("replicas of a volume cannot be listed", "volume", o.GetName(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.Node == rs.Name && r.Spec.From != nil && r.Spec.From.Whole &&
			r.Status.Mode != api.ReplicaCurrent {
			all = append(all, watch.Requests(r.Name)...)
		}
	}
	return all
}
