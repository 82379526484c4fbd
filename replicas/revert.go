package replicas

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// revert reverts the replica as its spec asks. The caller has the volume's lock.
func (l *replicaLoop) revert(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
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
	if err := l.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return err
	}
	if m.Epoch > v.Status.Epoch {
		return done(api.Errorf(api.Denied, "the replica has adopted epoch %d and the API says %d: the API went back in "+
			"time, and the wish may be an old one", m.Epoch, v.Status.Epoch))
	}
	if m.Epoch > wish.Epoch { // it was left out, and came back with what was written since
		return done(api.Errorf(api.Denied, "the replica has adopted epoch %d, and was to be reverted in epoch %d: the wish "+
			"is an old one", m.Epoch, wish.Epoch))
	}
	if begun := wish.ID + "/"; len(r.Status.Reverting) > len(begun) && r.Status.Reverting[:len(begun)] == begun {
		// A cut that was under way in a session of before may have moved the head since: that alone tells nothing.
		if r.Status.Reverting != begun+m.Head && m.Reverted >= wish.Epoch {
			if err := disk.Settle(uid); err != nil {
				return err
			}
			l.revived(ctx, r)
			return done(nil) // and the answer was lost
		}
	} else {
		busy := l.session(r.Spec.Volume) != nil
		for _, held := range l.Host.Held() {
			busy = busy || held.Name == r.Spec.Volume
		}
		err := l.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &api.Attachment{})
		switch {
		case busy || err == nil:
			return done(api.Errorf(api.InUse, "the volume is attached: detach it first"))
		case !apierrors.IsNotFound(err):
			return err
		}
		r.Status.Reverting = begun + m.Head
		if err := l.client.Status().Update(ctx, r); err != nil {
			return err
		}
	}
	if v.Status.EngineNode != "" {
		return api.Errorf(api.Busy, "the engine of volume %s is on node %s", v.Name, v.Status.EngineNode)
	}
	// An engine of before, shut out: it may not open the replica again until that is reverted.
	if err := l.remote.Release(uid); err != nil {
		l.Log.Warn("the end of a session of another node", "replica", r.Name, "err", err)
	}
	err = disk.Revert(ctx, uid, string(wish.Snapshot), wish.Epoch)
	if why := l.mergeWorker.Fails(string(r.Spec.UID)); api.Is(err, api.Busy) && m.Merge != nil && why != "" {
		err = api.Errorf(api.Unavailable, "two of its layers have to be merged before, and that fails: %s", why)
	}
	if api.Is(err, api.Busy) || err != nil && api.KindOf(err) == api.Other {
		return err
	}
	if err == nil {
		l.Log.Info("volume reverted", "volume", r.Spec.Volume, "snapshot", wish.Snapshot)
		l.mergeWorker.Merge(disk, uid, r.Spec.Volume)
	}
	l.revived(ctx, r)
	return done(err)
}

// revived has all snapshots of a volume looked at: their neighbours are others now.
func (l *replicaLoop) revived(ctx context.Context, r *api.Replica) {
	var list api.SnapshotList
	if err := l.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: r.Spec.Volume}); err != nil {
		l.Log.Error("snapshots of a volume cannot be listed", "volume", r.Spec.Volume, "err", err)
	}
	var names []string
	for _, s := range list.Items {
		names = append(names, s.Name)
	}
	l.changed(r.Spec.UID, names...)
}
