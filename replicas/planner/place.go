package planner

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"drover.io/drover/api"
)

// candidate is a disk that a replica could be placed on.
type candidate struct {
	node   string
	disk   api.UID
	path   string
	copy   int   // how far the image is there: 0 not at all, 1 on its way, 2 ready
	same   int   // replicas of the volume on the same node
	zone   int   // and in the same zone
	near   bool  // on the node that the volume is to be near to
	room   int64 // bytes that may still be promised on the disk
	volume bool  // a replica of the volume is on this disk
}

// clusterView is what placement looks at.
type clusterView struct {
	nodes    []api.Node
	promised func(disk api.UID) int64 // sum of the sizes of its replicas
	copies   map[api.UID]api.ImageState
	image    *api.BackingImage // that the volume stands on: its selectors bind the volume too; nil: none is known
	mine     []api.Replica     // of the volume
	topologyRules
	// leaving are replicas of the volume that go when the one to be placed is whole: they need not be kept away from.
	leaving   []string
	transient bool                   // on the disk only, for a while: whatever speaks against it
	instead   string                 // the replica that goes when the one to be placed is whole; empty: none
	silent    func(node string) bool // nil: none is
	prefer    string                 // the node that a replica should be on, for locality; empty: any
	on        string                 // the node that it has to be on, for locality; empty: any
	overPct   int64
	minFreePc int64
	only      api.UID // the disk that a clone's layers are on; empty: any
	near      string  // the node that they are on; empty: any
	strict    bool    // on no other disk than only
}

// choosePlacement finds the best disk for one more replica of v. Without one the error says of each disk why.
func choosePlacement(v *api.Volume, t clusterView) (candidate, error) {
	spots, why := t.candidates(v)
	if len(spots) == 0 {
		if len(t.nodes) == 0 {
			why = []string{"there are no nodes"}
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

// candidates are the disks that one more replica of v could be placed on, and why the others cannot take it.
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

// isOtherDisk reports whether a disk is not the one that it has to be.
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

// imageAsks tells which tag the volume's image asks for that is not there.
func (t *clusterView) imageAsks(want, have []string) string {
	if tag := missingTag(want, have); tag != "" {
		return fmt.Sprintf("it lacks the tag %s, which backing image %s asks for", tag, t.image.Name)
	}
	return ""
}

// missingTag is the first wanted tag that is not there.
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
	room, why := t.roomLeft(d, st, v.Spec.Size)
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

// roomLeft is what is left to promise on a disk after size more bytes, or why they cannot be promised.
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
			"storage-over-provisioning-percentage)", api.SizeText(promised), api.SizeText(limit), t.overPct, api.SizeText(capacity))
	}
	return limit - promised - size, ""
}
