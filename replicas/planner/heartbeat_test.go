package planner

import (
	"testing"
	"time"

	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestVolumeOfASilentNodeIsUnknown: the robustness of a volume is unknown while its node sends no heartbeats.
func TestVolumeOfASilentNodeIsUnknown(t *testing.T) {
	t.Parallel()
	server := apitest.Start(t)
	createVolume(server, "v1")
	mgr := server.Manager(nil)
	if err := watch.AddIndexes(mgr); err != nil {
		t.Fatal(err)
	}
	server.Run(mgr)
	if !mgr.GetCache().WaitForCacheSync(server.Ctx) {
		t.Fatal("the cache does not start")
	}
	var n api.Node
	if err := server.Client.Get(server.Ctx, client.ObjectKey{Name: "n1"}, &n); err != nil {
		t.Fatal(err)
	}
	p := &volumeReconciler{client: mgr.GetClient(), events: events.NewFakeRecorder(10), log: server.Log, silent: map[string]bool{}}
	s := &heartbeatReconciler{p, n.Status.Heartbeat.Add(-time.Hour), time.Hour}
	req := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&n)}
	hear := func() bool {
		t.Helper()
		if _, err := s.Reconcile(server.Ctx, req); err != nil {
			t.Fatal(err)
		}
		return !p.isSilent("n1")
	}
	describes := func(want api.Robustness) { // as soon as the planner's cache has what the API has
		t.Helper()
		server.AwaitVolume("v1", "described as "+string(want), func(v *api.Volume) bool {
			mine, err := p.replicasOf(server.Ctx, v)
			if err != nil {
				t.Fatal(err)
			}
			describeVolume(v, mine, nil, p.isSilent, p.deadDisk(server.Ctx))
			return v.Status.State == api.VolumeDetached && v.Status.Robustness == want
		})
	}
	if !hear() {
		t.Fatal("it beats")
	}
	describes(api.RobustHealthy)
	s.limit = time.Nanosecond
	if hear() {
		t.Fatal("too long ago")
	}
	describes(api.RobustUnknown)
	s.limit = time.Hour
	if !hear() {
		t.Fatal("it beats again")
	}
	describes(api.RobustHealthy)
}
