package replica

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// revert reverts the replica as its spec asks. The caller has the volume's lock.
func (rs *Replicas) revert(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	if r.RevertPending() == nil {
		return nil
	}
	wish, uid := r.Spec.Revert, string(r.Spec.UID)
	done := func(why error) error {
		if r.Status.Reverted, r.Status.RevertError, r.Status.Reverting = wish.ID, "", ""; why != nil {
			r.Status.RevertError = why.Error()
		}
		return nil
	}
	m, err := disk.Stack(uid)
	if err != nil {
		return err
	}
	var v api.Volume
	if err := rs.Reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return err
	}
	if m.Epoch > v.Status.Epoch {
		return done(api.Errorf(api.Denied, "the replica has adopted epoch %d and the API says %d: the API went back in "+
			"time, and the wish may be an old one", m.Epoch, v.Status.Epoch))
	}
	if m.Epoch > wish.Epoch { // the volume dropped the replica, which then returned with later writes
		return done(api.Errorf(api.Denied, "the replica has adopted epoch %d, and was to be reverted in epoch %d: the wish "+
			"is an old one", m.Epoch, wish.Epoch))
	}
	if begun := wish.ID + "/"; len(r.Status.Reverting) > len(begun) && r.Status.Reverting[:len(begun)] == begun {
		// A cut in progress in an earlier session may have changed the head since: a new head alone proves no revert.
		if r.Status.Reverting != begun+m.Head && m.Reverted >= wish.Epoch {
			if err := disk.SyncRecord(uid); err != nil {
				return err
			}
			rs.wakeSnapshots(ctx, r)
			return done(nil) // an earlier try reverted, and its answer was lost
		}
	} else {
		err := rs.Reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &api.Attachment{})
		switch {
		case rs.attachments.Attached(r.Spec.Volume, r.Spec.VolumeUID) || err == nil:
			return done(api.Errorf(api.InUse, "the volume is attached: detach it first"))
		case !apierrors.IsNotFound(err):
			return err
		}
		r.Status.Reverting = begun + m.Head
		if err := rs.Client.Status().Update(ctx, r); err != nil {
			return err
		}
	}
	if v.Status.EngineNode != "" {
		return api.Errorf(api.Busy, "the engine of volume %s is on node %s", v.Name, v.Status.EngineNode)
	}
	// Release fences an earlier engine, which cannot open the replica again before the revert.
	if err := rs.remote.Release(uid); err != nil {
		rs.Log.Warn("the end of a session of another node", "replica", r.Name, "err", err)
	}
	err = disk.Revert(ctx, uid, string(wish.Snapshot), wish.Epoch)
	if why := rs.merges.Fails(string(r.Spec.UID)); api.Is(err, api.Busy) && m.Merge != nil && why != "" {
		err = api.Errorf(api.Unavailable, "replica %s: two layers have to be merged before, and the merge fails: %s",
			r.Name, why)
	}
	if api.Is(err, api.Busy) || err != nil && api.KindOf(err) == api.Other {
		return err
	}
	if err == nil {
		rs.Log.Info("volume reverted", "volume", r.Spec.Volume, "snapshot", wish.Snapshot)
		rs.merges.Merge(disk, uid, r.Spec.Volume)
	}
	rs.wakeSnapshots(ctx, r)
	return done(err)
}

// wakeSnapshots has all snapshots of a volume reported again: a revert changes their neighbours.
func (rs *Replicas) wakeSnapshots(ctx context.Context, r *api.Replica) {
	var list api.SnapshotList
	if err := rs.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: r.Spec.Volume}); err != nil {
		rs.Log.Error("snapshots of a volume cannot be listed", "volume", r.Spec.Volume, "err", err)
	}
	var names []string
	for _, s := range list.Items {
		names = append(names, s.Name)
	}
	rs.snapshots.Changed(r.Spec.UID, names...)
}
