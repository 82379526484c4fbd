package replica

import (
	"context"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
)

// remove removes the replica from its disk, then the finalizer from the object.
func (rs *Replicas) remove(ctx context.Context, r *api.Replica) error {
	if used, err := rs.attachments.Uses(ctx, r.Spec.Volume, r.Spec.UID); err != nil || used {
		return errors.Join(err, api.Errorf(api.InUse, "replica %s: the engine of volume %s uses the replica: the removal "+
			"waits for another whole replica", r.Name, r.Spec.Volume))
	}
	if err := rs.checkRemovable(ctx, r); err != nil {
		return err
	}
	disk, err := rs.Disk(ctx, r.Spec.Disk)
	switch {
	case err == nil:
		if err := rs.remote.Release(string(r.Spec.UID)); err != nil {
			rs.Log.Warn("the end of a session of another node", "replica", r.Name, "err", err)
		}
		rs.jobs.stopJob(r.Spec.UID)
		mergeable, err := disk.TakeReplica(string(r.Spec.UID))
		if err != nil {
			return err
		}
		if err := rs.releaseSource(r, disk); err != nil {
			return err
		}
		rs.setOnDisk(r.Spec.UID, false)
		rs.merges.Forget(string(r.Spec.UID))
		if mergeable || r.Spec.From != nil { // a source may have kept layers for the replica
			rs.merges.Freed(disk)
		}
		if r.Spec.From != nil {
			rs.wakeReplicasOf(ctx, r.Spec.From.Volume)
		}
		rs.attachments.RoomOn(r.Spec.Disk)
	case api.Is(err, api.Unavailable):
		gone, gerr := rs.DiskForgotten(ctx, r.Spec.Disk)
		if gerr != nil {
			return gerr
		}
		if !gone {
			return err // the disk may return, with the replica
		}
		rs.jobs.stopJob(r.Spec.UID)
		forgotten, _ := rs.Disks.Get(r.Spec.Disk)
		for _, other := range rs.Disks.Except(forgotten) {
			rs.unpinOrLater(r.Spec.UID, other)
		}
		rs.Events.Eventf(r, nil, "Warning", "DiskForgotten", "Remove",
			"disk %s is no disk of node %s any more: the replica stays on the disk", r.Spec.Disk, rs.Name)
	default:
		return err
	}
	if controllerutil.RemoveFinalizer(r, api.Finalizer) {
		return client.IgnoreNotFound(rs.Client.Update(ctx, r))
	}
	return nil
}

// checkRemovable refuses to remove a member of a volume, and the last replica of a deleted volume with snapshots, by
// whatever user the object was deleted. It also refuses a replica that the planner may be recording as a first member.
// The cache may be behind: checkRemovable asks the API itself.
func (rs *Replicas) checkRemovable(ctx context.Context, r *api.Replica) error {
	var v api.Volume
	if err := rs.Reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	switch {
	case v.Status.UID != r.Spec.VolumeUID:
		return nil
	case len(v.Status.Members) == 0 && v.DeletionTimestamp == nil && !r.Spec.Leave:
		return api.Errorf(api.InUse, "replica %s may become a member of volume %s: the removal waits for the controller",
			r.Name, v.Name)
	case !slices.Contains(v.Status.Members, r.Name):
		return nil
	case v.DeletionTimestamp == nil:
		return api.Errorf(api.InUse, "replica %s is a member of volume %s: the removal waits for another whole replica",
			r.Name,
			v.Name)
	case meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionKept):
		return api.Errorf(api.InUse, "replica %s holds the last snapshots of volume %s: the removal waits for their "+
			"deletion",
			r.Name, v.Name)
	}
	return nil
}
