package api

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDiskMovedTo(t *testing.T) {
	now := time.Now()
	node := func(name string, age time.Duration, d DiskStatus) Node {
		n := Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Status.Heartbeat, n.Status.Disks = metav1.NewTime(now.Add(-age)), []DiskStatus{{Path: "/x", UID: "other", Ready: true}, d}
		return n
	}
	ready, gone, broken := DiskStatus{UID: "d", Ready: true}, DiskStatus{UID: "d", Gone: true}, DiskStatus{UID: "d"}
	for name, c := range map[string]struct {
		nodes []Node
		want  string
	}{
		"moved":                             {[]Node{node("a", 0, gone), node("b", 0, ready)}, "b"},
		"not yet anywhere":                  {[]Node{node("a", 0, gone)}, ""},
		"where it was":                      {[]Node{node("a", 0, ready)}, ""},
		"a copy of it":                      {[]Node{node("a", 0, ready), node("b", 0, ready)}, ""},
		"it fails, and there is a copy":     {[]Node{node("a", 0, broken), node("b", 0, ready)}, ""},
		"two have it":                       {[]Node{node("a", 0, gone), node("b", 0, ready), node("c", 0, ready)}, ""},
		"one that is silent may have it":    {[]Node{node("a", 0, gone), node("b", 0, ready), node("c", time.Hour, ready)}, ""},
		"the former node is silent":         {[]Node{node("a", time.Hour, gone), node("b", 0, ready)}, ""},
		"the new node is silent":            {[]Node{node("a", 0, gone), node("b", time.Hour, ready)}, ""},
		"the former node does not know it":  {[]Node{node("a", 0, DiskStatus{UID: "e"}), node("b", 0, ready)}, ""},
		"moved twice, and listed all along": {[]Node{node("a", 0, gone), node("c", 0, gone), node("b", 0, ready)}, "b"},
	} {
		if got := DiskMovedTo(c.nodes, "d", "a", now); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
