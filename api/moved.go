package api

import (
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DiskMovedTo is the node that has a disk now which was on another one; empty: none surely has. The former node must
// live and say that the disk is gone from it, and one alone that lives must have it: what a silent node says is past,
// and where two have it one has a copy.
func DiskMovedTo(nodes []Node, disk UID, from string, now time.Time) string {
	gone := false
	var at []string
	for i := range nodes {
		n := &nodes[i]
		alive := now.Sub(n.Status.Heartbeat.Time) < n.SilentAfter()
		for _, d := range n.Status.Disks {
			switch {
			case d.UID != disk:
			case d.Ready:
				at = append(at, n.Name)
				if !alive {
					return ""
				}
			case n.Name == from && d.Gone && alive:
				gone = true
			}
		}
	}
	if !gone || len(at) != 1 || at[0] == from {
		return ""
	}
	return at[0]
}

// MoveTo has an object say that its disk is on another node. node is where its spec says it.
func MoveTo(obj metav1.Object, node *string, to string) {
	*node = to
	labels := maps.Clone(obj.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	labels[LabelNode] = LabelValue(to)
	obj.SetLabels(labels)
}
