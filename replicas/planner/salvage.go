package planner

import (
	"context"
	"slices"

	"drover.io/drover/api"
)

// salvageReplica makes a replica the only member of a volume without a usable member, at the user's wish; the volume
// loses data that only other replicas hold. It reports whether the status changed. No other code does so.
func (p *volumeReconciler) salvageReplica(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) bool {
	wish := v.Spec.Salvage
	if wish == nil || v.Status.Salvaged != nil && v.Status.Salvaged.ID == wish.ID {
		return false
	}
	fact := &api.SalvageFact{Replica: wish.Replica, ID: wish.ID}
	v.Status.Salvaged = fact
	i := slices.IndexFunc(mine, func(r api.Replica) bool { return r.Name == wish.Replica && r.DeletionTimestamp == nil })
	dead := p.deadDisk(ctx)
	usable := func(r *api.Replica) bool {
		return (r.Status.Mode == api.ReplicaCurrent || r.Status.Mode == api.ReplicaStale) && !p.isSilent(r.Spec.Node) &&
			dead(r) == ""
	}
	member := slices.IndexFunc(mine, func(r api.Replica) bool {
		return slices.Contains(v.Status.Members, r.Name) && usable(&r) && r.Status.Mode == api.ReplicaCurrent
	})
	switch {
	case i < 0:
		fact.Message = "the volume has no replica " + wish.Replica
	case attached:
		fact.Message = "the volume is attached: detach it first, by force if its I/O waits"
	case member >= 0:
		fact.Message = "member " + mine[member].Name + " on node " + mine[member].Spec.Node +
			" can be used, and has every write: the volume needs no salvage"
	case !usable(&mine[i]):
		fact.Message = "replica " + wish.Replica + " cannot be used: its node is silent, its disk is not ready, or the " +
			"disk lacks it"
	}
	if fact.Message != "" {
		return true
	}
	r := &mine[i]
	was := v.Status.Members
	v.Status.Members = []string{r.Name}
	v.Status.Epoch = max(v.Status.Epoch, r.Status.Epoch) + 1
	v.Status.EngineNode = ""
	fact.Done = true
	last := "an unknown time"
	if r.Status.LastWrite != nil {
		last = r.Status.LastWrite.UTC().Format("2006-01-02 15:04:05 UTC")
	}
	fact.Message = "the volume continues with the data of replica " + r.Name + " on node " + r.Spec.Node + ", " +
		"written last at " + last
	p.events.Eventf(v, r, "Warning", "Salvaged", "Salvage", "%s; the volume gives up the former members %v, and "+
		"writes that only they have", fact.Message, was)
	p.log.Warn("volume salvaged", "volume", v.Name, "replica", r.Name, "members before", was)
	return true
}
