package planner

import (
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestReplicaThatFetchesIsNoRedundancy: the volume's message says that a replica still fetching layers counts as no
// copy.
func TestReplicaThatFetchesIsNoRedundancy(t *testing.T) {
	v := &api.Volume{Spec: api.VolumeSpec{NumberOfReplicas: 2}}
	v.Status.Members = []string{"v.a", "v.b"}
	mine := make([]api.Replica, 2)
	for i := range mine {
		mine[i].Name = v.Status.Members[i]
		mine[i].Status.Mode = api.ReplicaCurrent
	}
	look := func() {
		describeVolume(v, mine, nil, func(string) bool { return false }, func(*api.Replica) string { return "" })
	}
	mine[1].Status.Fetching = "about 90 % of image debian from node n1"
	look()
	if v.Status.Robustness != api.RobustDegraded || !strings.Contains(v.Status.Message, "1 of 2 replicas are whole") ||
		!strings.Contains(v.Status.Message, "replica v.b still fetches about 90 % of image debian from node n1") {
		t.Errorf("%s: %s", v.Status.Robustness, v.Status.Message)
	}
	mine[0].Status.Fetching = mine[1].Status.Fetching
	if look(); v.Status.Robustness != api.RobustDegraded {
		t.Errorf("both can be used, and the volume is %s: %s", v.Status.Robustness, v.Status.Message)
	}
	mine[0].Status.Fetching, mine[1].Status.Fetching = "", ""
	if look(); v.Status.Robustness != api.RobustHealthy || v.Status.Message != "" {
		t.Errorf("%s: %s", v.Status.Robustness, v.Status.Message)
	}
}
