package planner

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// preferLocal prefers the node of the first use for a volume with data locality.
func preferLocal(v *api.Volume) func(*clusterView) {
	return func(t *clusterView) {
		if l := v.Spec.DataLocality; l != api.LocalityBestEffort && l != api.LocalityStrict {
			return
		}
		if t.prefer = v.Annotations[api.AnnotationPrefer]; t.prefer == "" && len(v.Spec.Nodes) > 0 {
			t.prefer = v.Spec.Nodes[0]
		}
	}
}

// reportLocality sets the condition of a best-effort volume: whether a member is on the node of the attachment, and
// why not.
func (p *volumeReconciler) reportLocality(v *api.Volume, mine []api.Replica, attached string, why error) {
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
				setCondition(v, api.ConditionLocal, true, "Local", fmt.Sprintf("replica %s is on node %s", r.Name, attached))
				return
			}
		}
	}
	if why != nil {
		reason, text = "NoDisk", fmt.Sprintf("no replica can be on node %s: %v", attached, why)
	}
	if setCondition(v, api.ConditionLocal, false, reason, text) && why != nil {
		p.events.Eventf(v, nil, "Warning", "NotLocal", "Place", "%s", text)
	}
}
