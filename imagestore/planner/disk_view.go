package planner

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// silentAfter is how long a copy counts on a disk that does not answer.
const silentAfter = 40 * time.Second

// diskState is the part of a disk that placement needs.
type diskState struct {
	uid                api.UID
	node, path         string
	nodeTags, diskTags []string
	alive              bool   // node and disk answer
	open               bool   // takes new copies
	leaving            bool   // eviction is requested
	gone               bool   // the node reports that the disk is missing
	removed            bool   // no longer in the node's spec, and without an answer
	message            string // why the disk does not answer
	available          int64
}

// disksOfNodes returns all disks in the statuses of nodes, and which nodes are alive.
func disksOfNodes(nodes []api.Node, now time.Time) (disks []diskState, alive map[string]bool) {
	alive = map[string]bool{}
	for i := range nodes {
		n := &nodes[i]
		live := now.Sub(n.Status.Heartbeat.Time) < n.SilentAfter() &&
			!meta.IsStatusConditionFalse(n.Status.Conditions, api.ConditionReady)
		alive[n.Name] = live
		for _, st := range n.Status.Disks {
			if st.UID == "" {
				continue
			}
			d := diskState{uid: st.UID, node: n.Name, path: st.Path, nodeTags: n.Spec.Tags, alive: live && st.Ready,
				message: st.Message, available: st.Available, gone: st.Gone}
			j := slices.IndexFunc(n.Spec.Disks, func(s api.DiskSpec) bool { return s.Path == st.Path })
			if j >= 0 {
				s := n.Spec.Disks[j]
				d.diskTags, d.leaving = s.Tags, s.EvictionRequested || n.Spec.EvictionRequested
				d.open = !d.leaving && (s.Schedulable == nil || *s.Schedulable) &&
					(n.Spec.Schedulable == nil || *n.Spec.Schedulable)
			} else {
				d.leaving, d.removed = true, !st.Ready
			}
			disks = append(disks, d)
		}
	}
	return disks, alive
}

func (v *clusterView) findDisk(uid api.UID) *diskState {
	// A disk that moved is in the status of both nodes.
	i := slices.IndexFunc(v.disks, func(d diskState) bool { return d.uid == uid && d.alive })
	if i < 0 {
		i = slices.IndexFunc(v.disks, func(d diskState) bool { return d.uid == uid })
	}
	if i < 0 {
		return nil
	}
	return &v.disks[i]
}

// isAlive reports whether the disk answers.
func (v *clusterView) isAlive(uid api.UID) bool {
	d := v.findDisk(uid)
	return d != nil && d.alive
}

// isGone reports that no node will ever answer for the disk: the Node object was deleted, or a user removed the disk,
// or the node is alive with all its disks except this disk.
func (v *clusterView) isGone(node string, uid api.UID) bool {
	live, known := v.nodes[node]
	if !known {
		return true
	}
	mine := 0
	for _, d := range v.disks {
		if d.node != node {
			continue
		}
		if d.uid == uid {
			return d.removed
		}
		if !d.alive && !d.removed {
			return false
		}
		mine++
	}
	return live && mine > 0
}

// isUsed reports whether a replica on the disk has the image below.
func (v *clusterView) isUsed(uid api.UID) bool {
	return slices.ContainsFunc(v.needed, func(n location) bool { return n.disk == uid })
}
