package planner

import (
	"cmp"
	"fmt"
	"slices"

	"drover.io/drover/api"
)

// Balance moves replicas of healthy volumes to better places: one replica of a volume at a time; the new replica is a
// member before the old replica is deleted. A migration must lower the spread, or leave a nearly full disk for a disk
// far below the limit. So migrations come to an end, and none is undone while the nodes stay as they are.

// Values of replicaAutoBalance.
const (
	balanceDisabled = "disabled"
	balanceLeast    = "least-effort"
	balanceBest     = "best-effort"
)

// pressureGap is how many percent below the limit a disk must stay to take a replica of a disk above the limit.
const pressureGap = 10

// placement is where a replica is.
type placement struct {
	node string
	disk api.UID
}

func placementOf(r *api.Replica) placement { return placement{r.Spec.Node, r.Spec.Disk} }

// spread is how unevenly replicas are spread over zones, nodes and disks: sums of the squares of how many are in each.
type spread [3]int

func (c spread) compare(o spread) int { return slices.Compare(c[:], o[:]) }

// spreadOf computes the spread of placements. A node without a zone counts as a zone.
func spreadOf(seats []placement, zone func(node string) string) (c spread) {
	for i, n := range countPlacements(seats, zone) {
		for _, x := range n {
			c[i] += x * x
		}
	}
	return c
}

// countPlacements counts the seats in each zone, on each node and on each disk.
func countPlacements(seats []placement, zone func(node string) string) (n [3]map[string]int) {
	n = [3]map[string]int{{}, {}, {}}
	for _, s := range seats {
		z := ""
		if zone != nil {
			z = zone(s.node)
		}
		if z == "" {
			n[0]["node "+s.node]++
		} else {
			n[0]["zone "+z]++
		}
		n[1][s.node]++
		n[2][string(s.disk)]++
	}
	return n
}

// proposal is a migration that findMigration suggests.
type proposal struct {
	from *api.Replica
	to   candidate
	why  string
	full bool // leaves a nearly full disk
}

// balanceRules are the rules by which findMigration compares places.
type balanceRules struct {
	mode string
	stay string // the node that uses the volume, which keeps its only replica; empty: none
	// use computes in percent how full a disk will be after all current migrations and with more bytes.
	use   func(disk api.UID, more int64) int64
	limit int64 // percent; 0: how full a disk is does not matter
}

// findMigration returns the best migration for a volume whose replicas are all current members, or nil. The search
// reads places only.
func findMigration(v *api.Volume, t clusterView, s balanceRules) *proposal {
	if s.mode != balanceLeast && s.mode != balanceBest {
		return nil
	}
	zone := t.zoneOfNode
	var seats []placement
	for i := range t.mine {
		seats = append(seats, placementOf(&t.mine[i]))
	}
	now, at := spreadOf(seats, zone), countPlacements(seats, zone)
	var best *proposal
	var found spread
	for i := range t.mine {
		r := &t.mine[i]
		if r.Spec.Node == s.stay && at[1][s.stay] == 1 {
			continue
		}
		t := t
		t.leaving = []string{r.Name}
		spots, _ := t.candidates(v)
		for _, to := range spots {
			if to.disk == r.Spec.Disk {
				continue
			}
			then := slices.Clone(seats)
			then[i] = placement{to.node, to.disk}
			c := spreadOf(then, zone)
			m := &proposal{from: r, to: to}
			switch d := c.compare(now); {
			case d < 0 && s.mode == balanceBest:
				m.why = "the replicas are spread more evenly"
			case d < 0:
				if is := countPlacements(then, zone); len(is[0]) <= len(at[0]) && len(is[1]) <= len(at[1]) {
					continue
				}
				m.why = "more nodes or zones have a replica"
			case d == 0 && s.relievesDisk(r, to):
				m.why, m.full = fmt.Sprintf("its disk is more than %d %% full", s.limit), true
			default:
				continue
			}
			if best == nil || cmp.Or(c.compare(found), compareCandidates(to, best.to), cmp.Compare(r.Name, best.from.Name)) < 0 {
				best, found = m, c
			}
		}
	}
	return best
}

// relievesDisk reports whether a migration leaves a nearly full disk for a disk that stays well below the limit.
func (s *balanceRules) relievesDisk(r *api.Replica, to candidate) bool {
	return s.mode == balanceBest && s.limit > 0 && s.use(r.Spec.Disk, 0) > s.limit &&
		s.use(to.disk, r.Status.Used) < s.limit-pressureGap
}

// zoneOfNode is the zone of a node, or empty.
func (t *clusterView) zoneOfNode(node string) string {
	for i := range t.nodes {
		if t.nodes[i].Name == node {
			return zoneOf(&t.nodes[i])
		}
	}
	return ""
}
