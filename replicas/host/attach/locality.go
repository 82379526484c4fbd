package attach

import (
	"context"

	"drover.io/drover/api"
)

// checkLocality refuses to attach a strict-local volume on a node without a replica.
func (as *reconciler) checkLocality(ctx context.Context, v *api.Volume) error {
	if v.Spec.DataLocality != api.LocalityStrict {
		return nil
	}
	if r, err := as.MemberOn(ctx, v, as.Name); err != nil || r != nil {
		return err
	}
	r, err := as.MemberOn(ctx, v, "")
	if err != nil {
		return err
	}
	where := "another node"
	if r != nil {
		where = "node " + r.Spec.Node
	}
	return api.Errorf(api.InUse, "volume %s has dataLocality strict-local and its data is on %s: use it there, or set "+
		"dataLocality to best-effort to use it on node %s", v.Name, where, as.Name)
}
