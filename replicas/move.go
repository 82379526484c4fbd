package replicas

import (
	"context"
	"errors"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// move replaces the only member of a detached volume by a replica on another disk. The caller has the volume's lock.
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
	// An earlier try copied another moment.
	if err := disk.RemoveReplica(uid); err != nil {
		return err
	}
	if err := l.unpin(r.Spec.UID, disk); err != nil {
		return err
	}
	h, err := l.openOffline(ctx, &v)
	if err != nil {
		return err
	}
	if err := errors.Join(h.SealAll(ctx), h.end()); err != nil {
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
	s.Size, s.Layers, s.Snapshots, s.Branches = max(s.Size, m.Size), m.Layers, m.Snapshots, m.Branches
	if err := disk.CreateReplica(ctx, s); err != nil {
		return err
	}
	// The commit point: an attach before has changed the object, and an attach after is refused.
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

// moved is the replica to replace, if the volume is detached.
func (l *replicaLoop) moved(ctx context.Context, r *api.Replica, v *api.Volume) (*api.Replica, error) {
	var list api.ReplicaList
	if err := l.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
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
	return &list.Items[i], list.Items[i].RevertPending()
}

// waitsForDetach wakes the replicas that wait for the detach of a volume.
func (d *Data) waitsForDetach(ctx context.Context, o client.Object) []reconcile.Request {
	var list api.ReplicaList
	volume := o.(*api.Attachment).Spec.Volume
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		d.Log.Error("replicas of a volume cannot be listed", "volume", o.GetName(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.Node == d.Node && r.Spec.From != nil && r.Spec.From.Whole &&
			r.Status.Mode != api.ReplicaCurrent {
			all = append(all, watch.Requests(r.Name)...)
		}
	}
	return all
}
