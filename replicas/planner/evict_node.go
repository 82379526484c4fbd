package planner

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// A volume's only replica leaves a node, or a disk without a sibling on the node, in three steps: the planner places a
// second replica on another node, the volume's engine (an offline engine for a detached volume) rebuilds the replica,
// and the planner drops the first replica.

// leavesNode reports whether a second replica replaces the only replica of a volume through the engine. A condition
// says why a wanted replacement waits.
func (p *volumeReconciler) leavesNode(ctx context.Context, v *api.Volume, mine []api.Replica,
	att *api.Attachment) (bool, error) {
	if slices.ContainsFunc(mine, func(r api.Replica) bool {
		return r.Spec.From != nil && r.Spec.From.Whole &&
			r.Status.Mode != api.ReplicaCurrent
	}) {
		return false, nil // the replica moves on its node
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
		return true, nil // a user deleted the replica
	}
	if v.Spec.DataLocality == api.LocalityBestEffort && att != nil && att.DeletionTimestamp == nil &&
		att.Spec.Node != r.Spec.Node && !p.isSilent(r.Spec.Node) {
		return true, nil // the replica follows the attachment
	}
	stuck := meta.FindStatusCondition(v.Status.Conditions, api.ConditionEvicted)
	byEngine := att != nil || stuck != nil && stuck.Reason != "Moving" // else the replica may move on its node
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

// preferSameNode prefers the node that uses the volume for the replacement of the only replica on that node.
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
