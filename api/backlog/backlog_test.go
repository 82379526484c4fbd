package backlog_test

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api/backlog"
)

// lengths are what the metric says, by loop.
func lengths(t *testing.T) map[string]float64 {
	t.Helper()
	all, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range all {
		if f.GetName() == "drover_loop_backlog" {
			for _, m := range f.GetMetric() {
				out[m.GetLabel()[0].GetValue()] += m.GetGauge().GetValue()
			}
		}
	}
	return out
}

// TestLength: the metric counts what waits, until the queue ends; two queues of one name are one loop's.
func TestLength(t *testing.T) {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Millisecond, time.Second)
	one, other := backlog.New("tested", limiter), backlog.New("tested", limiter)
	if _, ok := one.(priorityqueue.PriorityQueue[reconcile.Request]); !ok {
		t.Error("controllers do not see that it has priorities")
	}
	for _, name := range []string{"a", "b"} {
		one.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: name}})
	}
	other.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: "a"}})
	if n := lengths(t)["tested"]; n != 3 {
		t.Errorf("three wait, the metric says %v", n)
	}
	got, _ := one.Get()
	if n := lengths(t)["tested"]; n != 2 {
		t.Errorf("one was taken, the metric says %v", n)
	}
	one.Done(got)
	one.ShutDown()
	other.ShutDownWithDrain()
	if n, there := lengths(t)["tested"]; there {
		t.Errorf("both have ended, the metric says %v", n)
	}
}
