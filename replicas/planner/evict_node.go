package planner

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// A volume's only replica leaves a node, or a disk that it cannot leave by a move on its node, in three steps: a second
// one is made elsewhere, the volume's engine makes it equal (of a detached volume an engine without a device does), and
// then the first one goes.

// leavesNode reports whether the only replica of a volume is on its way to another place. Where it should and cannot, a
// condition says why.
func (p *volumeReconciler) leavesNode(ctx context.Context, v *api.Volume, mine []api.Replica, att *api.Attachment) (bool, error) {
	if slices.ContainsFunc(mine, func(r api.Replica) bool {
		return r.Spec.From != nil && r.Spec.From.Whole &&
			r.Status.Mode != api.ReplicaCurrent
	}) {
		return false, nil // it moves on its node
	}
	i := slices.IndexFunc(mine, func(r api.Replica) bool { return slices.Contains(v.Status.Members, r.Name) })
	if i < 0 {
		return false, nil
	}
	if len(mine) > 1 {
		return true, nil
	}
	r := &mine[i]
	var n api.Node
	if err := p.client.Get(ctx, types.NamespacedName{Name: r.Spec.Node}, &n); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	if r.Spec.Transient && !p.isSilent(r.Spec.Node) {
		setCondition(v, api.ConditionEvicted, false, "Leaving", "the clone is to be on another node than its source")
		return true, nil
	}
	if r.DeletionTimestamp != nil && !p.isSilent(r.Spec.Node) {
		return true, nil // by somebody's hand: another one takes its place
	}
	if v.Spec.DataLocality == api.LocalityBestEffort && att != nil && att.DeletionTimestamp == nil &&
		att.Spec.Node != r.Spec.Node && !p.isSilent(r.Spec.Node) {
		return true, nil // it follows the one who uses it
	}
	stuck := meta.FindStatusCondition(v.Status.Conditions, api.ConditionEvicted)
	byEngine := att != nil || stuck != nil && stuck.Reason != "Moving" // else it may move on its node
	if !n.Spec.EvictionRequested && (!isLeaving(&n, r.Spec.Disk) || !byEngine) {
		return false, nil
	}
	var why, reason string
	switch {
	case n.Spec.EvictionRequested && v.Spec.DataLocality == api.LocalityStrict && att != nil:
		reason, why = "Attached", "the volume is attached there and has dataLocality strict-local: detach it first"
	case !p.isSilent(r.Spec.Node):
		setCondition(v, api.ConditionEvicted, false, "Leaving", "the replica is to be elsewhere")
		return true, nil
	default:
		reason, why = "NodeSilent", "node "+r.Spec.Node+" gives no sign of life"
	}
	if setCondition(v, api.ConditionEvicted, false, reason, "the replica stays on node "+r.Spec.Node+": "+why) {
		p.events.Eventf(v, r, "Warning", "EvictionWaits", "Evict", "the replica stays on node %s: %s", r.Spec.Node, why)
	}
	return false, nil
}

// preferSameNode says where the replica is best that takes the place of a volume's only one, which is used on the same node.
func preferSameNode(v *api.Volume, mine []api.Replica, attached string) func(*clusterView) {
	return func(t *clusterView) {
		if v.Spec.NumberOfReplicas > 1 || len(mine) != 1 || attached == "" || mine[0].Spec.Node != attached ||
			t.prefer != "" {
			return
		}
		if t.prefer = attached; v.Spec.DataLocality == api.LocalityStrict {
			t.on = attached
		}
	}
}
