package planner

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// A revert is done once or not at all, and never later than the user would expect: what stands in its way ends it.

// revertVolume has all members of a detached volume go back to a snapshot. First the volume takes a new epoch, without the
// members that give no sign of life, or whose disk cannot be used: an engine of before, wherever it still runs, is shut
// out, and whoever is not reverted in that epoch is out of date. Then each member is asked; while one has not answered,
// nobody attaches.
func (p *volumeReconciler) revertVolume(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
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
			if err := p.withdrawRevert(ctx, r); err != nil {
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
	snap, err := p.snapshotToRevertTo(ctx, v, end)
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

type revertEnd func(state api.CloneState, message string)

// snapshotToRevertTo is the snapshot to go back to; nil: there is none that can be used, or an error.
func (p *volumeReconciler) snapshotToRevertTo(ctx context.Context, v *api.Volume, end revertEnd) (*api.Snapshot, error) {
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

func (p *volumeReconciler) askRevert(ctx context.Context, r *api.Replica, wish api.ReplicaRevert) error {
	old := r.DeepCopy()
	r.Spec.Revert = &wish
	if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}

// noneBegan reports whether members are all gone, and none of them had begun to go back: then none has.
func (p *volumeReconciler) noneBegan(members []*api.Replica, isGone func(*api.Replica) bool) bool {
	return !slices.ContainsFunc(members, func(r *api.Replica) bool {
		return !isGone(r) || strings.HasPrefix(r.Status.Reverting, r.Spec.Revert.ID+"/")
	})
}

// withdrawRevert takes back what a member was asked, if it has said nothing since: before it goes back it says so.
func (p *volumeReconciler) withdrawRevert(ctx context.Context, r *api.Replica) error {
	old := r.DeepCopy()
	r.Spec.Revert = nil
	if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}
