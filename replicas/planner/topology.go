package planner

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
)

// topologyRules says whether replicas of a volume may share a node, a zone or a disk. A soft rule permits to share if
// no other disk has room.
type topologyRules struct {
	softNode, softZone, softDisk bool
}

// Settings of anti-affinity, which a volume may override.
const (
	settingSoftNode = "replica-soft-anti-affinity"
	settingSoftZone = "replica-zone-soft-anti-affinity"
	settingSoftDisk = "replica-disk-soft-anti-affinity"
)

// topologyRulesOf returns the rules of a volume: from the spec, else from the settings.
func (p *volumeReconciler) topologyRulesOf(ctx context.Context, v *api.Volume) topologyRules {
	soft := func(own, setting string) bool {
		switch own {
		case "enabled":
			return true
		case "disabled":
			return false
		}
		var s api.Setting
		if err := p.client.Get(ctx, types.NamespacedName{Name: setting}, &s); err == nil {
			return s.Value == "true"
		}
		return api.Settings[setting] == "true"
	}
	return topologyRules{
		softNode: soft(v.Spec.ReplicaSoftAntiAffinity, settingSoftNode),
		softZone: soft(v.Spec.ReplicaZoneSoftAntiAffinity, settingSoftZone),
		softDisk: soft(v.Spec.ReplicaDiskSoftAntiAffinity, settingSoftDisk),
	}
}

// zoneOf returns the zone of a node; without one, the node shares a zone with no other node.
func zoneOf(n *api.Node) string { return n.Labels[api.LabelZone] }

// countNeighbours counts the volume's replicas on a candidate's node, zone and disk, and explains a broken rule.
func (t *clusterView) countNeighbours(n *api.Node, s *candidate) string {
	zone := zoneOf(n)
	var onNode, inZone, onDisk []string
	for i := range t.mine {
		r := &t.mine[i]
		if r.DeletionTimestamp != nil || slices.Contains(t.leaving, r.Name) {
			continue // a leaving replica gives way
		}
		if r.Spec.Node == n.Name {
			onNode = append(onNode, r.Name)
		}
		if r.Spec.Disk == s.disk {
			onDisk = append(onDisk, r.Name)
		}
		if zone == "" {
			continue
		}
		if i := slices.IndexFunc(t.nodes, func(o api.Node) bool { return o.Name == r.Spec.Node }); i >= 0 &&
			zoneOf(&t.nodes[i]) == zone {
			inZone = append(inZone, r.Name)
		}
	}
	s.same, s.zone, s.volume = len(onNode), len(inZone), len(onDisk) > 0
	has := func(what string, names []string, setting string) string {
		return fmt.Sprintf("%s has a replica of the volume already (%s; %s)", what, strings.Join(names, ", "), setting)
	}
	switch {
	case len(onDisk) > 0 && !t.softDisk:
		return has("it", onDisk, settingSoftDisk)
	case len(onNode) > 0 && !t.softNode:
		return has("the node", onNode, settingSoftNode)
	case len(inZone) > 0 && !t.softZone:
		return has("zone "+zone, inZone, settingSoftZone)
	}
	return ""
}
