package planner

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestReplicaInTheMakingStaysWithItsSource: a disk has moved to another node. The planner assigns the new node no
// replica that still waits for a copy from another disk of the former node.
func TestReplicaInTheMakingStaysWithItsSource(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	moved := api.NewUID()
	for name, d := range map[string]api.DiskStatus{"former": {Path: "/d", UID: moved, Gone: true},
		"new": {Path: "/d", UID: moved, Ready: true}} {
		n := &api.Node{ObjectMeta: apitest.Named(name)}
		s.Create(n)
		apitest.EditStatus(s, n, func(n *api.Node) {
			n.Status.Heartbeat, n.Status.HeartbeatSeconds = metav1.NewTime(time.Now().Add(time.Hour)), 10
			n.Status.Disks = []api.DiskStatus{d}
		})
	}
	stays := map[string]*api.ReplicaSource{"from-another-disk": {Disk: api.NewUID()}, "from-the-same": {Disk: moved}}
	var mine []api.Replica
	for name, from := range stays {
		from.Replica, from.Snapshot = api.NewUID(), api.NewUID()
		r := &api.Replica{ObjectMeta: apitest.Named(name), Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "v", Node: "former",
			Disk: moved, From: from}}
		s.Create(r)
		mine = append(mine, *r)
	}
	p := &volumeReconciler{client: s.Client, events: events.NewFakeRecorder(10), log: s.Log}
	if err := p.adoptMovedReplicas(s.Ctx, apitest.Volume("v", 16<<20), mine, nil); err != nil {
		t.Fatal(err)
	}
	for name, node := range map[string]string{"from-another-disk": "former", "from-the-same": "new"} {
		r := &api.Replica{ObjectMeta: apitest.Named(name)}
		if err := s.Client.Get(s.Ctx, client.ObjectKeyFromObject(r), r); err != nil || r.Spec.Node != node {
			t.Errorf("replica %s is on node %s: %v", name, r.Spec.Node, err)
		}
	}
}
