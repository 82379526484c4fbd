package replicas

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A revert is done once or not at all, and never later than the user would expect: what stands in its way ends it.

// revert has all members of a detached volume go back to a snapshot. First the volume takes a new epoch, without the
// members that give no sign of life, or whose disk cannot be used: an engine of before, wherever it still runs, is shut
// out, and whoever is not reverted in that epoch is out of date. Then each member is asked; while one has not answered,
// nobody attaches.
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
	var members []*api.Replica
	for i := range mine {
		if slices.Contains(v.Status.Members, mine[i].Name) {
			members = append(members, &mine[i])
		}
	}
	leave := func(r *api.Replica) {
		v.Status.Members = slices.DeleteFunc(slices.Clone(v.Status.Members), func(m string) bool { return m == r.Name })
		v.Status.Epoch++
	}
	dead := p.deadDisk(ctx)
	isGone := func(r *api.Replica) bool { return p.isSilent(r.Spec.Node) || dead(r) != "" }
	isHere := func(r *api.Replica) bool { return !isGone(r) }
	var asked, done, failed, left []*api.Replica
	why, waits := "", ""
	for _, r := range members {
		if r.Spec.Revert == nil || r.Spec.Revert.ID != wish.ID {
			continue
		}
		asked = append(asked, r)
		switch {
		case r.Status.Reverted != wish.ID:
			left = append(left, r)
			waits = r.Status.Message
		case r.Status.RevertError != "":
			failed = append(failed, r)
			why = r.Status.RevertError
		default:
			done = append(done, r)
		}
	}
	switch {
	case len(asked) > 0 && len(asked) == len(members) && len(done) == 0 && len(left) > 0 && p.noneBegan(left, isGone):
		for _, r := range left { // else it would be reverted when it is back, much later than the user would expect
			if err := p.takeBack(ctx, r); err != nil {
				return err
			}
		}
		if why == "" {
			why = "no replica of the volume can be reached"
		}
		end(api.CloneFailed, why)
		return nil
	case len(asked) > 0 && len(done)+len(failed) < len(members):
		// One that went back stays: the volume is what it holds. One that could not holds what the volume held: where all
		// others are gone it is not known whether they went back, and the volume is what that one holds.
		unknown := len(asked) == len(members) && len(failed) > 0 && !slices.ContainsFunc(left, isHere)
		for _, r := range members { // not asked yet, after a crash here; or it does not answer
			if len(done) > 0 && isGone(r) && !slices.Contains(done, r) || unknown && slices.Contains(left, r) {
				leave(r)
			} else if r.Spec.Revert == nil || r.Spec.Revert.ID != wish.ID {
				if err := p.askRevert(ctx, r, *asked[0].Spec.Revert); err != nil {
					return err
				}
			}
		}
		end(api.CloneInitiated, waits)
		return nil
	case len(asked) > 0 && len(done) == 0:
		end(api.CloneFailed, why)
		return nil
	case len(asked) > 0:
		for _, r := range failed {
			leave(r)
		}
		end(api.CloneCompleted, "")
		return nil
	case attached:
		end(api.CloneFailed, "the volume is attached: detach it first")
		return nil
	}
	snap, err := p.revertTo(ctx, v, end)
	if snap == nil {
		return err
	}
	if is == nil || is.ID != wish.ID { // the write of it brings us back
		heard := 0
		for _, r := range members {
			if !isGone(r) {
				heard++
			}
		}
		if heard == 0 {
			end(api.CloneFailed, "no replica of the volume can be reached")
			return nil
		}
		for _, r := range members {
			if isGone(r) {
				leave(r)
			}
		}
		v.Status.Epoch++
		v.Status.EngineNode = ""
		end(api.CloneInitiated, "")
		return nil
	}
	for _, r := range members {
		if err := p.askRevert(ctx, r, api.ReplicaRevert{ID: wish.ID, Snapshot: snap.Status.UID,
			Epoch: v.Status.Epoch}); err != nil {
			return err
		}
	}
	end(api.CloneInitiated, "")
	return nil
}

type reverted func(state api.CloneState, message string)

// revertTo is the snapshot to go back to; nil: there is none that can be used, or an error.
func (p *planner) revertTo(ctx context.Context, v *api.Volume, end reverted) (*api.Snapshot, error) {
	var snap api.Snapshot
	err := p.client.Get(ctx, types.NamespacedName{Name: v.Spec.RevertTo.Snapshot}, &snap)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return nil, err
	case err != nil || snap.Spec.Volume != v.Name || snap.Status.VolumeUID != v.Status.UID:
		end(api.CloneFailed, "the volume has no such snapshot")
		return nil, nil
	case !snap.Status.ReadyToUse || snap.DeletionTimestamp != nil:
		end(api.CloneFailed, "the snapshot cannot be used: "+snap.Status.Error)
		return nil, nil
	}
	return &snap, nil
}

func (p *planner) askRevert(ctx context.Context, r *api.Replica, wish api.ReplicaRevert) error {
	old := r.DeepCopy()
	r.Spec.Revert = &wish
	if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}

// noneBegan reports whether members are all gone, and none of them had begun to go back: then none has.
func (p *planner) noneBegan(members []*api.Replica, isGone func(*api.Replica) bool) bool {
	return !slices.ContainsFunc(members, func(r *api.Replica) bool {
		return !isGone(r) || strings.HasPrefix(r.Status.Reverting, r.Spec.Revert.ID+"/")
	})
}

// takeBack takes back what a member was asked, if it has said nothing since: before it goes back it says so.
func (p *planner) takeBack(ctx context.Context, r *api.Replica) error {
	old := r.DeepCopy()
	r.Spec.Revert = nil
	if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}

// goesBack reports whether a volume is being reverted: from the new epoch on until the end nobody takes another one.
func goesBack(v *api.Volume) error {
	wish, is := v.Spec.RevertTo, v.Status.Reverted
	if wish != nil && is != nil && is.ID == wish.ID && is.State == api.CloneInitiated {
		return api.Errorf(api.Busy, "volume %s is being reverted", v.Name)
	}
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
	if l.server != nil { // an engine of before, shut out: it may not open the replica again until that is reverted
		if err := l.server.Release(uid); err != nil {
			l.Log.Warn("the end of a session of another node", "replica", r.Name, "err", err)
		}
	}
	err = disk.Revert(ctx, uid, string(wish.Snapshot), wish.Epoch)
	if why := l.mergeFails(r.Spec.UID); api.Is(err, api.Busy) && m.Merge != nil && why != "" {
		err = api.Errorf(api.Unavailable, "two of its layers have to be merged before, and that fails: %s", why)
	}
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
