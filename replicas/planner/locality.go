package planner

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// nearFirst prefers, for a volume that is to be local, the node that it will be used on first.
func nearFirst(v *api.Volume) func(*terrain) {
	return func(t *terrain) {
		if l := v.Spec.DataLocality; l != api.LocalityBestEffort && l != api.LocalityStrict {
			return
		}
		if t.prefer = v.Annotations[api.AnnotationPrefer]; t.prefer == "" && len(v.Spec.Nodes) > 0 {
			t.prefer = v.Spec.Nodes[0]
		}
	}
}

// tellLocal says of an attached volume with best-effort whether its data is on its node, and if not, why.
func (p *planner) tellLocal(v *api.Volume, mine []api.Replica, attached string, why error) {
	if v.Spec.DataLocality != api.LocalityBestEffort || attached == "" {
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
