package describe

import (
	"fmt"
	"io"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/disks"
	"drover.io/drover/driver/cli/text"
)

// Node writes the fields of a node and a table of its disks.
func Node(w io.Writer, n *api.Node) {
	s := n.Status
	text.Fields(w, "Name", n.Name, "Ready", NodeReady(n), "Heartbeat", text.Age(s.Heartbeat)+" ago", "Schedulable",
		fmt.Sprint((n.Spec.Schedulable == nil || *n.Spec.Schedulable) && !n.Spec.EvictionRequested),
		"Zone", n.Labels[api.LabelZone], "Tags", strings.Join(n.Spec.Tags, ", "),
		"Addresses", strings.Join(s.Addresses, ", "), "Kernel", s.Kernel, "Version", s.Version,
		"Survives kill -9", map[bool]string{true: "yes", false: "no: the kernel lacks FUSE RESEND (6.9)"}[s.Resend])
	fmt.Fprintln(w, "\nDisks:")
	var rows [][]string
	for _, d := range disks.OnNode(n) {
		rows = append(rows, DiskRow(&d, "")[1:])
	}
	_ = text.Table(w, strings.TrimPrefix(DiskHeader, "NODE "), rows)
	text.PrintConditions(w, s.Conditions)
}

// DiskHeader is the header of DiskRow.
const DiskHeader = "NODE PATH UID READY FS CAPACITY AVAILABLE TAGS MESSAGE"

// DiskRow is the row of a disk in a table; left is the rest on an evicted disk.
func DiskRow(d *disks.Disk, left string) []string {
	msg := d.Status.Message
	switch {
	case d.Spec.EvictionRequested:
		msg = strings.TrimPrefix(msg+"; being evicted"+left, "; ")
	case d.Spec.Schedulable != nil && !*d.Spec.Schedulable:
		msg = strings.TrimPrefix(msg+"; takes no new replicas and images", "; ")
	}
	return []string{d.Node, d.Spec.Path, string(d.Status.UID), fmt.Sprint(d.Status.Ready), d.Status.FSType,
		text.SomeBytes(d.Status.Capacity), text.SomeBytes(d.Status.Available), strings.Join(d.Spec.Tags, ","), msg}
}

// NodeReady returns the status of the condition Ready; Unknown: the heartbeat is too old, or no condition exists.
func NodeReady(n *api.Node) string {
	if time.Since(n.Status.Heartbeat.Time) > NodeSilent {
		return "Unknown"
	}
	for _, c := range n.Status.Conditions {
		if c.Type == api.ConditionReady {
			return string(c.Status)
		}
	}
	return "Unknown"
}

// NodeSilent is the maximum age of a heartbeat; nodes renew the heartbeat every 10 s.
const NodeSilent = 40 * time.Second
