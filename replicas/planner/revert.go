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

// A revert happens once or not at all, and never later than the user would expect: an obstacle ends the revert.

// revertProgress is the state of a revert: the members of the volume, and their answers.
type revertProgress struct {
	p       *volumeReconciler
	v       *api.Volume
	wish    *api.RevertWish
	members []*api.Replica
	isGone  func(*api.Replica) bool // the node is silent or the disk cannot be used
	asked   []*api.Replica          // members with the wish in their spec: done, failed or left
	done    []*api.Replica
	failed  []*api.Replica
	left    []*api.Replica // without an answer yet
	why     string         // the error of a failed member
	waits   string         // the message of a member without an answer
}

// revertVolume reverts all members of a detached volume to a snapshot. First the volume takes a new epoch, without the
// members that are silent or whose disk cannot be used: the epoch fences every older engine, and a member that is not
// reverted in that epoch is stale. Then the planner asks each member; until all have answered, no engine attaches.
func (p *volumeReconciler) revertVolume(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
	wish, is := v.Spec.RevertTo, v.Status.Reverted
	if wish == nil || is != nil && is.ID == wish.ID && is.State != api.CloneInitiated {
		return nil
	}
	r := p.readRevert(ctx, v, mine)
	switch {
	case len(r.asked) > 0:
		return r.followUp(ctx)
	case attached:
		r.end(api.CloneFailed, "the volume is attached: detach it first")
		return nil
	}
	snap, err := p.snapshotToRevertTo(ctx, v, r.end)
	if snap == nil {
		return err
	}
	if is == nil || is.ID != wish.ID {
		r.begin() // the write of the status brings the next reconcile
		return nil
	}
	for _, m := range r.members {
		if err := p.askRevert(ctx, m, api.ReplicaRevert{ID: wish.ID, Snapshot: snap.Status.UID,
			Epoch: v.Status.Epoch}); err != nil {
			return err
		}
	}
	r.end(api.CloneInitiated, "")
	return nil
}

// readRevert sorts the members by their answers.
func (p *volumeReconciler) readRevert(ctx context.Context, v *api.Volume, mine []api.Replica) *revertProgress {
	dead := p.deadDisk(ctx)
	r := &revertProgress{p: p, v: v, wish: v.Spec.RevertTo,
		isGone: func(m *api.Replica) bool { return p.isSilent(m.Spec.Node) || dead(m) != "" }}
	for i := range mine {
		m := &mine[i]
		if !slices.Contains(v.Status.Members, m.Name) {
			continue
		}
		r.members = append(r.members, m)
		if !r.isAsked(m) {
			continue
		}
		r.asked = append(r.asked, m)
		switch {
		case m.Status.Reverted != r.wish.ID:
			r.left = append(r.left, m)
			r.waits = m.Status.Message
		case m.Status.RevertError != "":
			r.failed = append(r.failed, m)
			r.why = m.Status.RevertError
		default:
			r.done = append(r.done, m)
		}
	}
	return r
}

func (r *revertProgress) isAsked(m *api.Replica) bool {
	return m.Spec.Revert != nil && m.Spec.Revert.ID == r.wish.ID
}

func (r *revertProgress) isHere(m *api.Replica) bool { return !r.isGone(m) }

// end records the state of the revert in the status, and emits the event of a final state.
func (r *revertProgress) end(state api.CloneState, message string) {
	r.v.Status.Reverted = &api.RevertFact{Snapshot: r.wish.Snapshot, ID: r.wish.ID, State: state, Message: message}
	switch state {
	case api.CloneCompleted:
		r.p.events.Eventf(r.v, nil, "Normal", "Reverted", "Revert", "the volume has the content of snapshot %s",
			r.wish.Snapshot)
	case api.CloneFailed:
		r.p.events.Eventf(r.v, nil, "Warning", "RevertFailed", "Revert", "snapshot %s: %s", r.wish.Snapshot, message)
	}
}

// leave takes a member out of the volume.
func (r *revertProgress) leave(m *api.Replica) {
	st := &r.v.Status
	st.Members = slices.DeleteFunc(slices.Clone(st.Members), func(name string) bool { return name == m.Name })
	st.Epoch++
}

// begin takes the new epoch, without the members that cannot answer.
func (r *revertProgress) begin() {
	if !slices.ContainsFunc(r.members, r.isHere) {
		r.end(api.CloneFailed, "no replica of the volume can be reached")
		return
	}
	for _, m := range r.members {
		if r.isGone(m) {
			r.leave(m)
		}
	}
	r.v.Status.Epoch++
	r.v.Status.EngineNode = ""
	r.end(api.CloneInitiated, "")
}

// followUp acts on the answers of the members that were asked.
func (r *revertProgress) followUp(ctx context.Context) error {
	all := len(r.asked) == len(r.members)
	switch {
	case all && len(r.done) == 0 && len(r.left) > 0 && r.p.noneBegan(r.left, r.isGone):
		return r.giveUp(ctx)
	case len(r.done)+len(r.failed) < len(r.members):
		return r.awaitAnswers(ctx)
	case len(r.done) == 0:
		r.end(api.CloneFailed, r.why)
		return nil
	}
	for _, m := range r.failed {
		r.leave(m)
	}
	r.v.Status.RevertedEpoch = r.done[0].Spec.Revert.Epoch // all members were asked with the same epoch
	r.end(api.CloneCompleted, "")
	return nil
}

// giveUp withdraws the wish from members that are gone: a member that returns would revert much later than the user
// expects.
func (r *revertProgress) giveUp(ctx context.Context) error {
	for _, m := range r.left {
		if err := r.p.withdrawRevert(ctx, m); err != nil {
			return err
		}
	}
	if r.why == "" {
		r.why = "no replica of the volume can be reached"
	}
	r.end(api.CloneFailed, r.why)
	return nil
}

// awaitAnswers asks the members that a crash of the controller left out, and drops the members that cannot answer once
// the content of the volume is decided. A reverted member decides it: the volume is the snapshot. A failed member holds
// the old content; if all other replicas are lost, their content is unknown, and the volume is the old content.
func (r *revertProgress) awaitAnswers(ctx context.Context) error {
	unknown := len(r.asked) == len(r.members) && len(r.failed) > 0 && !slices.ContainsFunc(r.left, r.isHere)
	for _, m := range r.members {
		if len(r.done) > 0 && r.isGone(m) && !slices.Contains(r.done, m) || unknown && slices.Contains(r.left, m) {
			r.leave(m)
		} else if !r.isAsked(m) {
			if err := r.p.askRevert(ctx, m, *r.asked[0].Spec.Revert); err != nil {
				return err
			}
		}
	}
	r.end(api.CloneInitiated, r.waits)
	return nil
}

// revertEnd records the end of a revert.
type revertEnd func(state api.CloneState, message string)

// snapshotToRevertTo returns the snapshot for a revert; nil: no usable snapshot, or an error.
func (p *volumeReconciler) snapshotToRevertTo(ctx context.Context, v *api.Volume,
	end revertEnd) (*api.Snapshot, error) {
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

// noneBegan reports whether all members are gone and none had begun to revert.
func (p *volumeReconciler) noneBegan(members []*api.Replica, isGone func(*api.Replica) bool) bool {
	return !slices.ContainsFunc(members, func(r *api.Replica) bool {
		return !isGone(r) || strings.HasPrefix(r.Status.Reverting, r.Spec.Revert.ID+"/")
	})
}

// withdrawRevert withdraws the wish from a member. A member records the begin of a revert first, and a conflict then
// refuses the withdrawal.
func (p *volumeReconciler) withdrawRevert(ctx context.Context, r *api.Replica) error {
	old := r.DeepCopy()
	r.Spec.Revert = nil
	if err := p.client.Patch(ctx, r, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}
