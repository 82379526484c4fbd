package planner

import (
	"cmp"
	"slices"
	"time"

	"drover.io/drover/api"
)

// replicaSet is the input of decideReplicas: the replicas of a volume and facts about their nodes.
type replicaSet struct {
	v        *api.Volume
	mine     []api.Replica
	away     func(node string) time.Duration // how long a node has been silent; 0: not silent
	lost     func(r *api.Replica) bool       // the disk cannot be used; nil: no replica
	leaving  func(r *api.Replica) bool       // the disk or node is evicted or removed
	attached string                          // where the volume is used; empty: nowhere
	zone     func(node string) string        // of a node; empty: a zone of its own. nil: no zones
	// wait is how long a node is silent before another replica is added.
	wait time.Duration
}

// decision says which replicas to add and to drop.
type decision struct {
	add     int      // how many replicas to add
	prefer  string   // on this node if possible
	extra   bool     // only on the preferred node: for locality alone
	leaving []string // dropped after others have joined; they break no topology rule
	drop    []string
	stay    []string      // withdraw the wish to leave
	later   time.Duration // until time alone changes the decision; 0: never
}

// decideReplicas keeps a volume at its replica count. A replica is dropped only while enough other members are
// current, and a current member never for order while another replica is missing. A silent replica may return with
// its data, which costs less than a new replica; so the planner waits before it adds a replacement.
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
		// A deleted member leaves after another replica has joined. Spec.Leave alone is no reason.
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
			continue // another replica is added; the silent replica stays for a while
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
		if d.add == 0 && len(staying) <= want { // another replica for a while
			d.add, d.extra = 1, true
		}
	}
	good, hurt := 0, 0 // current members that may stay: intact, and damaged or still fetching layers
	for _, r := range whole {
		switch {
		case !slices.Contains(staying, r):
		case lacks(r):
			hurt++ // only another replica may hold the missing data
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
			case r.Spec.Leave: // the engine has dropped the replica
				d.drop = append(d.drop, r.Name)
			case near && r.Spec.Node == s.attached:
			case s.takesPlace(r) && s.away(r.Spec.Node) == 0:
			default: // unfinished and not needed
				d.drop = append(d.drop, r.Name)
			}
		}
	}
	for i := range s.mine {
		if r := &s.mine[i]; r.Spec.Leave && r.DeletionTimestamp == nil && !slices.Contains(d.drop, r.Name) {
			d.stay = append(d.stay, r.Name)
		}
	}
	if len(d.stay) > 0 { // the engine may drop these replicas now; the next decision counts again
		d.drop = nil
	}
	return d
}

// isDead reports whether the disk of a replica cannot be used, so that the replica's status is out of date.
func (s *replicaSet) isDead(r *api.Replica) bool { return s.lost != nil && s.lost(r) }

// lacks reports whether the disk of a replica misses data that the replica shows: layers are damaged, or still fetched.
func lacks(r *api.Replica) bool { return len(r.Status.Damage) > 0 || r.Status.Fetching != "" }

// takesPlace reports whether a replica replaces another replica of the set.
func (s *replicaSet) takesPlace(r *api.Replica) bool {
	return r.Spec.Instead != "" && slices.ContainsFunc(s.mine, func(o api.Replica) bool {
		return o.Name == r.Spec.Instead && o.DeletionTimestamp == nil
	})
}

// dropSurplus drops n surplus members, in this order: damaged, already asked to leave, replaced, and then the member
// without which the rest has the best spread.
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
			local := func(r *api.Replica) int { // the only replica there
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
