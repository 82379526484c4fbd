package replicas

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A revert is done once or not at all, and never later than the user would expect: what stands in its way ends it.

// revert has the members of a detached volume go back to a snapshot.
func (p *planner) revert(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
	wish, is := v.Spec.RevertTo, v.Status.Reverted
	if wish == nil || is != nil && is.ID == wish.ID && is.State != api.CloneInitiated {
		return nil
	}
	end := func(state api.CloneState, message string) {
		v.Status.Reverted = &api.RevertFact{Snapshot: wish.Snapshot, ID: wish.ID, State: state, Message: message}
		switch state {
		case api.CloneCompleted:
			p.events.Eventf(v, nil, "Normal", "Reverted", "Revert", "the volume holds what snapshot %s holds", wish.Snapshot)
		case api.CloneFailed:
			p.events.Eventf(v, nil, "Warning", "RevertFailed", "Revert", "snapshot %s: %s", wish.Snapshot, message)
		}
	}
	var r *api.Replica
	for i := range mine {
		if len(v.Status.Members) == 1 && mine[i].Name == v.Status.Members[0] {
			r = &mine[i]
		}
	}
	if r == nil {
		end(api.CloneFailed, "the volume has no replica to revert")
		return nil
	}
	if asked := r.Spec.Revert; asked != nil && asked.ID == wish.ID {
		switch {
		case r.Status.Reverted != wish.ID:
			end(api.CloneInitiated, r.Status.Message)
		case r.Status.RevertError != "":
			end(api.CloneFailed, r.Status.RevertError)
		default:
			end(api.CloneCompleted, "")
		}
		return nil
	}
	if attached {
		end(api.CloneFailed, "the volume is attached: detach it first")
		return nil
	}
	var snap api.Snapshot
	err := p.client.Get(ctx, types.NamespacedName{Name: wish.Snapshot}, &snap)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return err
	case err != nil || snap.Spec.Volume != v.Name || snap.Status.VolumeUID != v.Status.UID:
		end(api.CloneFailed, "the volume has no such snapshot")
		return nil
	case !snap.Status.ReadyToUse || snap.DeletionTimestamp != nil:
		end(api.CloneFailed, "the snapshot cannot be used: "+snap.Status.Error)
		return nil
	}
	old := r.DeepCopy()
	r.Spec.Revert = &api.ReplicaRevert{ID: wish.ID, Snapshot: snap.Status.UID}
	if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	end(api.CloneInitiated, "")
	return nil
}

// reverting reports whether a replica is to be reverted, and nothing else may be done with it before.
func reverting(r *api.Replica) error {
	if r.Spec.Revert != nil && r.Spec.Revert.ID != r.Status.Reverted {
		return api.Errorf(api.Busy, "volume %s is being reverted", r.Spec.Volume)
	}
	return nil
}

// revert reverts the replica as its spec asks. The caller has the volume's lock.
func (l *replicaLoop) revert(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	if reverting(r) == nil {
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
	if begun := wish.ID + "/"; len(r.Status.Reverting) > len(begun) && r.Status.Reverting[:len(begun)] == begun {
		if r.Status.Reverting != begun+m.Head {
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
	err = disk.Revert(ctx, uid, string(wish.Snapshot))
	if api.Is(err, api.Busy) || err != nil && api.KindOf(err) == api.Other {
		return err
	}
	if err == nil {
		l.Log.Info("volume reverted", "volume", r.Spec.Volume, "snapshot", wish.Snapshot)
		l.mergeSoon(disk, uid, r.Spec.Volume)
		l.tidy(disk)
	}
	l.revived(ctx, r)
	return done(err)
}

// revived has all snapshots of a volume looked at: their neighbours are others now.
func (l *replicaLoop) revived(ctx context.Context, r *api.Replica) {
	var list api.SnapshotList
	if err := l.client.List(ctx, &list, client.MatchingFields{byVolume: r.Spec.Volume}); err != nil {
		l.Log.Error("snapshots of a volume cannot be listed", "volume", r.Spec.Volume, "err", err)
	}
	var names []string
	for _, s := range list.Items {
		names = append(names, s.Name)
	}
	l.changed(r.Spec.UID, names...)
}
