package planner

import (
	"cmp"
	"slices"
	"time"

	"drover.io/drover/api"
)

// replicaSet is what is known of a volume's replicas when it is decided which of them stay and how many are added.
type replicaSet struct {
	v        *api.Volume
	mine     []api.Replica
	away     func(node string) time.Duration // how long a node gave no sign of life; 0: it does
	lost     func(r *api.Replica) bool       // its disk cannot be used; nil: none
	leaving  func(r *api.Replica) bool       // its disk or node is being evicted, or was taken away
	attached string                          // where the volume is used; empty: nowhere
	zone     func(node string) string        // of a node; empty: it shares its zone with nobody. nil: there are none
	// wait is how long a replica that is away is waited for before another takes its place.
	wait time.Duration
}

// decision is what is to be done about a volume's replicas.
type decision struct {
	add     int      // so many more are wanted
	prefer  string   // on this node, if it can be
	extra   bool     // the one that is wanted is for nearness alone: there or nowhere
	leaving []string // they go once others are whole: need not be kept apart from
	drop    []string
	stay    []string      // they were asked to leave, and need not any more
	later   time.Duration // until time alone changes the verdict; 0: it does not
}

// decideReplicas keeps a volume at its number of replicas. A replica is dropped only when enough others are whole, and never a
// whole one for the sake of order while another is missing. One that is away is waited for: it comes back with what it
// has, which costs less than a new one.
func decideReplicas(s replicaSet) decision {
	var d decision
	want := int(max(s.v.Spec.NumberOfReplicas, 1))
	var whole, staying, going, lost []*api.Replica
	for i := range s.mine {
		r := &s.mine[i]
		member := slices.Contains(s.v.Status.Members, r.Name)
		if r.DeletionTimestamp != nil && !member {
			continue
		}
		away := s.away(r.Spec.Node)
		// A member that somebody deleted leaves once another is whole. That it was asked to leave is no reason by itself.
		leaving := s.leaving(r) || r.DeletionTimestamp != nil
		if leaving {
			d.leaving = append(d.leaving, r.Name)
		}
		switch {
		case member && r.Status.Mode == api.ReplicaCurrent && away == 0 && !s.isDead(r):
			whole = append(whole, r)
		case !member && r.Status.Mode == api.ReplicaFailed:
			lost = append(lost, r)
			continue
		case away > s.wait:
			stale := time.Duration(s.v.Spec.StaleReplicaTimeout) * time.Minute
			if !member && stale > 0 && away > stale {
				lost = append(lost, r)
			} else if !member && stale > 0 {
				d.recheckIn(stale - away)
			}
			continue // another takes its place; what it has is kept for a while
		case away > 0:
			d.recheckIn(s.wait - away)
		}
		if leaving {
			going = append(going, r)
		} else {
			staying = append(staying, r)
		}
	}
	if len(s.v.Status.Members) == 0 {
		return d // there is nothing to copy from yet, or any more
	}
	d.add = max(want-len(staying), 0)
	near := s.v.Spec.DataLocality == api.LocalityBestEffort && s.attached != ""
	if near && !slices.ContainsFunc(staying, func(r *api.Replica) bool { return r.Spec.Node == s.attached }) {
		d.prefer = s.attached
		if d.add == 0 && len(staying) <= want { // one more for a while
			d.add, d.extra = 1, true
		}
	}
	good, hurt := 0, 0 // whole, and where they may stay; of these, damaged on their disks or without all layers there
	for _, r := range whole {
		switch {
		case !slices.Contains(staying, r):
		case lacks(r):
			hurt++ // another one, or one that was lost, may be all that has what is damaged
		default:
			good++
		}
	}
	if good > 0 {
		for _, r := range lost {
			d.drop = append(d.drop, r.Name)
		}
	}
	if good >= want {
		for _, r := range going {
			d.drop = append(d.drop, r.Name)
		}
		d.dropSurplus(s, whole, staying, good+hurt-want)
		for _, r := range staying {
			switch {
			case slices.Contains(whole, r):
			case r.Spec.Leave: // it was asked to, and the engine has let it go
				d.drop = append(d.drop, r.Name)
			case near && r.Spec.Node == s.attached:
			case s.takesPlace(r) && s.away(r.Spec.Node) == 0:
			default: // it is made, and not needed
				d.drop = append(d.drop, r.Name)
			}
		}
	}
	for i := range s.mine {
		if r := &s.mine[i]; r.Spec.Leave && r.DeletionTimestamp == nil && !slices.Contains(d.drop, r.Name) {
			d.stay = append(d.stay, r.Name)
		}
	}
	if len(d.stay) > 0 { // the engine may be about to let them go: who else may go is seen next
		d.drop = nil
	}
	return d
}

// isDead reports whether a replica's disk cannot be used: what its status says is old.
func (s *replicaSet) isDead(r *api.Replica) bool { return s.lost != nil && s.lost(r) }

// lacks reports whether a replica's disk does not have all that the replica shows: layers are damaged, or still fetched.
func lacks(r *api.Replica) bool { return len(r.Status.Damage) > 0 || r.Status.Fetching != "" }

// takesPlace reports whether a replica is made to be where another one is not.
func (s *replicaSet) takesPlace(r *api.Replica) bool {
	return r.Spec.Instead != "" && slices.ContainsFunc(s.mine, func(o api.Replica) bool {
		return o.Name == r.Spec.Instead && o.DeletionTimestamp == nil
	})
}

// dropSurplus drops n whole replicas that are more than wanted: those first that are damaged, then those that were asked to
// leave before, then those whose place another has taken, then those without which the rest is spread best.
func (d *decision) dropSurplus(s replicaSet, whole, staying []*api.Replica, n int) {
	left := slices.DeleteFunc(slices.Clone(whole), func(r *api.Replica) bool { return !slices.Contains(staying, r) })
	one := func(is bool) int {
		if is {
			return 1
		}
		return 0
	}
	for ; n > 0 && len(left) > 1; n-- {
		without := func(r *api.Replica) spread {
			var seats []placement
			for _, o := range left {
				if o != r {
					seats = append(seats, placementOf(o))
				}
			}
			return spreadOf(seats, s.zone)
		}
		worst := slices.MinFunc(left, func(a, b *api.Replica) int {
			local := func(r *api.Replica) int { // the only one there
				return one(s.v.Spec.DataLocality != api.LocalityDisabled && r.Spec.Node == s.attached &&
					!slices.ContainsFunc(left, func(o *api.Replica) bool { return o != r && o.Spec.Node == s.attached }))
			}
			replaced := func(r *api.Replica) int {
				return one(slices.ContainsFunc(left, func(o *api.Replica) bool { return o.Spec.Instead == r.Name }))
			}
			damaged := func(r *api.Replica) int { return one(lacks(r)) }
			asked := func(r *api.Replica) int { return one(r.Spec.Leave) }
			return cmp.Or(cmp.Compare(damaged(b), damaged(a)), cmp.Compare(local(a), local(b)), cmp.Compare(asked(b), asked(a)),
				cmp.Compare(replaced(b), replaced(a)),
				without(a).compare(without(b)), b.CreationTimestamp.Compare(a.CreationTimestamp.Time),
				cmp.Compare(a.Name, b.Name))
		})
		d.drop = append(d.drop, worst.Name)
		left = slices.DeleteFunc(left, func(r *api.Replica) bool { return r == worst })
	}
}

func (d *decision) recheckIn(t time.Duration) {
	t = max(t, 0) + time.Second
	if d.later == 0 || t < d.later {
		d.later = t
	}
}
