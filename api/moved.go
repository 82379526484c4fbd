package api

import (
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DiskMovedTo is the node that now has another node's former disk; empty: no node surely has the disk. The former
// node must be alive and report the disk as gone, and exactly one node, alive too, must have the disk: a silent
// node's report is past, and of two nodes with the disk one has a copy.
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

// MoveTo writes the disk's new node into an object; node is the field of the object's spec.
func MoveTo(obj metav1.Object, node *string, to string) {
	*node = to
	labels := maps.Clone(obj.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	labels[LabelNode] = LabelValue(to)
	obj.SetLabels(labels)
}
