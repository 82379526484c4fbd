package replicas

import (
	"context"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
)

// remove takes the replica from its disk, then the finalizer from the object.
func (l *replicaLoop) remove(ctx context.Context, r *api.Replica) error {
	if s := l.session(r.Spec.Volume); s != nil && s.local(r.Spec.UID) != nil {
		if has, err := s.uses(ctx, r.Spec.UID); err != nil || has {
			return errors.Join(err, api.Errorf(api.InUse, "the volume uses it here: it goes when another one is whole"))
		}
	}
	if err := l.dispensable(ctx, r); err != nil {
		return err
	}
	disk, err := l.disk(ctx, r.Spec.Disk)
	switch {
	case err == nil:
		if err := l.remote.Release(string(r.Spec.UID)); err != nil {
			l.Log.Warn("the end of a session of another node", "replica", r.Name, "err", err)
		}
		l.bringer.stop(r.Spec.UID)
		mergeable, err := disk.TakeReplica(string(r.Spec.UID))
		if err != nil {
			return err
		}
		if err := l.abandon(r, disk); err != nil {
			return err
		}
		l.setOnDisk(r.Spec.UID, false)
		l.mergeWorker.Forget(string(r.Spec.UID))
		if mergeable || r.Spec.From != nil { // that may have held layers besides
			l.mergeWorker.Freed(disk)
		}
		if r.Spec.From != nil {
			l.wakeSharers(ctx, r.Spec.From.Volume)
		}
		for _, s := range l.all() {
			if s.Disk == r.Spec.Disk {
				s.room()
			}
		}
	case api.Is(err, api.Unavailable):
		gone, gerr := l.diskForgotten(ctx, r.Spec.Disk)
		if gerr != nil {
			return gerr
		}
		if !gone {
			return err // it comes back, and then the replica must go
		}
		l.bringer.stop(r.Spec.UID)
		forgotten, _ := l.disks.Get(r.Spec.Disk)
		for _, other := range l.disks.Except(forgotten) {
			l.unpinSoon(r.Spec.UID, other)
		}
		l.events.Eventf(r, nil, "Warning", "DiskForgotten", "Remove",
			"disk %s is no disk of node %s any more; what is on it stays there", r.Spec.Disk, l.Node)
	default:
		return err
	}
	if controllerutil.RemoveFinalizer(r, api.Finalizer) {
		return client.IgnoreNotFound(l.client.Update(ctx, r))
	}
	return nil
}

// dispensable refuses to remove what a volume consists of, whoever deleted the object: a member stays until it is none
// any more, and what is kept for snapshots until they are gone. The API itself is asked, as a cache may be behind.
func (l *replicaLoop) dispensable(ctx context.Context, r *api.Replica) error {
	var v api.Volume
	if err := l.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	switch {
	case v.Status.UID != r.Spec.VolumeUID || !slices.Contains(v.Status.Members, r.Name):
		return nil
	case v.DeletionTimestamp == nil:
		return api.Errorf(api.InUse, "it is a member of volume %s: it goes when another one is whole", v.Name)
	case meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionKept):
		return api.Errorf(api.InUse, "it holds the snapshots that are left of volume %s: it goes with them", v.Name)
	}
	return nil
}

// diskForgotten reports whether the node has given up the disk: the Node does not speak of it any more, or the user
// took it out of the spec and it is not there.
func (d *Data) diskForgotten(ctx context.Context, uid api.UID) (bool, error) {
	var n api.Node
	if err := d.client.Get(ctx, client.ObjectKey{Name: d.Node}, &n); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return !slices.ContainsFunc(n.Status.Disks, func(s api.DiskStatus) bool {
		wanted := s.Ready || slices.ContainsFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == s.Path })
		return s.UID == uid && wanted || s.UID == ""
	}), nil
}
