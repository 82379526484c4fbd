package planner

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"drover.io/drover/api"
)

// candidate is a disk that can take a replica.
type candidate struct {
	node   string
	disk   api.UID
	path   string
	copy   int   // the image on the disk: 0 absent, 1 in progress, 2 ready
	same   int   // replicas of the volume on the same node
	zone   int   // and in the same zone
	near   bool  // on the preferred node
	room   int64 // bytes left to promise
	volume bool  // the disk has a replica of the volume
}

// clusterView is the input of a placement decision.
type clusterView struct {
	nodes    []api.Node
	promised func(disk api.UID) int64 // sum of replica sizes
	copies   map[api.UID]api.ImageState
	image    *api.BackingImage // the base image, whose selectors bind the volume too; nil: none
	mine     []api.Replica     // of the volume
	topologyRules
	// leaving names replicas that are dropped after the placed replica has joined; they break no topology rule.
	leaving   []string
	transient bool                   // for a while on the disk `only`, against all other rules
	instead   string                 // the replica to drop after the placed replica has joined; empty: none
	silent    func(node string) bool // nil: no node
	prefer    string                 // the preferred node, for locality; empty: any
	on        string                 // the only permitted node, for locality; empty: any
	overPct   int64
	minFreePc int64
	only      api.UID // the disk with a clone's layers; empty: any
	near      string  // the node with the layers; empty: any
	strict    bool    // on no other disk than only
}

// choosePlacement returns the best disk for another replica of v, or an error that says why each disk refuses.
func choosePlacement(v *api.Volume, t clusterView) (candidate, error) {
	spots, why := t.candidates(v)
	if len(spots) == 0 {
		if len(t.nodes) == 0 {
			why = []string{"the cluster has no nodes"}
		}
		if more := len(why) - 6; more > 0 {
			why = append(why[:6], fmt.Sprintf("and %d more", more))
		}
		return candidate{}, api.Errorf(api.Full, "no disk for a replica of %s: %s",
			api.SizeText(v.Spec.Size), strings.Join(why, "; "))
	}
	return slices.MinFunc(spots, compareCandidates), nil
}

// compareCandidates puts the better spot first.
func compareCandidates(a, b candidate) int {
	first := func(is bool) int {
		if is {
			return 0
		}
		return 1
	}
	return cmp.Or(first(!a.volume)-first(!b.volume),
		a.same-b.same, // soft: other nodes first
		a.zone-b.zone,
		first(a.near)-first(b.near),
		b.copy-a.copy,
		cmp.Compare(b.room, a.room))
}

// candidates lists the disks that can take another replica of v, and why the others cannot.
func (t *clusterView) candidates(v *api.Volume) (spots []candidate, why []string) {
	for i := range t.nodes {
		n := &t.nodes[i]
		if t.only != "" && !slices.ContainsFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.UID == t.only }) {
			continue
		}
		if t.near != "" && t.near != n.Name || t.on != "" && t.on != n.Name {
			continue
		}
		r := ""
		if !t.transient {
			if r = nodeRefuses(v, n); r == "" && t.image != nil {
				r = t.imageAsks(t.image.Spec.NodeSelector, n.Spec.Tags)
			}
		}
		if r == "" && t.silent != nil && t.silent(n.Name) {
			r = "it gives no sign of life"
		}
		if r != "" {
			why = append(why, fmt.Sprintf("node %s: %s", n.Name, r))
			continue
		}
		if len(n.Spec.Disks) == 0 {
			why = append(why, fmt.Sprintf("node %s: it has no disks, add one", n.Name))
		}
		for _, d := range n.Spec.Disks {
			if t.isOtherDisk(n, d) {
				continue
			}
			s, r := t.candidateOn(v, n, d)
			if r != "" {
				why = append(why, fmt.Sprintf("disk %s of node %s: %s", d.Path, n.Name, r))
				continue
			}
			spots = append(spots, s)
		}
	}
	return spots, why
}

// isOtherDisk reports whether the view demands another disk.
func (t *clusterView) isOtherDisk(n *api.Node, d api.DiskSpec) bool {
	return t.only != "" && !slices.ContainsFunc(n.Status.Disks, func(s api.DiskStatus) bool {
		return s.Path == d.Path && s.UID == t.only
	})
}

func nodeRefuses(v *api.Volume, n *api.Node) string {
	switch {
	case n.DeletionTimestamp != nil:
		return "it is being removed"
	case n.Spec.EvictionRequested:
		return "it is being evicted"
	case n.Spec.Schedulable != nil && !*n.Spec.Schedulable:
		return "scheduling is turned off"
	case len(v.Spec.Nodes) > 0 && !slices.Contains(v.Spec.Nodes, n.Name):
		return "the volume must be on " + strings.Join(v.Spec.Nodes, ", ")
	}
	if tag := missingTag(v.Spec.NodeSelector, n.Spec.Tags); tag != "" {
		return "it lacks the tag " + tag
	}
	return ""
}

// imageAsks explains which tag the selectors of the base image miss.
func (t *clusterView) imageAsks(want, have []string) string {
	if tag := missingTag(want, have); tag != "" {
		return fmt.Sprintf("it lacks the tag %s, which backing image %s asks for", tag, t.image.Name)
	}
	return ""
}

// missingTag returns the first wanted tag that is missing, or "".
func missingTag(want, have []string) string {
	for _, tag := range want {
		if !slices.Contains(have, tag) {
			return tag
		}
	}
	return ""
}

func (t *clusterView) candidateOn(v *api.Volume, n *api.Node, d api.DiskSpec) (candidate, string) {
	i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.Path == d.Path })
	if t.transient && i >= 0 && n.Status.Disks[i].Ready {
		return candidate{node: n.Name, disk: n.Status.Disks[i].UID, path: d.Path}, ""
	}
	switch {
	case d.Schedulable != nil && !*d.Schedulable:
		return candidate{}, "scheduling is turned off"
	case d.EvictionRequested:
		return candidate{}, "it is being evicted"
	case i < 0:
		return candidate{}, "the node has not looked at it yet"
	case !n.Status.Disks[i].Ready:
		return candidate{}, "not ready: " + n.Status.Disks[i].Message
	}
	if tag := missingTag(v.Spec.DiskSelector, d.Tags); tag != "" {
		return candidate{}, "it lacks the tag " + tag
	}
	if t.image != nil {
		if why := t.imageAsks(t.image.Spec.DiskSelector, d.Tags); why != "" {
			return candidate{}, why
		}
	}
	st := n.Status.Disks[i]
	room, why := t.roomLeft(d, st, v.PromisedSize())
	if why != "" {
		return candidate{}, why
	}
	s := candidate{node: n.Name, disk: st.UID, path: d.Path, room: room}
	switch t.copies[st.UID] {
	case api.ImageReady:
		s.copy = 2
	case api.ImagePending, api.ImageStarting, api.ImageInProgress, api.ImageTransfer:
		s.copy = 1
	}
	s.near = t.prefer == n.Name
	return s, t.countNeighbours(n, &s)
}

// roomLeft returns the bytes left to promise on a disk after size more bytes, or why the disk cannot promise size
// bytes.
func (t *clusterView) roomLeft(d api.DiskSpec, st api.DiskStatus, size int64) (int64, string) {
	capacity := max(st.Capacity-d.ReservedBytes, 0)
	if st.Capacity > 0 && st.Available*100 < st.Capacity*t.minFreePc {
		return 0, fmt.Sprintf("only %s of %s are free, less than %d %% (storage-minimal-available-percentage)",
			api.SizeText(st.Available), api.SizeText(st.Capacity), t.minFreePc)
	}
	promised := t.promised(st.UID)
	limit := capacity / 100 * t.overPct
	if promised+size > limit {
		return 0, fmt.Sprintf("%s are promised to volumes and the limit is %s (%d %% of %s, "+
			"storage-over-provisioning-percentage)", api.SizeText(promised), api.SizeText(limit), t.overPct,
			api.SizeText(capacity))
	}
	return limit - promised - size, ""
}
