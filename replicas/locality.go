package replicas

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// Values of dataLocality. A strict-local volume has its only replica on the node that uses it, and is attached nowhere
// else. With best-effort a replica is made on the node after an attach, and an extra one goes when that is whole.
const (
	localDisabled   = "disabled"
	localBestEffort = "best-effort"
	localStrict     = "strict-local"
)

// nearFirst prefers, for a volume that is to be local, the node that it will be used on first.
func nearFirst(v *api.Volume) func(*terrain) {
	return func(t *terrain) {
		if l := v.Spec.DataLocality; l != localBestEffort && l != localStrict {
			return
		}
		if t.prefer = v.Annotations[api.AnnotationPrefer]; t.prefer == "" && len(v.Spec.Nodes) > 0 {
			t.prefer = v.Spec.Nodes[0]
		}
	}
}

// strictlyHere refuses to attach a strict-local volume where it has no replica.
func (d *Data) strictlyHere(ctx context.Context, v *api.Volume) error {
	if v.Spec.DataLocality != localStrict {
		return nil
	}
	if r, err := memberOn(ctx, d.client, v, d.Node); err != nil || r != nil {
		return err
	}
	r, err := memberOn(ctx, d.client, v, "")
	if err != nil {
		return err
	}
	where := "another node"
	if r != nil {
		where = "node " + r.Spec.Node
	}
	return api.Errorf(api.InUse, "volume %s has dataLocality strict-local and its data is on %s: use it there, or set "+
		"dataLocality to best-effort to use it on node %s", v.Name, where, d.Node)
}

// tellLocal says of an attached volume with best-effort whether its data is on its node, and if not, why.
func (p *planner) tellLocal(v *api.Volume, mine []api.Replica, attached string, why error) {
	if v.Spec.DataLocality != localBestEffort || attached == "" {
		meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionLocal)
		return
	}
	reason, text := "Copying", fmt.Sprintf("a replica on node %s is to come", attached)
	for i := range mine {
		r := &mine[i]
		if r.Spec.Node != attached || r.DeletionTimestamp != nil {
			continue
		}
		text = fmt.Sprintf("replica %s on node %s is made", r.Name, attached)
		for _, m := range v.Status.Members {
			if m == r.Name {
				condition(v, api.ConditionLocal, true, "Local", fmt.Sprintf("replica %s is on node %s", r.Name, attached))
				return
			}
		}
	}
	if why != nil {
		reason, text = "NoDisk", fmt.Sprintf("no replica can be on node %s: %v", attached, why)
	}
	if condition(v, api.ConditionLocal, false, reason, text) && why != nil {
		p.events.Eventf(v, nil, "Warning", "NotLocal", "Place", "%s", text)
	}
}
